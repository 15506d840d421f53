#!/usr/bin/env bash
# The documentation site in build/docs/html: warnings are errors, and the notebooks are executed.
#
#   ci/docs.sh               in a new environment
#   PYTHON=... ci/docs.sh    with a Python that has `.[docs]`
set -euo pipefail
cd "$(dirname "$0")/.."
if [[ -z ${PYTHON:-} ]]; then
  environment=$(mktemp -d)
  trap 'rm -rf "$environment"' EXIT
  python3 -m venv "$environment"
  "$environment/bin/pip" install --quiet '.[docs]'
  PYTHON=$environment/bin/python
fi
rm -rf build/docs
"$PYTHON" -m sphinx --fail-on-warning --keep-going -b html docs build/docs/html
