#!/usr/bin/env bash
# One GPU, under 8 minutes: are the kernels right, and what does the machinery cost? One JSON file.
#
#   bash slurm/gpu_check.sh [FILE]                   # where there is a GPU
#   srun --gpus=1 --time=10 slurm/gpu_check.sh       # on a cluster
#
# Exit 0: right, 1: a result is wrong or it took too long, 2: no GPU. TASP_PYTHON: as in slurm/site.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
read -ra python <<<"${TASP_PYTHON:-.venv/bin/python}"
out=${1:-results/gpu_check.json}
code=0
timeout 480 "${python[@]}" tests/gpu/check.py --out "$out" || code=$?
if ((code == 124)); then
    printf 'error: not done after 8 minutes; nothing was written to %s\n' "$out" >&2
    code=1
fi
exit "$code"
