"""Other processes: a Python that runs some code, a script, a compiled program."""

import json
import os
import pathlib
import subprocess
import sys
import textwrap

import optax_globalclip as ogc
import pytest

TESTS = pathlib.Path(__file__).parent
ROOT = TESTS.parent
EIGHT_DEVICES = "--xla_force_host_platform_device_count=8"  # for XLA_FLAGS


def environment(**variables):
  """This process's, without the devices and the path that were chosen for it, and with `variables`.

  Python finds there what this process imports: the package that is tested, the tests, benchmarks and examples."""
  kept = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "OPTAX_GLOBALCLIP_BACKEND")}
  folders = [pathlib.Path(ogc.__file__).parents[1], TESTS, ROOT / "benchmarks", ROOT / "examples"]
  path = filter(None, [*map(str, folders), kept.get("PYTHONPATH")])
  return {**kept, "PYTHONPATH": os.pathsep.join(path), **variables}


def python(*code, arguments=()):
  """The command that runs pieces of code one after the other."""
  # -P: the folder in which the tests were started may hold another copy of the package.
  return [sys.executable, "-P", "-c", "\n".join(map(textwrap.dedent, code)), *arguments]


def start(command, *, stderr=subprocess.PIPE, new_session=False, **variables):
  """A running process, for tests that do something meanwhile."""
  return subprocess.Popen(list(map(str, command)), env=environment(**variables), text=True, stdout=subprocess.PIPE,
                          stderr=stderr, start_new_session=new_session)


def run(command, *, timeout=600, **variables):
  """The process when it has ended, however it did; the test fails where that takes too long."""
  try:
    return subprocess.run(list(map(str, command)), env=environment(**variables), text=True, capture_output=True,
                          timeout=timeout)
  except subprocess.TimeoutExpired as error:
    pytest.fail(f"no end after {timeout} s: {(error.stderr or b'').decode()[-2000:]}")


def output(command, **options):
  """What a process prints; the test fails where the process does."""
  done = run(command, **options)
  assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
  return done.stdout


def answer(command, **options):
  """The JSON that a process prints last."""
  return json.loads(output(command, **options).splitlines()[-1])
