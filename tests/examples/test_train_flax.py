"""The training example as a user runs it, and the data order it promises."""

import itertools
import json
import math
import signal
import subprocess
import sys
import time

import corpus
import numpy as np
import optax_globalclip as ogc
import processes
import pytest
import train_flax

PNG = b"\x89PNG\r\n\x1a\n"


def start(folder, *options):
  command = [sys.executable, train_flax.__file__, "--out", folder, *options]
  return processes.start(command, stderr=subprocess.STDOUT)


def left_behind(folder):
  assert (folder / "training.png").read_bytes().startswith(PNG)
  summary = json.loads((folder / "summary.json").read_text())
  return summary, *(ogc.History.read(folder / f"{run}.jsonl") for run in summary["runs"])


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
  folder = tmp_path_factory.mktemp("quick")
  process = start(folder, "--quick")
  output, _ = process.communicate(timeout=240)
  assert process.returncode == 0, output
  return output, *left_behind(folder)


@pytest.fixture(scope="module")
def text():
  sources = {
    "count": [" ".join(map(str, range(4000)))],
    "words": ["the quick brown fox jumps over the lazy dog " * 400],
    "lines": ["x = 1\ny = 2\n" * 500, "z = x + y\n" * 500],
  }
  return corpus.tokenize(sources, vocabulary=300, length=16)


def make_batches(text, seed=0, steps=200):
  return corpus.Batches(text, rows=8, length=16, seed=seed, steps=steps)


def test_quick_run_learns_every_source(quick):
  _, summary, _ = quick
  run = summary["runs"]["clipped"]
  assert list(run["last_held_out"]) == ["docs", "code", "qa"]
  for source, loss in run["last_held_out"].items():
    assert loss < run["first_held_out"][source] - 0.5


def test_every_factor_is_threshold_over_norm(quick):
  _, _, records = quick
  norms = np.array([record["global_norm"] for record in records])
  factors = np.array([record["clip_factor"] for record in records])
  assert np.isfinite(norms).all() and (norms > 0).all()
  np.testing.assert_allclose(factors, np.minimum(1, 1 / norms), rtol=1e-6)


def test_summary_agrees_with_the_metrics(quick):
  output, summary, records = quick
  run = summary["runs"]["clipped"]
  norms = [record["global_norm"] for record in records]
  assert [record["step"] for record in records] == list(range(1, 81))
  assert not summary["interrupted"] and summary["steps"] == run["steps"] == 80
  assert run["clipped_steps"] == sum(norm > 1 for norm in norms) > 0
  assert run["largest_norm"] == max(norms)
  assert norms[run["largest_norm_step"] - 1] == max(norms)
  assert run["last_held_out"] == records[-1]["held_out"]
  assert run["tokens_per_second"] > 0
  assert "80/80" in output and "training.png" in output


def test_interrupt_leaves_figure_and_summary_of_both_runs(tmp_path):
  process = start(tmp_path, "--compare", "--batch-size", "2", "--steps", "100000")
  deadline = time.monotonic() + 240
  log = tmp_path / "unclipped.jsonl"
  while not (log.exists() and log.stat().st_size) and time.monotonic() < deadline:
    assert process.poll() is None, process.communicate()[0]
    time.sleep(0.1)
  process.send_signal(signal.SIGINT)
  output, _ = process.communicate(timeout=60)
  assert process.returncode == 130, output
  summary, clipped, unclipped = left_behind(tmp_path)
  assert summary["interrupted"]
  assert 1 <= summary["steps"] == len(clipped) == len(unclipped)
  assert "held_out" in clipped[-1] and "held_out" in unclipped[-1]
  assert summary["runs"]["unclipped"]["clipped_steps"] == 0
  assert clipped[0]["global_norm"] == pytest.approx(unclipped[0]["global_norm"], rel=1e-6)
  assert unclipped[0]["clip_factor"] == 1 and unclipped[0]["threshold"] == math.inf


def test_bad_arguments_are_explained_and_exit_with_two(tmp_path, capsys):
  (tmp_path / "empty").touch()
  (tmp_path / "short").write_text("too short")
  (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
  (tmp_path / "folder").mkdir()
  cases = {
    "invalid choice: '1t'": ["--size", "1t"],
    "'0' is not a positive number": ["--steps", "0"],
    "invalid int value: 'many'": ["--steps", "many"],
    "'nan' is not a positive number": ["--max-norm", "nan"],
    "--seed: must not be negative": ["--seed", "-1"],
    "'mine' is not NAME=PATH": ["--source", "mine"],
    "two sources have one name": ["--source", "a=b", "a=c"],
    "no file or folder at": ["--source", f"a={tmp_path}/missing"],
    "no UTF-8 text in": ["--source", f"a={tmp_path}/empty"],
    "no UTF-8 text in ": ["--source", f"a={tmp_path}/binary"],
    "source 'b': no UTF-8 text in": ["--source", f"b={tmp_path}/folder"],
    "too few to train on": ["--source", f"a={tmp_path}/short"],
    "--quick is for the tiny size": ["--quick", "--size", "12m"],
  }
  for message, options in cases.items():
    with pytest.raises(SystemExit) as stopped:
      train_flax.main(["--out", str(tmp_path / "out"), *options])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_phases_have_the_reports_lengths_and_jump_in_weight():
  for num_sources in (1, 2, 3, 5):
    schedule = list(itertools.islice(corpus.phases(num_sources, seed=3), 100))
    assert {phase.length for phase in schedule} == set(corpus.PHASE_LENGTHS)
    for phase, following in itertools.pairwise(schedule):
      assert following.start == phase.start + phase.length
      assert phase.weights.shape == (num_sources,)
      assert phase.weights.sum() == pytest.approx(1)
      assert (phase.weights > 0).all()
      jump = np.abs(following.weights - phase.weights).max()
      assert num_sources == 1 or jump >= 0.1


def test_batches_depend_on_seed_and_step_alone(text):
  first, second = make_batches(text), make_batches(text, steps=10_000)
  for step in (150, 3, 0):
    np.testing.assert_array_equal(first.batch(step).tokens, second.batch(step).tokens)
  other = make_batches(text, seed=1)
  assert not np.array_equal(first.batch(0).tokens, other.batch(0).tokens)
  assert not np.array_equal(first.batch(0).tokens, first.batch(1).tokens)


def test_rows_come_from_sources_in_the_phases_proportions(text):
  batches = make_batches(text)
  phase = batches.phases[0]
  counts = sum(np.bincount(batches.batch(step).source, minlength=3) for step in range(phase.length))
  drawn = counts / counts.sum()
  np.testing.assert_allclose(drawn, phase.weights, atol=0.2)


def test_held_out_rows_are_not_trained_on(text):
  held_out = make_batches(text).held_out(rows=2)
  numbers = text.train[text.names.index("count")]
  windows = np.lib.stride_tricks.sliding_window_view(numbers, 17)
  for row in held_out.tokens[held_out.source == text.names.index("count")]:
    assert not (windows == row).all(axis=1).any()


def test_corpus_is_the_same_in_another_process():
  words = "the quick brown fox jumps over the lazy dog " * 400
  code = (
    "import corpus, hashlib; "
    f"text = corpus.tokenize({{'words': [{words!r}]}}, vocabulary=300, length=16); "
    "print(hashlib.sha256(text.train[0].tobytes()).hexdigest())"
  )
  digests = {processes.output(processes.python(code), PYTHONHASHSEED=seed) for seed in ("1", "2")}
  assert len(digests) == 1


def test_installed_text_keeps_examples_out_of_the_code():
  sources = corpus.installed_sources()
  assert all(">>> " in example for example in sources["qa"])
  assert not any(corpus.EXAMPLE.search(module) for module in sources["code"])
  assert min(sum(map(len, documents)) for documents in sources.values()) > 100_000


def test_folder_source_reads_text_and_skips_hidden_and_binary_files(tmp_path):
  (tmp_path / "b").mkdir()
  (tmp_path / "b" / "two.md").write_text("two")
  (tmp_path / "a.txt").write_text("one")
  (tmp_path / ".hidden").write_text("no")
  (tmp_path / "c.bin").write_bytes(b"\xff\xfe\x00")
  assert corpus.read_source("mine", tmp_path) == ["one", "two"]
