#!/usr/bin/env bash
# google-tunix's PeftTrainer with the clip, in an environment of its own: its dependency tree is large (1.6 GB).
#
#   ci/tunix.sh [arguments of pytest]
set -euo pipefail
cd "$(dirname "$0")/.."
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
"${PYTHON:-python3}" -m venv "$environment"
"$environment/bin/pip" install --quiet google-tunix . hypothesis pytest pytest-xdist
"$environment/bin/pip" list | grep -iE "^(jax|optax|flax|google-tunix) "
"$environment/bin/pytest" tests/hosts/test_tunix.py "$@"
