#!/usr/bin/env bash
# Everything that needs a CUDA device, in one command of a few minutes: the tests that skip without
# one, then outputs and step times of a language model. Needs `make setup` first.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
export OMP_NUM_THREADS=1

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "no CUDA device is visible to torch: nothing was checked" >&2
    exit 3
fi
"$python" -c 'import torch; print(torch.cuda.get_device_name(), "torch", torch.__version__)'
timeout 240 "$python" -m pytest -q -p no:cacheprovider -m "not long" \
    tests/device tests/step tests/parallel/test_nccl.py tests/engine/workers/test_channel_processes.py
timeout 400 "$python" scripts/gpu_check.py "$@"
