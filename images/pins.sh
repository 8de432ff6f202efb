#!/bin/sh
# pins.sh: write a list of packages for each layer into /pins. A list names the packages that a part
# of pyproject.toml needs, with the versions from requirements/cpu.txt. A layer is rebuilt only when
# its own list or one of the scripts changes. The scripts are also in /pins.
set -eu
. /pins/uv.sh

compile() { # LIST, then the arguments of `uv pip compile`
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
# On CUDA, the base image provides torch and its dependencies.
grep -vxFf /pins/torch.txt /pins/training.txt >/pins/training-cuda.txt
