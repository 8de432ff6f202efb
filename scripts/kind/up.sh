#!/usr/bin/env bash
# A kind cluster whose node holds what a trial needs: Retrace's images and MinIO's. Safe to repeat:
# the cluster stays, and images are built anew where their sources changed.
source "$(dirname "$0")/settings.sh"
need docker kind kubectl helm make

if ! kind get clusters 2>/dev/null | grep -qx "$CLUSTER"; then
  say "making the kind cluster $CLUSTER"
  kind create cluster --name "$CLUSTER" --wait 120s
fi
say "building and loading the images (the first time takes a while)"
make images BUILD=scripts/kind/image.sh TAG=test
docker image inspect "$MINIO_IMAGE" >/dev/null 2>&1 || docker pull --quiet "$MINIO_IMAGE"
kind load docker-image --name "$CLUSTER" "$MINIO_IMAGE"
say "ready. Next: make kind-demo"
