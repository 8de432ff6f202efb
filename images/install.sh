#!/bin/sh
# install.sh (LIST | WHEEL)...: install exactly these packages into /opt/venv, and compile them to
# bytecode, because a container with a read-only root file system could not save its own bytecode.
set -eu
. "$(dirname "$0")/uv.sh"

for what; do
  case $what in *.txt) set -- --requirements "$what" ;; *) set -- "$what" ;; esac
  uv_packages install --quiet --python /opt/venv/bin/python --no-deps --compile-bytecode "$@"
done
