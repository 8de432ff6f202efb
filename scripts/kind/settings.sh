# Sourced by the scripts beside it: what they are about.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
CLUSTER=${KIND_CLUSTER:-retrace}     # name of the kind cluster
NAMESPACE=${NAMESPACE:-retrace}      # where the chart is installed
RELEASE=retrace                      # and under which name
MINIO_IMAGE=quay.io/minio/minio:latest

say() { echo "==> $*"; }
need() { # PROGRAM...
  local program
  for program; do
    command -v "$program" >/dev/null || { echo "$program is not on PATH: see docs/kubernetes.md" >&2; exit 2; }
  done
}
