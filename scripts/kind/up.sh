#!/usr/bin/env bash
# Create a kind cluster, and load the images for a trial (Retrace's and MinIO's) onto its node. Safe
# to repeat: an existing cluster is kept, and only images whose sources changed are rebuilt.
source "$(dirname "$0")/settings.sh"
need docker kind kubectl helm make

if ! kind get clusters 2>/dev/null | grep -qx "$CLUSTER"; then
  say "creating the kind cluster $CLUSTER"
  kind create cluster --name "$CLUSTER" --wait 120s
fi
say "building and loading the images (the first time takes a while)"
make images BUILD=scripts/kind/image.sh TAG=test
docker image inspect "$MINIO_IMAGE" >/dev/null 2>&1 || docker pull --quiet "$MINIO_IMAGE"
kind load docker-image --name "$CLUSTER" "$MINIO_IMAGE"
say "ready; next: make kind-demo"
