#!/usr/bin/env bash
# Checks and measures hf_paged on a machine with a CUDA device, which may have no network.
#
#   scripts/gpu_check.sh wheels       beforehand, with network: fetch the test packages (for TARGET_PYTHON, 3.12) to .wheels/
#   scripts/gpu_check.sh [tests|kernels|engine|profile ...]       on the machine; all four by default
#
# Each part takes at most 8 minutes. The machine needs Python with torch, triton and transformers; pytest and its plugins
# are taken from .wheels/ if the machine lacks them. Results are written as JSON to $OUT (default build/gpu), each with
# the device, the versions and the commit. The exit status is 1 if there is no device, if a part has failed, or if parts
# of Llama's layers are left to torch.
set -uo pipefail
cd "$(dirname "$0")/.."

python="${PYTHON:-python3}"
out="${OUT:-build/gpu}"
limit=480 # seconds a part

packages=(pytest pluggy iniconfig packaging pygments pytest-timeout pytest-xdist execnet hypothesis sortedcontainers)

if [ "${1:-}" = wheels ]; then
  exec "$python" -m pip download --quiet --no-deps --only-binary :all: --python-version "${TARGET_PYTHON:-3.12}" \
    --platform manylinux2014_x86_64 --dest .wheels "${packages[@]}"
fi

export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TRITON_INTERPRET=0 PYTHONUNBUFFERED=1
export PYTHONPATH="$PWD:$PWD/build/gpu-packages${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$out"
"$python" scripts/gpu_report.py device --out "$out/device.json" || exit 1
if [ -d .wheels ] && ! "$python" -c "import pytest, pytest_timeout, xdist, hypothesis" 2>/dev/null; then
  "$python" -m pip install --quiet --no-index --no-deps --target build/gpu-packages .wheels/*.whl || exit 1
fi

pytest=("$python" -m pytest -q -m gpu -p no:cacheprovider)

part_tests() {
  # The swap tests check that transfers overlap with computing, so they run without neighbours.
  local status=0 workers=()
  "$python" -c "import xdist" 2>/dev/null && workers=(-n 12)
  timeout "$((limit - 60))" "${pytest[@]}" "${workers[@]}" --ignore tests/cache/test_swap_gpu.py \
    --junit-xml "$out/tests.xml" || status=1
  timeout 60 "${pytest[@]}" tests/cache/test_swap_gpu.py --junit-xml "$out/tests-swap.xml" || status=1
  "$python" scripts/gpu_report.py tests "$out"/tests*.xml --out "$out/tests.json" || status=1
  return "$status"
}

part_kernels() {
  timeout "$limit" "$python" benchmarks/kernels.py --device cuda --without-flex --json "$out/kernels.json"
}

part_engine() {
  local status=0
  # Of two runs the faster one is shown, because the first contains the compilation of kernels and the capture of graphs.
  timeout 280 "$python" benchmarks/throughput.py --device cuda --model 8b --systems ours,hf-cb,plain --requests 128 \
    --scale 1 --runs 2 --json "$out/throughput.json" || status=1
  timeout 200 "$python" benchmarks/decode_step.py --device cuda --model 8b --batch 1 8 64 \
    --json "$out/decode-step.json" || status=1
  return "$status"
}

part_profile() {
  local status=0
  timeout 240 "$python" benchmarks/decode_step.py --device cuda --model 8b --batch 8 --profile \
    --json "$out/profile.json" || status=1
  timeout 240 "$python" benchmarks/decode_step.py --device cuda --model 8b --batch 1 8 64 --no-fuse \
    --json "$out/decode-step-no-fuse.json" || status=1
  timeout 240 "$python" benchmarks/decode_step.py --device cuda --model 8b --batch 1 8 64 --no-prepack \
    --json "$out/decode-step-no-prepack.json" || status=1
  return "$status"
}

failed=()
[ $# -eq 0 ] && set -- tests kernels engine profile
for part in "$@"; do
  if ! declare -F "part_$part" >/dev/null; then
    echo "unknown part '$part'; parts: tests, kernels, engine, profile" >&2
    exit 2
  fi
done
# A part that fails its trial is left to torch, and nothing but the time would show it.
"$python" scripts/gpu_report.py layers --out "$out/layers.json" || failed+=(layers)
for part in "$@"; do
  echo "== $part"
  start=$SECONDS
  "part_$part" || failed+=("$part")
  echo "== $part: $((SECONDS - start)) s"
done
"$python" scripts/gpu_report.py table "$out" | tee "$out/table.md"
if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]}" >&2
  exit 1
fi
