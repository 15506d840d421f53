"""Does the plot of a run's history show its spikes, and name the leaf that made them?"""

import math
import sys

import gpt
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import pytest
from optax_globalclip import plot

PNG = b"\x89PNG\r\n\x1a\n"
SMALL = gpt.SMALL._replace(width=8, vocabulary=32)
PLANTED, STEP = "layers/7/mlp/up", 21


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
  """Training with 148 leaves, of whose gradients one is 100 times too large at one step: the state then, the history."""
  random = np.random.default_rng(0)
  shapes = gpt.parameters(SMALL)
  params = jax.tree.map(lambda x: jnp.asarray(random.standard_normal(x.shape), x.dtype), shapes)
  # The largest leaf of every step is another than the planted one.
  scales = jax.tree_util.tree_map_with_path(lambda p, _: 5.0 if "tokens" in jax.tree_util.keystr(p) else 1.0, shapes)
  tx = optax.chain(ogc.global_clip(10.0, monitor=True), optax.sgd(1e-3))
  state, update = tx.init(params), jax.jit(tx.update)
  file = tmp_path_factory.mktemp("planted") / "run.jsonl"
  with ogc.History(file, max_norm=10.0) as history:
    for step in range(1, 41):
      def gradient(path, leaf, scale, step=step):
        times = 100 if step == STEP and PLANTED == jax.tree_util.keystr(path, simple=True, separator="/") else 1
        return jnp.asarray(times * scale * random.standard_normal(leaf.shape), leaf.dtype)
      gradients = jax.tree_util.tree_map_with_path(gradient, params, scales)
      _, state = update(gradients, state, params)
      history.write(state)
      if step == STEP:
        then = state
  return then, file


def test_the_report_names_the_planted_leaf_of_148(planted):
  then, _ = planted
  rows = ogc.leaf_report(then).rows
  assert len(rows) == 148 and rows[0].path == PLANTED and rows[0].share > 0.9


def test_the_plot_finds_the_planted_spike_and_names_its_leaf(planted, tmp_path, capsys):
  _, file = planted
  assert plot.main([str(file), "--out", str(tmp_path / "run.png")]) == 0
  spike, = plot.find_spikes(ogc.History.read(file))
  assert (spike.step, spike.leaf) == (STEP, PLANTED) and spike.ratio > 3
  lines = capsys.readouterr().out.splitlines()
  assert lines[0] == "run: 40 steps, 40 clipped, 0 not finite, 1 above 3 x the median"
  assert lines[2].split() == [str(STEP), f"{spike.norm:.4g}", f"{spike.ratio:.3g}", PLANTED]
  assert (tmp_path / "run.png").read_bytes().startswith(PNG)
  figure = plot.draw({"run": ogc.History.read(file)})
  norm, factor, leaves = figure.axes
  assert f"{spike.ratio:.3g} × {PLANTED}" in [text.get_text() for text in norm.texts]
  assert PLANTED in [line.get_label() for line in leaves.get_lines()]
  drawn = {line.get_label(): line.get_ydata() for line in norm.get_lines()}
  assert drawn["run"][STEP - 1] == spike.norm and set(drawn["run: threshold"]) == {10.0}
  np.testing.assert_allclose(factor.get_lines()[0].get_ydata(), 10 / drawn["run"], rtol=1e-6)


def test_the_leaf_that_rose_is_named_not_the_one_that_is_always_largest():
  records = [{"step": i, "global_norm": 10.0, "leaves": {"embedding": 10.0}} for i in range(5)]
  records.append({"step": 5, "global_norm": 45.0, "leaves": {"embedding": 11.0, "kernel": 43.0}})
  records.append({"step": 6, "global_norm": 45.0, "leaves": {"embedding": 32.0, "kernel": 31.0}})
  assert [spike.leaf for spike in plot.find_spikes(records)] == ["kernel", "kernel"]


def test_norms_that_are_not_finite_are_spikes_and_name_the_leaf_that_holds_them():
  records = [{"step": i, "global_norm": 1.0, "leaves": {"a": 1.0}} for i in range(3)]
  records.append({"step": 3, "global_norm": math.nan, "leaves": {"b": math.nan, "a": 1.0}, "nonfinite": {"b": 2}})
  records.append({"step": 4, "global_norm": math.inf})
  assert [(spike.step, spike.leaf) for spike in plot.find_spikes(records)] == [(3, "b"), (4, "")]
  assert len(plot.draw({"run": records}).axes[0].texts) == 2


def test_a_threshold_that_moves_and_runs_without_leaves_are_drawn_side_by_side(tmp_path, capsys):
  folder = tmp_path / "runs"
  tx = ogc.global_clip(1.0, monitor=True)
  plain = ogc.clipped_multi_steps(optax.sgd(1.0), 1.0)
  params, gradient = [jnp.zeros(2)], [jnp.ones(2)]
  with ogc.History(folder / "leaves.jsonl") as one, ogc.History(folder / "plain.jsonl") as other:
    state, window = tx.init(params), plain.init(params)
    for step in range(3):
      state, (_, window) = tx.update(gradient, state)[1], plain.update(gradient, window, params)
      one.write(state, threshold=1.0 + step, spike_steps=step)
      other.write(window)
  assert plot.main([str(folder), "--out", str(tmp_path / "both.png")]) == 0
  assert "leaves: 3 steps, 3 clipped, 0 not finite, 2 skipped as spikes, 0 above" in capsys.readouterr().out
  runs = plot.find_runs([str(folder)])
  figure = plot.draw(runs)
  assert list(runs) == ["leaves", "plain"] and len(figure.axes) == 3
  assert list(figure.axes[0].get_lines()[1].get_ydata()) == [1, 2, 3]


def test_a_run_that_has_just_begun_does_not_keep_the_others_from_being_drawn(tmp_path, capsys):
  for name, lines in {"begun": "", "run": '{"step": 1, "global_norm": 2.0}\n'}.items():
    (tmp_path / f"{name}.jsonl").write_text(lines)
  assert list(plot.find_runs([str(tmp_path)])) == ["run"]
  assert capsys.readouterr().err == "begun: no step is written yet\n"


def test_what_cannot_be_drawn_is_explained(tmp_path, capsys):
  (tmp_path / "other.jsonl").write_text("hello\n")
  (tmp_path / "empty.jsonl").touch()
  (tmp_path / "folder").mkdir()
  for name, message in {"missing": "expected a file that a History wrote, or a folder of them", "folder": "expected a",
                        "other.jsonl": "other.jsonl, line 1: expected the JSON of a step",
                        "empty.jsonl": "empty: no step is written yet"}.items():
    with pytest.raises(SystemExit) as stopped:
      plot.main([str(tmp_path / name)])
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_without_matplotlib_the_spikes_are_printed_and_the_error_says_what_to_install(planted, monkeypatch, capsys):
  class Absent:
    @staticmethod
    def find_spec(name, path, target=None):
      if name == "matplotlib":
        raise ModuleNotFoundError("No module named 'matplotlib'", name=name)

  for module in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
    monkeypatch.delitem(sys.modules, module)
  monkeypatch.setattr(sys, "meta_path", [Absent, *sys.meta_path])
  assert plot.main([str(planted[1])]) == 1
  printed = capsys.readouterr()
  assert PLANTED in printed.out
  assert printed.err == "no figure: matplotlib is not installed (pip install 'optax_globalclip[plot]')\n"
