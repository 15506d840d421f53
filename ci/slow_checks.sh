#!/usr/bin/env bash
# The checks of the CUDA code that need more than the test suite: every architecture, every planted race, and programs
# that XLA compiles for H200s. On a machine with nvcc, but without a GPU:
#
#   pip install '.[test,aot]' && ci/slow_checks.sh
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
"$python" -c "import jax_plugins.xla_cuda13" || { echo "pip install '.[aot]' brings XLA's compiler for GPUs" >&2; exit 1; }
"$python" -m pytest -m slow
"$python" benchmarks/h200_deviceless.py --layers 2 --check
