#!/usr/bin/env bash
# Delete the kind cluster with all its runs. Docker keeps the images.
source "$(dirname "$0")/settings.sh"
need kind
kind delete cluster --name "$CLUSTER"
