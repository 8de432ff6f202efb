#!/bin/sh
# Write to /pins what each layer installs: the packages that a part of pyproject.toml needs, at the
# versions of requirements/cpu.txt. A layer is built anew when its own list changes, not before.
set -eu
. /src/images/uv.sh

compile() { # LIST, then what of pyproject.toml it is for
  list=$1; shift
  uv_packages compile --quiet --python-version 3.11 --no-header --no-annotate \
    --no-emit-index-url --no-emit-find-links --constraints requirements/cpu.txt \
    --overrides requirements/overrides.txt --output-file "/pins/$list" "$@"
}

cd /src
mkdir /pins
cp images/uv.sh images/install.sh /pins/
compile base.txt pyproject.toml
compile flow.txt pyproject.toml --extra flow --extra kubernetes
echo torch | compile torch.txt -
compile rollout.txt pyproject.toml --extra rollout-cpu
compile training.txt pyproject.toml --extra training
grep '^setuptools==' requirements/cpu.txt >/pins/build.txt
