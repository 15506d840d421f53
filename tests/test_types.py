"""Do the annotations of the public names hold, in strict mode and in a user's file?"""

import json
import os
import pathlib
import runpy
import shutil
import subprocess
import sys

import optax_globalclip as ogc
import pytest

USER = pathlib.Path(__file__).parent / "typing/user.py"
PACKAGE = pathlib.Path(ogc.__file__).parent


def pyright(*arguments):
  """What pyright says, as JSON."""
  command = shutil.which("pyright") or shutil.which("pyright", path=pathlib.Path(sys.executable).parent)
  if command is None:
    pytest.skip("pyright is not installed (pip install '.[dev]')")
  done = subprocess.run([command, "--outputjson", "--pythonpath", sys.executable, *map(str, arguments)],
                        capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(PACKAGE.parent)})
  if not done.stdout.startswith("{"):
    pytest.skip(f"pyright does not run here: {(done.stderr or done.stdout).strip().splitlines()[-1:]}")
  return json.loads(done.stdout)


def test_a_users_file_runs():
  runpy.run_path(str(USER))


def test_a_users_file_is_accepted_in_strict_mode_and_wrong_calls_are_refused(tmp_path):
  shutil.copy(USER, tmp_path)
  config = {"typeCheckingMode": "strict", "reportUnnecessaryTypeIgnoreComment": "error",
            "reportMissingTypeStubs": False}  # optax says nothing of its types
  (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
  found = pyright("--project", tmp_path / "pyrightconfig.json")
  assert found["summary"]["filesAnalyzed"] == 1
  assert [(x["range"]["start"]["line"] + 1, x["message"]) for x in found["generalDiagnostics"]] == []


def test_no_annotation_of_a_public_name_is_missing():
  found = pyright("--verifytypes", "optax_globalclip", "--ignoreexternal")["typeCompleteness"]
  assert found["pyTypedPath"]
  exported = [symbol for symbol in found["symbols"] if symbol["isExported"]]
  assert len(exported) >= len(ogc.__all__)
  # Some of jax's own types are unknown to pyright; those are not ours to annotate.
  said = [x["message"] for symbol in exported for x in symbol["diagnostics"]]
  assert [message for message in said if "missing" in message] == []


def test_the_package_says_that_it_is_typed():
  assert (PACKAGE / "py.typed").exists()
