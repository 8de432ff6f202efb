#!/usr/bin/env bash
# `docker build` with the same arguments, then the image named by -t is loaded into the kind cluster:
# the BUILD of `make images` and `make e2e-images`.
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
[ -n "$tag" ] || { echo "image.sh: name the image with -t" >&2; exit 2; }
docker build "${arguments[@]}"
say "loading $tag"
kind load docker-image --name "$CLUSTER" "$tag"
