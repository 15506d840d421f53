#!/usr/bin/env bash
# The six lines of the README and the suite against a wheel, in an empty environment whose package nobody may write to.
# The checkout's own package is out of sight: tests run from a copy without it.
#
#   ci/test_wheel.sh dist/*.whl [arguments of pytest]
set -euo pipefail
wheel=$(realpath "$1")
shift
root=$(realpath "$(dirname "$0")/..")
work=$(mktemp -d)
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/environment"
"$work/environment/bin/pip" install --quiet "$wheel"
package=$(cd "$work" && "$work/environment/bin/python" -c "import optax_globalclip, os; print(os.path.dirname(optax_globalclip.__file__))")
awk '/^```python/ {on = 1; next} /^```/ {if (on) exit} on' "$root/README.md" > "$work/readme.py"
echo 'assert ogc.backend_info()["cpu"].startswith("native"), ogc.backend_info()' >> "$work/readme.py"
(cd "$work" && "$work/environment/bin/python" readme.py)
"$work/environment/bin/pip" install --quiet "$wheel[test]"
rm -rf "$package/__pycache__"
chmod -R a-w "$package"
if [[ $(id -u) == 0 ]]; then
  # To root a folder without write bits is no obstacle; one mounted read-only is.
  run=(unshare --mount bash -c 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && shift 0 && exec "$@"' "$package")
else
  run=(env)
fi
tar -C "$root" --exclude=./optax_globalclip --exclude=./.git --exclude=./build --exclude=./.venv -cf - . | tar -C "$work" -xf -
cd "$work"
"${run[@]}" "$work/environment/bin/python" - "$package" << 'END'
import pathlib, sys
try:
  (pathlib.Path(sys.argv[1]) / "x").touch()
except OSError as error:
  print("read-only:", error)
else:
  sys.exit("the package's folder can be written to")
END
"${run[@]}" "$work/environment/bin/pytest" "$@"
