"""benchmarks/gpu_check.sh has no GPU here: every step of it runs at a small size on the CPU."""

import json
import sys

import processes
import pytest

BENCHMARKS = processes.ROOT / "benchmarks"


def run(*command):
  return processes.run(command, timeout=2000, PYTHON=sys.executable)


@pytest.mark.slow
def test_every_step_and_every_measurement_runs_on_the_cpu(tmp_path):
  out = tmp_path / "result.json"
  done = run("bash", BENCHMARKS / "gpu_check.sh", "--cpu", out)
  assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
  record = json.loads(out.read_text())
  assert record["platform"] == "cpu"
  assert record["replay"] == {"calls": 12} and record["huge"]["elements"] == 2**16 + 8
  assert record["kernels"] == {"leaves": 16}
  for model, libraries in record["bench"].items():
    for library in ("ogc", "optax"):
      measured = libraries[library]
      chain = {"chain with adamw"} if "leaves" not in model else set()
      assert set(measured) == {"norm", "clip, unclipped", "clip, clipped"} | chain, measured
      for numbers in measured.values():
        assert set(numbers) == {"microseconds", "gb_per_s", "share", "launches"}
        assert numbers["microseconds"] > 0 and numbers["launches"] >= 1


def test_without_a_gpu_it_says_so():
  done = run(sys.executable, BENCHMARKS / "gpu_check.py", "replay")
  if done.returncode == 0:
    pytest.skip("there is a GPU")
  assert "JAX finds no GPU" in done.stderr
