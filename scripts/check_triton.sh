#!/usr/bin/env bash
# Tests the GPU kernels with another version of Triton than that of constraints.txt, without a GPU: their machine code
# for all chips, and their results in Triton's interpreter.
#
#   scripts/check_triton.sh VERSION [FOLDER]      FOLDER: of the environment, made if it is missing; build/triton-VERSION
set -euo pipefail
cd "$(dirname "$0")/.."
version="${1:?which version of Triton? For example 3.6.0, the oldest that is supported}"
folder="${2:-build/triton-$version}"
if [ ! -x "$folder/bin/python" ]; then
  "${PYTHON:-python3}" -m venv "$folder"
fi
if ! "$folder/bin/python" -c "import sys, pytest, triton; sys.exit(triton.__version__ != '$version')" 2>/dev/null; then
  grep -v '^triton==' constraints.txt >"$folder/constraints.txt"
  "$folder/bin/pip" install --quiet -c "$folder/constraints.txt" "triton==$version" torch transformers accelerate \
    safetensors typer pytest pytest-timeout pytest-xdist hypothesis
fi
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 "$folder/bin/python" -m pytest -q -m "not gpu" \
  -p no:cacheprovider ${WORKERS:+-n "$WORKERS"} \
  tests/kernels/test_compile_offline.py tests/kernels/test_triton.py tests/kernels/test_triton_sampling.py \
  tests/kernels/test_triton_rows.py tests/kernels/test_triton_experts.py tests/ptx
