#!/usr/bin/env bash
# The tests and snippets of the frameworks that the clip is used in, in a new environment.
#
#   ci/hosts.sh [arguments of pytest]
set -euo pipefail
cd "$(dirname "$0")/.."
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
"${PYTHON:-python3}" -m venv "$environment"
"$environment/bin/pip" install --quiet '.[test,hosts]'
"$environment/bin/pip" list | grep -iE "^(jax|optax|flax|dm-haiku|equinox|numpyro|penzai) "
"$environment/bin/pytest" tests/hosts tests/test_doctests.py "$@"
