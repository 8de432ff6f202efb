# Settings and functions of the other scripts in this folder, which source this file.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
CLUSTER=${KIND_CLUSTER:-retrace}     # name of the kind cluster
NAMESPACE=${NAMESPACE:-retrace}      # namespace of the installation
RELEASE=retrace                      # name of the Helm release
MINIO_IMAGE=quay.io/minio/minio:latest

say() { echo "==> $*"; }
need() { # PROGRAM...
  local program
  for program; do
    command -v "$program" >/dev/null || { echo "$program is not on PATH; install it (docs/kubernetes.md)" >&2; exit 2; }
  done
}
