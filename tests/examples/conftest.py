"""The training example, run from its command line."""

import json

import optax_globalclip as ogc
import pytest
import train_flax

STEPS = 40


@pytest.fixture
def train(tmp_path, standard_promotion, monkeypatch, capsys):
  """Runs the example from its command line; what it printed, its summary and its records."""
  monkeypatch.setattr(train_flax, "SPIKE_WINDOW", 8)
  (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog, and one and two make three\n" * 400)

  def run(*options):
    out = tmp_path / "out"
    fixed = f"--source mine={tmp_path / 'text'} --steps {STEPS} --batch-size 2 --out {out}".split()
    assert train_flax.main([*fixed, *options]) == 0
    assert (out / "training.png").stat().st_size > 0
    summary = json.loads((out / "summary.json").read_text())
    records = {run: ogc.History.read(out / f"{run}.jsonl") for run in summary["runs"]}
    return capsys.readouterr().out, summary, records

  return run
