#!/usr/bin/env bash
# Run the checks that are impossible on a CPU, on 1, 2 or 8 GPUs, in at most an hour. The script runs
# all steps, even after a failed one, compares their results with the expected ones, and writes a
# report. With `--dry-run`, it only prints and checks the plan.
#   scripts/gpu_hour.sh [--gpus N] [--out FOLDER] [--dry-run]
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHONPATH=$PWD exec "${VENV:-.venv}/bin/python" scripts/gpu_hour.py "$@"
