#!/usr/bin/env bash
# The checks of the CUDA code that take minutes: every architecture, every planted race, programs compiled for an H200.
#
#   pip install '.[test,aot]' && ci/slow_checks.sh
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
OPTAX_GLOBALCLIP_SLOW_CHECKS=1 "$python" -m pytest tests/test_cuda_compiler.py tests/test_cuda_sanitizers.py
if "$python" -c "import jax_plugins.xla_cuda13" 2> /dev/null; then
  "$python" benchmarks/h200_deviceless.py --layers 2 --check
else
  echo "no programs compiled for an H200: pip install '.[aot]' brings XLA's compiler for GPUs"
fi
