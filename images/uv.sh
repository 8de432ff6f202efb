# shellcheck shell=sh
# Sourced by the other scripts: `uv`, and `uv_packages`, which is `uv pip` with the sources that the
# build was given:
#   PIP_FIND_LINKS  folder or page of wheels, torch's CPU build among them; without it torch comes
#                   from PyTorch's own index
#   PIP_INDEX_URL   index to use in place of the usual one
#   PIP_NO_INDEX    1: the folder of wheels has everything

# The build machine's certificates: a mirror or proxy may have one of a company's own.
export UV_SYSTEM_CERTS=1 UV_LINK_MODE=copy

# Installed for the one step that sources this, so that no layer holds it.
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
