"""Is the import of the package cheap beside that of jax and optax, which whoever uses it has imported anyway?"""

import os
import subprocess
import sys

import pytest

# Of CPU time, which other processes disturb less. The first import leaves bytecode behind for the others.
TIMED = """
import time
start = time.process_time()
import jax, optax
before = time.process_time()
import optax_globalclip
print(time.process_time() - before, before - start)
"""


@pytest.mark.slow
def test_the_import_adds_little_to_that_of_jax_and_optax():
  environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
  def timed():
    done = subprocess.run([sys.executable, "-c", TIMED], capture_output=True, text=True, check=True, env=environment)
    ours, theirs = map(float, done.stdout.split())
    return ours, ours / theirs
  timed()
  seconds, share = map(min, zip(*(timed() for _ in range(5)), strict=True))
  assert share < 0.05, f"{1e3 * seconds:.0f} ms, {share:.1%} of the import of jax and optax"
