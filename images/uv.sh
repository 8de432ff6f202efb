# shellcheck shell=sh
# Sourced by the other scripts. Defines `uv`, and `uv_packages`, which is `uv pip` with the package
# sources that the build arguments name:
#   PIP_FIND_LINKS  folder or page of wheels, including torch's CPU build; without it, torch comes
#                   from PyTorch's index
#   PIP_INDEX_URL   index to use in place of the public one
#   PIP_NO_INDEX    1: use no index; PIP_FIND_LINKS must then contain every package

# Use the build machine's certificates, because a mirror or proxy may use a company's certificate.
export UV_SYSTEM_CERTS=1 UV_LINK_MODE=copy

# Install uv only for the step that sources this script, so that no layer contains it.
python3 -m pip install --quiet --root-user-action=ignore --disable-pip-version-check \
  --target /tmp/uv --requirement "$(dirname "$0")/uv.txt"
trap 'rm -rf /tmp/uv' EXIT

uv() { /tmp/uv/bin/uv "$@"; }

uv_packages() {
  command=$1; shift
  if [ -n "${PIP_NO_INDEX:-}" ]; then set -- --no-index "$@"; fi
  if [ -n "${PIP_INDEX_URL:-}" ]; then set -- --default-index "$PIP_INDEX_URL" "$@"; fi
  if [ -n "${PIP_FIND_LINKS:-}" ]; then
    set -- --find-links "$PIP_FIND_LINKS" "$@"
  else
    set -- --torch-backend cpu "$@"
  fi
  uv pip "$command" "$@"
}
