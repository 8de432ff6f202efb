#!/usr/bin/env bash
# Remove the kind cluster, with all runs in it. Docker keeps the images.
source "$(dirname "$0")/settings.sh"
need kind
kind delete cluster --name "$CLUSTER"
