"""The training example with a loss scale, float16 compute and micro-batches."""

import json

import corpus
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import pytest
import train_flax
from model import Size

SMALL = Size(vocabulary=300, width=32, layers=1, heads=2, length=16, learning_rate=1e-2)
STEPS = 60


@pytest.fixture
def batches(standard_promotion):
  sources = {
    "count": [" ".join(map(str, range(4000)))],
    "words": ["the quick brown fox jumps over the lazy dog " * 400],
  }
  text = corpus.tokenize(sources, vocabulary=SMALL.vocabulary, length=SMALL.length)
  return corpus.Batches(text, rows=16, length=SMALL.length, seed=0, steps=STEPS)


def create(**options):
  """The example's state on parameters drawn here, which spares every test compiling the model's initialisation."""
  options = {"max_norm": 1.0, "learning_rate": SMALL.learning_rate, "steps": STEPS, "seed": 0} | options
  state = jax.eval_shape(lambda: train_flax.create_state(SMALL, **options))
  rng = np.random.default_rng(0)
  params = jax.tree.map(lambda p: jnp.asarray(rng.normal(scale=0.1, size=p.shape), p.dtype), state.params)
  return state.replace(step=0, params=params, opt_state=state.tx.init(params))


def with_loss_scale(state, loss_scale):
  scale_state = state.opt_state.scale_state._replace(loss_scale=jnp.float32(loss_scale))
  return state.replace(opt_state=state.opt_state._replace(scale_state=scale_state))


def test_float16_with_a_dynamic_scale_survives_injected_overflows(batches):
  state = create(dtype="float16", loss_scale=ogc.DynamicLossScale(2.0**12), accumulate=2)
  assert all(p.dtype == np.float32 for p in jax.tree.leaves(state.params))
  losses, skipped, scales = [], [], []
  for step in range(STEPS):
    if step in (15, 35):
      # From here the backward pass overflows float16, until the scale has come down again.
      state = with_loss_scale(state, 2.0**30)
    before = jax.tree.map(np.array, (state.params, state.opt_state.inner_state))
    state, rows, metrics = train_flax.train_step(state, batches.batch(step).tokens, 2)
    if not ogc.has_updated(state):
      skipped.append(step)
      jax.tree.map(np.testing.assert_array_equal, before, (state.params, state.opt_state.inner_state))
    losses.append(float(rows.mean()))
    scales.append(float(metrics["loss_scale"]))
  assert np.isfinite(losses).all()
  for injected, until in (15, 35), (35, STEPS):
    # At once and without a break, each halving the scale, until training goes on.
    steps = [step for step in skipped if injected <= step < until]
    assert steps[:3] == [injected, injected + 1, injected + 2] and len(steps) < until - injected
    assert scales[until - 1] == 2.0 ** (30 - len(steps))
  assert metrics["nonfinite_steps"] == len(skipped)
  assert int(optax.tree.get_all_with_path(state.opt_state, "count")[0][1]) == STEPS - len(skipped)
  assert np.mean(losses[-5:]) < losses[0] - 1


def test_micro_batches_and_bfloat16_make_the_same_steps(batches):
  whole, split, half = create(), create(accumulate=4), create(dtype="bfloat16", loss_scale=1024.0)
  for step in range(10):
    tokens = batches.batch(step).tokens
    whole, rows, metrics = train_flax.train_step(whole, tokens)
    split, split_rows, split_metrics = train_flax.train_step(split, tokens, 4)
    half, half_rows, half_metrics = train_flax.train_step(half, tokens)
    np.testing.assert_allclose(split_rows, rows, rtol=1e-3)
    np.testing.assert_allclose(half_rows.mean(), rows.mean(), rtol=2e-2)
    norm = float(metrics["global_norm"])
    assert float(split_metrics["global_norm"]) == pytest.approx(norm, rel=1e-3)
    assert float(half_metrics["global_norm"]) == pytest.approx(norm, rel=0.1)
  assert int(split.opt_state.optimizer_step) == 10 and int(split.step) == 40


def test_without_these_options_the_clip_stands_before_adamw(standard_promotion):
  state = create()
  clip, adamw = state.opt_state
  stock = jax.eval_shape(optax.adamw(lambda count: 0.1).init, state.params)
  assert isinstance(clip, ogc.ClipState) and jax.tree.structure(adamw) == jax.tree.structure(stock)


def test_the_options_work_together_from_the_command_line(tmp_path, standard_promotion, capsys):
  (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog, and one and two make three\n" * 400)
  out = tmp_path / "out"
  options = f"--source mine={tmp_path / 'text'} --steps 3 --batch-size 4 --out {out}".split()
  assert train_flax.main([*options, "--dtype", "float16", "--loss-scale", "dynamic", "--accumulate", "2"]) == 0
  summary = json.loads((out / "summary.json").read_text())
  assert summary["dtype"] == "float16" and summary["accumulate"] == 2
  assert summary["runs"]["clipped"]["last_loss_scale"] == 2.0 ** (15 - summary["runs"]["clipped"]["nonfinite_steps"])
  for message, wrong in {
    "3 does not divide the 16 sequences": ["--accumulate", "3"],
    "'0' is not a positive number": ["--loss-scale", "0"],
    "invalid choice: 'float8'": ["--dtype", "float8"],
  }.items():
    with pytest.raises(SystemExit) as stopped:
      train_flax.main(["--out", str(out), *wrong])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
