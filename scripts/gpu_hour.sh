#!/usr/bin/env bash
# What no CPU can show, on 1, 2 or 8 GPUs: runs every step, also after one that failed, compares with
# stated expectations, and writes one report. An hour at most; `--dry-run` prints and checks the plan.
#   scripts/gpu_hour.sh [--gpus N] [--out FOLDER] [--dry-run]
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHONPATH=$PWD exec "${VENV:-.venv}/bin/python" scripts/gpu_hour.py "$@"
