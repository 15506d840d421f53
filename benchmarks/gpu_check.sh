#!/usr/bin/env bash
# Everything that needs a GPU, in under eight minutes. It has not been run on one: this is how to do so.
#
#   pip install '.[test,cuda13]'         # on a machine with an NVIDIA GPU; torch too where it is to be compared
#   benchmarks/gpu_check.sh [result.json]
#   benchmarks/gpu_check.sh --cpu        # every step at a small size on the CPU
#
# 1. the tests that speak of one device, on the GPU, native path
# 2. command buffers: a captured graph replayed with changing data
# 3. compute-sanitizer over every kernel, where it is installed
# 4. a bfloat16 leaf of 2^31 + 8 elements
# 5. norm, clip and chain with adamw beside optax and torch
#
# Writes result.json (benchmarks/results/gpu_check.json), and exits with 1 where a step failed. Each step is stopped
# when its share of the time is over.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
cpu=()
if [[ ${1:-} == --cpu ]]; then cpu=(--cpu); shift; fi
out=${1:-benchmarks/results/gpu_check.json}
mkdir -p "$(dirname "$out")"
rm -f "$out"
failed=0

step() {  # seconds, name, command
  local seconds=$1 name=$2
  shift 2
  if [[ ${#cpu[@]} -gt 0 ]]; then seconds=1800; fi
  echo "== $name"
  timeout "$seconds" "$@" || { echo "== $name: failed ($?)"; failed=1; }
}

tests=(tests/test_cases_numerics.py tests/test_cases_nonfinite.py tests/test_cases_shapes.py
       tests/test_cases_loss_scale.py)
if [[ ${#cpu[@]} -gt 0 ]]; then tests+=(--collect-only); fi
step 100 "tests" env OPTAX_GLOBALCLIP_BACKEND=native "$python" -m pytest -q -n 0 -p no:cacheprovider -k "not reference" \
  "${tests[@]}"

step 30 "replay" "$python" benchmarks/gpu_check.py replay "${cpu[@]}" --out "$out"

if command -v compute-sanitizer > /dev/null && [[ ${#cpu[@]} -eq 0 ]]; then
  step 80 "compute-sanitizer" env XLA_PYTHON_CLIENT_PREALLOCATE=false \
    compute-sanitizer --tool memcheck --error-exitcode 1 "$python" benchmarks/gpu_check.py kernels --out "$out"
else
  echo "== compute-sanitizer: not installed; the kernels run without it"
  step 60 "kernels" "$python" benchmarks/gpu_check.py kernels "${cpu[@]}" --out "$out"
fi

step 40 "huge" "$python" benchmarks/gpu_check.py huge "${cpu[@]}" --out "$out"
if [[ ${#cpu[@]} -gt 0 ]]; then cpu+=(--seconds 600 --budget 1800); fi
step 220 "bench" "$python" benchmarks/gpu_check.py bench "${cpu[@]}" --out "$out"
exit $failed
