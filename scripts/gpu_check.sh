#!/usr/bin/env bash
# Checks and measures hf_paged on a machine with a CUDA device, which may have no network and be lent for minutes only.
#
#   scripts/gpu_check.sh prepare      beforehand, no device: compiles the kernels for sm_90 to build/gpu-kernels.tar.xz
#   scripts/gpu_check.sh wheels       beforehand, with network: fetches what the machine may lack to .wheels/
#   scripts/gpu_check.sh [first]      on the machine: whether everything works, and how long a decode step takes
#   scripts/gpu_check.sh second       on the machine: comparisons, other shapes, throughput
#
# `prepare` needs the machine's versions of Python, torch, triton and transformers. A call ends within DEADLINE seconds
# (500; parts that would have less than LEAST, 15, are left out) and writes to $OUT (build/gpu), packed again after each part: log.txt,
# results.tar.gz, table.md. PYTHON is the interpreter. COMMIT names the commit where .git is absent.
# DRY_RUN=1 runs everything on a CPU at small sizes: whether each part starts, finds its files and writes its results.
# The exit status is 1 if there is no device, if models do not run packed with these versions, or if a part failed.
set -uo pipefail
cd "$(dirname "$0")/.."

python="${PYTHON:-python3}"
out="${OUT:-build/gpu}"
deadline="${DEADLINE:-500}"
least="${LEAST:-15}"
grace="${GRACE:-10}" # seconds that a part has to write its report
dry="${DRY_RUN:-}"
call="${1:-first}"
packages=(pytest pluggy iniconfig packaging pygments pytest-timeout pytest-xdist execnet hypothesis sortedcontainers liger-kernel)
kernels="${KERNELS:-build/gpu-kernels.tar.xz}"

export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 HF_PAGED_NATIVE=0 PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
export TRITON_INTERPRET="${dry:-0}"
export PYTHONPATH="$PWD:$PWD/build/gpu-packages${PYTHONPATH:+:$PYTHONPATH}"
# Triton's files name each other by absolute paths: the folder must be the same where kernels are compiled.
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-/tmp/hf-paged-triton}"

case "$call" in
  wheels)
    exec "$python" -m pip download --quiet --no-deps --only-binary :all: --python-version "${TARGET_PYTHON:-3.12}" \
      --platform manylinux2014_x86_64 --dest .wheels "${packages[@]}" ;;
  prepare)
    rm -rf "$TRITON_CACHE_DIR" && mkdir -p "$TRITON_CACHE_DIR" build || exit 1
    "$python" scripts/gpu/route.py || exit 1
    TRITON_INTERPRET=0 "$python" scripts/gpu/compile_kernels.py ${dry:+--small} || exit 1
    find "$TRITON_CACHE_DIR" -type f ! -name '*.cubin' ! -name '*.json' -delete
    tar -cJf "$kernels" -C "$TRITON_CACHE_DIR" . && ls -l "$kernels"
    exit ;;
  first | second) ;;
  *)
    echo "unknown call '$call'; calls: prepare, wheels, first, second" >&2
    exit 2 ;;
esac

# The hard end, whatever hangs.
if [ -z "${GPU_CHECK_ENDS:-}" ]; then
  mkdir -p "$out"
  GPU_CHECK_ENDS=1 timeout -k 5 $((deadline + 25)) "$0" "$@" 2>&1 | tee "$out/log.txt"
  exit "${PIPESTATUS[0]}"
fi

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
failed=()

part() { # name, limit in seconds, command
  local name="$1" limit="$2" start=$SECONDS left=$((deadline - SECONDS)) status
  shift 2
  [ -z "$dry" ] || limit=$((limit * 3)) # a CPU without the device's 16 cores; the deadline holds
  [ "$left" -lt "$limit" ] && limit=$left
  if [ "$limit" -lt "$least" ]; then
    echo "== $name: left out, $left s are left"
    return
  fi
  echo "== $name (at most $limit s)"
  timeout -s INT -k "$grace" "$limit" "$@" # pytest writes its report after SIGINT
  status=$?
  [ "$status" -eq 0 ] || failed+=("$name")
  echo "== $name: $((SECONDS - start)) s, status $status"
  tar -czf "$out/results.tar.gz" -C "$work" .
}

needed() { # name, limit in seconds, command: without it the call is over
  local before=${#failed[@]}
  part "$@"
  if [ ${#failed[@]} -gt "$before" ]; then
    echo "failed: $1; the other parts would show nothing" >&2
    exit 1
  fi
}

# Small sizes for a dry run.
device=cuda systems=ours,hf-cb model=8b requests=64 context=2048 num_steps=30 batches=(8 1 64 256) profiled=(8 64)
if [ -n "$dry" ]; then
  device=cpu systems=ours model=tiny requests=2 context=20 num_steps=4 batches=(2 1) profiled=(2)
fi
pytest=("$python" -m pytest -q -p no:cacheprovider)
[ -n "$dry" ] && pytest+=(--collect-only -qq)
shapes() { # of kernels.py, by a part of their name
  local only=(--only "$1" --repeats 20)
  [ -n "$dry" ] && only=(--only "decode 1x512" --repeats 1 --dtype float32)
  "$python" benchmarks/kernels.py --device "$device" --without-flex "${only[@]}" --json "$work/kernels-$2.json"
}
steps() { # name of the result, options
  local name="$1"
  shift
  "$python" benchmarks/decode_step.py --device "$device" --model "$model" --context "$context" --steps "$num_steps" \
    --json "$work/$name.json" "$@"
}
throughput() { # name of the result, options
  local name="$1"
  shift
  "$python" benchmarks/throughput.py --device "$device" --runs 1 --json "$work/$name.json" "$@"
}
export -f shapes steps throughput
export python device model context num_steps work dry

first() {
  local tests
  mapfile -t tests < <(grep -rl --include 'test_*.py' 'mark\.gpu' tests | grep -v test_swap_gpu | sort)
  [ -n "$dry" ] || tests+=(-n 12)
  part smoke 90 "$python" scripts/gpu/smoke.py "$work/smoke.json" --device "$device" ${dry:+--limit 240}
  part layers 40 "$python" scripts/gpu_report.py layers --out "$work/layers.json" ${dry:+--dry-run}
  part steps 130 bash -c 'steps decode-step "$@"' - --batch "${batches[@]}" --profile "${profiled[@]}" --deadline 105
  part tests 130 "${pytest[@]}" -m "gpu${dry:+ or not gpu}" --timeout 90 --maxfail 60 --junit-xml "$work/tests.xml" "${tests[@]}"
  part decode 60 bash -c 'shapes "decode 8" decode'
  part prefill 40 bash -c 'shapes "prefill 1x8192" prefill'
  # Transfers overlap with computing in these tests, so they run without neighbours.
  part swap 40 "${pytest[@]}" tests/cache/test_swap_gpu.py --timeout 35 --junit-xml "$work/tests-swap.xml"
  part throughput 90 bash -c 'throughput throughput "$@"' - --model "$model" --systems ours --requests "$requests" --scale 0.5
}

second() {
  # 32 prompts of 128 tokens, 512 new ones each.
  local shape=qwen3-4b lengths=(128 512) count=32
  [ -n "$dry" ] && shape=tiny lengths=(5 4) count=2
  for _ in $(seq "$count"); do
    echo "{\"timestamp\": 0, \"input_length\": ${lengths[0]}, \"output_length\": ${lengths[1]}}"
  done >"$work/trace.jsonl"
  part batching 150 bash -c 'throughput throughput-32x512 "$@"' - --model "$shape" --systems "$systems" \
    --trace "$work/trace.jsonl" --requests "$count"
  part no-fuse 80 bash -c 'steps decode-step-no-fuse "$@"' - --batch "${batches[@]:0:3}" --no-fuse --deadline 60
  # Liger's kernels run on a device only.
  [ -n "$dry" ] || part liger 60 bash -c 'steps decode-step-liger "$@"' - --batch "${batches[@]:0:2}" --liger --deadline 45
  part no-prepack 80 bash -c 'steps decode-step-no-prepack "$@"' - --batch "${batches[@]:0:3}" --no-prepack --deadline 60
  part tiles 80 "$python" scripts/gpu/tiles.py "$work/tiles.json" --device "$device" ${dry:+--tokens 40}
  part decode-1 40 bash -c 'shapes "decode 1x" decode-1'
  part samples 60 bash -c 'shapes "samples" samples'
  part uniform 40 bash -c 'shapes "decode uniform" uniform'
  part throughput 120 bash -c 'throughput throughput "$@"' - --model "$model" --systems "$systems" --requests "$requests" --scale 0.5
}

mkdir -p "$TRITON_CACHE_DIR"
[ -f "$kernels" ] && tar -xJf "$kernels" -C "$TRITON_CACHE_DIR"
before=$(ls "$TRITON_CACHE_DIR" | wc -l)
[ -n "$dry" ] || nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.max.sm,temperature.gpu --format=csv,noheader
needed device 60 "$python" scripts/gpu_report.py device --out "$work/device.json" ${dry:+--dry-run}
has_all='import importlib.util as i, sys; sys.exit(not all(map(i.find_spec, sys.argv[1:])))'
if [ -d .wheels ] && ! "$python" -c "$has_all" pytest pytest_timeout xdist hypothesis liger_kernel; then
  "$python" -m pip install --quiet --no-index --no-deps --target build/gpu-packages .wheels/*.whl || exit 1
fi
needed imports 60 "$python" -c "import hf_paged, typer, pytest, pytest_timeout, xdist, hypothesis"
needed route 60 "$python" scripts/gpu/route.py
"$call"
reports=("$work"/tests*.xml)
[ -n "$dry" ] || [ ! -f "${reports[0]}" ] || "$python" scripts/gpu_report.py tests "${reports[@]}" --out "$work/tests.json" || failed+=(reports)
"$python" scripts/gpu_report.py table "$work" | tee "$out/table.md"
echo "$(($(ls "$TRITON_CACHE_DIR" | wc -l) - before)) entries were added to the $before of Triton's cache"
tar -czf "$out/results.tar.gz" -C "$work" .
echo "== end: $SECONDS s"
if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]}" >&2
  exit 1
fi
