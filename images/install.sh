#!/bin/sh
# install.sh VENV LIST...: install exactly the packages of the lists, compiled to bytecode: with a
# read-only root file system, a container could not keep what it compiles.
set -eu
. "$(dirname "$0")/uv.sh"

venv=$1; shift
for list; do
  uv_packages install --quiet --python "$venv/bin/python" --no-deps --compile-bytecode \
    --requirements "$list"
done
