#!/usr/bin/env bash
# Run `docker build` with the same arguments, then load the image that -t names into the kind cluster.
# `make images` and `make e2e-images` use this script as BUILD.
source "$(dirname "$0")/settings.sh"
need docker kind

arguments=("$@")
tag=
while (($#)); do
  case $1 in
    -t | --tag) tag=$2; shift ;;
    --tag=*) tag=${1#--tag=} ;;
  esac
  shift
done
[ -n "$tag" ] || { echo "image.sh: no image name given; add -t NAME" >&2; exit 2; }
docker build "${arguments[@]}"
say "loading $tag"
kind load docker-image --name "$CLUSTER" "$tag"
