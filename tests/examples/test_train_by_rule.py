"""The training example with a threshold that follows the norms, and with skipped spikes."""

import numpy as np
import pytest
import train_flax


def column(records, name):
  return np.array([record[name] for record in records["clipped"]])


def test_the_threshold_of_a_rule_is_on_record_as_it_moved(train):
  printed, summary, records = train("--clip-rule", "zclip")
  norms, thresholds, factors = (column(records, name) for name in ("global_norm", "threshold", "clip_factor"))
  assert np.isinf(thresholds[:25]).all() and np.isfinite(thresholds[25:]).all()
  assert len(set(thresholds[25:])) > 1
  np.testing.assert_allclose(factors, np.minimum(1, thresholds / norms), rtol=1e-5)
  assert summary["clip_rule"] == "zclip" and summary["max_norm"] is None
  assert summary["runs"]["clipped"]["last_threshold"] == thresholds[-1]
  assert "threshold at the end" in printed


def test_max_norm_bounds_the_threshold_of_a_rule(train):
  _, _, records = train("--clip-rule", "ema", "--max-norm", "0.5")
  assert column(records, "threshold").max() == 0.5


def test_skipped_spikes_are_on_record_and_apart_from_clipped_steps(train):
  printed, summary, records = train("--skip-spikes", "0.5", "--accumulate", "2")
  counts, factors = column(records, "spike_steps"), column(records, "clip_factor")
  skipped = np.flatnonzero(np.diff(counts, prepend=0))
  assert len(skipped) > 0 and (skipped >= 4).all()
  np.testing.assert_array_equal(np.flatnonzero(factors == 0), skipped)
  run = summary["runs"]["clipped"]
  assert run["skipped_spikes"] == [int(i) + 1 for i in skipped]
  assert run["clipped_steps"] == np.count_nonzero((factors > 0) & (factors < 1))
  assert "steps skipped as spikes" in printed


@pytest.mark.slow
def test_the_unclipped_run_neither_clips_nor_skips(train):
  _, summary, records = train("--compare", "--clip-rule", "autoclip", "--skip-spikes", "0.5")
  runs = summary["runs"]
  assert runs["unclipped"]["skipped_spikes"] == [] and runs["unclipped"]["clipped_steps"] == 0
  assert runs["clipped"]["skipped_spikes"] != []
  assert np.isinf([record["threshold"] for record in records["unclipped"]]).all()
  assert np.isfinite(column(records, "threshold")).all()


@pytest.mark.parametrize("options, message", [
  (["--clip-rule", "adagc"], "invalid choice: 'adagc'"),
  (["--skip-spikes", "0"], "'0' is not a positive number"),
])
def test_a_rule_that_there_is_none_of_is_refused(tmp_path, capsys, options, message):
  with pytest.raises(SystemExit) as stopped:
    train_flax.main(["--out", str(tmp_path), *options])
  assert stopped.value.code == 2
  assert message in capsys.readouterr().err
