#!/bin/sh
# pins.sh: write into /pins what each layer installs: the packages that a part of pyproject.toml
# needs, at the versions of requirements/cpu.txt. A layer is built anew when its own list changes,
# and not before; the scripts lie beside the lists because a layer depends on them too.
set -eu
. /pins/uv.sh

compile() { # LIST, then what to compile
  list=$1; shift
  uv_packages compile --quiet --python-version 3.11 --no-header --no-annotate \
    --no-emit-index-url --no-emit-find-links --constraints requirements/cpu.txt \
    --overrides requirements/overrides.txt --output-file "/pins/$list" "$@"
}

cd /src
compile base.txt pyproject.toml
compile flow.txt pyproject.toml --extra flow --extra kubernetes
echo torch | compile torch.txt -
compile rollout.txt pyproject.toml --extra rollout-cpu
compile reward.txt pyproject.toml --extra reward
compile training.txt pyproject.toml --extra training
# On CUDA, torch and what it needs are the base image's own.
grep -vxFf /pins/torch.txt /pins/training.txt >/pins/training-cuda.txt
