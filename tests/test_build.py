"""Does a build without a compiler give a package in which all but the native path works? Slow: it builds the package."""

import os
import pathlib
import subprocess
import sys
import zipfile

import pytest

pytestmark = pytest.mark.slow
ROOT = pathlib.Path(__file__).parents[1]
USE = """
import jax.numpy as jnp, optax, optax_globalclip as ogc
tx = optax.chain(ogc.global_clip(1.0), optax.sgd(1.0))
updates, _ = tx.update({"w": jnp.array([30.0, 40.0])}, tx.init({"w": jnp.zeros(2)}))
print([round(x, 6) for x in updates["w"].tolist()], ogc.backend_info()["cpu"])
"""


def run(*command, cwd, **environment):
  return subprocess.run(list(map(str, command)), cwd=cwd, env=os.environ | environment, capture_output=True, text=True,
                        check=False)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
  """A folder with the package as a machine without a compiler builds it."""
  folder = tmp_path_factory.mktemp("no_compiler")
  built = run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, ROOT, cwd=folder,
              CXX="/bin/false", CC="/bin/false", CUDACXX="/bin/false")
  assert built.returncode == 0, built.stderr
  wheel, = folder.glob("*.whl")
  with zipfile.ZipFile(wheel) as files:
    files.extractall(folder / "site")
  return folder / "site"


def test_it_builds_without_native_code(package):
  assert (package / "optax_globalclip/py.typed").exists()
  assert list(package.glob("**/*.so")) == []


def test_it_clips_and_says_why_it_is_not_native(package):
  done = run(sys.executable, "-c", USE, cwd=package, OPTAX_GLOBALCLIP_BACKEND="auto")
  assert done.stdout.strip() == ("[-0.6, -0.8] reference: optax_globalclip_cpu.so was not built "
                                 "(BUILD.md says how)"), done.stderr


def test_to_insist_on_native_code_is_an_error_that_says_how_to_build_it(package):
  done = run(sys.executable, "-c", USE, cwd=package, OPTAX_GLOBALCLIP_BACKEND="native")
  assert done.returncode != 0 and "pip install ." in done.stderr


def test_the_cases_pass_on_it(package):
  done = run(sys.executable, "-m", "pytest", "-q", "--numprocesses=0", "-k", "reference", *(
      ROOT / "tests" / f"test_{name}.py" for name in ("cases_numerics", "cases_shapes", "cases_nonfinite", "cases_windows")),
      cwd=package, PYTHONPATH=str(package))
  assert done.returncode == 0, done.stdout[-3000:]
