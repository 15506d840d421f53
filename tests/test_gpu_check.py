"""benchmarks/gpu_check.sh has no GPU here: every step of it runs at a small size on the CPU."""

import json
import os
import pathlib
import subprocess
import sys

import optax_globalclip
import pytest

BENCHMARKS = pathlib.Path(__file__).parent.parent / "benchmarks"


def run(*command):
  package = pathlib.Path(optax_globalclip.__file__).parent.parent
  environment = {**os.environ, "PYTHON": sys.executable, "XLA_FLAGS": "", "PYTHONPATH": str(package)}
  return subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, timeout=600)


@pytest.fixture(scope="module")
def record(tmp_path_factory):
  out = tmp_path_factory.mktemp("gpu_check") / "result.json"
  done = run("bash", BENCHMARKS / "gpu_check.sh", "--cpu", out)
  assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
  return json.loads(out.read_text())


def test_every_step_runs_on_the_cpu(record):
  assert record["platform"] == "cpu"
  assert record["replay"] == {"calls": 12} and record["huge"]["elements"] == 2**16 + 8
  assert record["kernels"] == {"leaves": 16}


@pytest.mark.parametrize("model", ["92M float32", "1.3B bfloat16", "10000 leaves"])
@pytest.mark.parametrize("library", ["ogc", "optax"])
def test_the_benchmark_measures_every_model_and_library(record, model, library):
  measured = record["bench"][model][library]
  wanted = {"norm", "clip, unclipped", "clip, clipped"} | ({"chain with adamw"} if "leaves" not in model else set())
  assert set(measured) == wanted
  for numbers in measured.values():
    assert numbers["microseconds"] > 0 and numbers["gb_per_s"] >= 0 and numbers["launches"] >= 1


def test_without_a_gpu_it_says_so():
  done = run(sys.executable, BENCHMARKS / "gpu_check.py", "replay")
  if done.returncode == 0:
    pytest.skip("there is a GPU")
  assert "JAX finds no GPU" in done.stderr
