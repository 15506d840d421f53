#!/usr/bin/env bash
# The test suite in new environments: every supported Python that is found here, with the oldest and the newest jax.
#
#   ci/all_versions.sh [arguments of pytest]
#   ci/all_versions.sh --ends [arguments of pytest]    only the oldest of both, and the newest of both
set -euo pipefail
cd "$(dirname "$0")/.."

python_of() {  # version: of the path, or pyenv's
  local candidate
  for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
    if "$candidate" -c "" 2> /dev/null; then echo "$candidate"; return; fi
  done
}

oldest="jax==0.9.0 jaxlib==0.9.0"
pairs=({3.11,3.12,3.13}" "{"$oldest",jax})
if [[ ${1:-} == --ends ]]; then shift; pairs=("3.11 $oldest" "3.13 jax"); fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# One wheel serves every Python. What the tests need of CUDA they compile for the host.
"${PYTHON:-python3}" -m pip wheel --quiet --no-deps --wheel-dir "$work" -C cmake.define.OPTAX_GLOBALCLIP_CUDA=OFF .
failed=()
for pair in "${pairs[@]}"; do
  read -r version jax <<< "$pair"
  python=$(python_of "$version")
  if [[ -z $python ]]; then echo "== no Python $version here"; continue; fi
  echo "== Python $version, $jax"
  environment=$work/environment
  # shellcheck disable=SC2086  # one argument a package
  { "$python" -m venv "$environment" && "$environment/bin/pip" install --quiet "$(echo "$work"/*.whl)[test]" $jax &&
    "$environment/bin/pip" list | grep -E "^(jax|jaxlib|optax|flax|numpy) " && "$environment/bin/pytest" "$@"; } || failed+=("$pair")
  rm -rf "$environment"
done
if [[ ${#failed[@]} -gt 0 ]]; then printf 'failed: %s\n' "${failed[@]}"; exit 1; fi
