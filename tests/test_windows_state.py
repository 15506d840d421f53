"""The state of `clipped_multi_steps`: constant from init on, donated, scanned, batched, mapped, saved and restored."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import oracle
import orbax.checkpoint
import pytest
import windows

pytestmark = pytest.mark.reference_repeats

# sgd multiplies integer leaves by floats, for which it needs standard promotion.
PARAMS = {
    "f32": np.asarray([[1, -2], [3, 4]], np.float32),
    "bf16": jnp.asarray([0.5, 2], jnp.bfloat16),
    "f16": np.asarray(3, np.float16),
    "c64": np.asarray([1 + 2j], np.complex64),
    "int": np.asarray([7, 8], np.int32),
    "none": None,
    "empty": np.zeros((0, 3), np.float32),
}


def make(**options):
  options = dict(every_k=3, loss_scale=ogc.DynamicLossScale(4.0, growth_interval=1)) | options
  return ogc.clipped_multi_steps(optax.sgd(0.5, momentum=0.75), 1.0, **options)


def gradients(value):
  return jax.tree.map(lambda p: np.full(p.shape, value).astype(p.dtype), PARAMS)


def micro_batches():
  """A good window, one with a NaN, and most of a third."""
  return [gradients(value) for value in (1, 2, 3, 1, np.nan, 1, 5, 6)]


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
@pytest.mark.parametrize("every_k", [1, 3])
@pytest.mark.parametrize("scale", [None, 8.0, ogc.DynamicLossScale()])
def test_structure_shapes_and_dtypes_never_change(every_k, scale, standard_promotion):
  tx = make(every_k=every_k, loss_scale=scale)
  run = windows.Run(tx, PARAMS)
  types = windows.types(run.state)
  assert windows.types(jax.eval_shape(tx.init, PARAMS)) == types
  for batch in micro_batches():
    updates = run(batch)
    assert windows.types(run.state) == types
    assert windows.types(updates) == windows.types(PARAMS)
  assert not any(leaf.weak_type for leaf in jax.tree.leaves(run.state))
  assert run.update._cache_size() == 1


def test_integer_leaves_are_zero_but_where_the_optimizer_runs(standard_promotion):
  run = windows.Run(make(), PARAMS)
  emitted = [run(batch)["int"].tolist() for batch in map(gradients, (1, 2, 3, 4, 5, 6))]
  assert emitted == [[0, 0], [0, 0], [3, 3], [0, 0], [0, 0], [6, 6]]


def test_float0_leaves_come_back_as_they_are():
  params = {"w": jnp.ones(2), "n": jnp.zeros((), jnp.int32)}
  inner = optax.masked(optax.sgd(1.0), {"w": True, "n": False})
  run = windows.Run(ogc.clipped_multi_steps(inner, 10.0, every_k=2), params)
  for _ in range(2):
    updates = run(jax.grad(lambda p: 3 * p["w"].sum(), allow_int=True)(params))
  assert updates["n"].dtype == jax.dtypes.float0
  np.testing.assert_array_equal(updates["w"], np.float32([-3, -3]))


def test_accumulators_are_one_a_leaf_of_float32_or_wider(x64):
  params = {"f16": jnp.ones(2, jnp.float16), "bf16": jnp.ones(2, jnp.bfloat16), "f32": jnp.ones(2, jnp.float32),
            "f64": jnp.ones(2, jnp.float64), "c128": jnp.ones(2, jnp.complex128)}
  accumulators = make().init(params).accumulators
  assert {name: str(leaf.dtype) for name, leaf in accumulators.items()} == {
      "f16": "float32", "bf16": "float32", "f32": "float32", "f64": "float64", "c128": "complex128"}
  assert jax.tree.leaves(make(every_k=1).init(params).accumulators) == []


def test_float64_windows_reach_beyond_float32(x64):
  run = windows.Run(make(every_k=2, loss_scale=None), jnp.zeros(2, jnp.float64))
  run(np.asarray([1e200, 0.0]))
  updates = run(np.asarray([0.0, 1e200]))
  assert updates.dtype == np.float64
  np.testing.assert_allclose(updates, [-0.5 * 2**-0.5] * 2, rtol=1e-15)
  assert run.metrics["global_norm"] == pytest.approx(1e200 * 2**-0.5, rel=1e-15)


def test_updates_take_the_parameters_dtypes_though_gradients_have_others(x64):
  for parameter, gradient in (np.float32, np.float64), (np.float64, np.float32), (np.float32, np.float16):
    for every_k in 1, 2:
      run = windows.Run(make(every_k=every_k, loss_scale=None), jnp.zeros(2, parameter))
      types = windows.types(run.state)
      for _ in range(every_k):
        updates = run(np.asarray([0.25, -0.5], gradient))
      assert updates.dtype == parameter and windows.types(run.state) == types
      np.testing.assert_array_equal(updates, np.asarray([-0.125, 0.25], parameter))


def test_complex_windows_clip_by_the_modulus(path):
  tx = ogc.clipped_multi_steps(optax.sgd(1.0), 1.0, every_k=2, loss_scale=3.0)
  run = windows.Run(tx, jnp.zeros(2, jnp.complex64))
  run(np.asarray([36, 0], np.complex64), weight=1)
  updates = run(np.asarray([0, 24j], np.complex64), weight=2)
  np.testing.assert_allclose(updates, np.complex64([-0.6, -0.8j]), rtol=1e-6)
  assert run.metrics["global_norm"] == pytest.approx(20 / 3, rel=1e-6)


@pytest.mark.parametrize("every_k", [1, 3])
def test_scan_goes_as_one_call_after_another(path, every_k):
  params = {"w": np.float32([1, -2]), "b": jnp.asarray([4], jnp.bfloat16)}
  tx = make(every_k=every_k)
  batches = [{"w": np.float32([v, 2 * v]), "b": jnp.asarray([v], jnp.bfloat16)} for v in (1, 2, 30, np.nan, 1, 1, 5)]
  run = windows.Run(tx, params)
  one_by_one = [run(batch) for batch in batches]
  def body(state, batch):
    updates, state = tx.update(batch, state, params)
    return state, updates
  stacked = jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]), *batches)
  state, updates = jax.jit(lambda state: jax.lax.scan(body, state, stacked))(tx.init(params))
  assert oracle.same_bits(state, run.state)
  for i, want in enumerate(one_by_one):
    assert oracle.same_bits(jax.tree.map(lambda leaf: leaf[i], updates), want)


def test_the_state_is_donated_from_the_first_step_on():
  scale = jnp.float32(4)
  for options in dict(every_k=3), dict(every_k=1), dict(every_k=3, loss_scale=scale):
    tx = make(**options)
    params = {"w": jnp.ones(4), "v": jnp.ones(4)}
    def step(params, state, gradients):
      updates, state = tx.update(gradients, state, params)
      return optax.apply_updates(params, updates), state
    step = jax.jit(step, donate_argnums=(0, 1))
    state = tx.init(params)
    for _ in range(4):
      before = jax.tree.leaves((params, state))
      params, state = step(params, state, {"w": jnp.ones(4), "v": jnp.ones(4)})
      assert all(leaf.is_deleted() for leaf in before if leaf.size == 4)
  assert not scale.is_deleted()


def test_without_donation_the_callers_arrays_stay_as_they_are():
  run = windows.Run(make(every_k=2), {"w": jnp.arange(4.0)})
  for value in 1.0, 2.0:
    gradient, state = {"w": jnp.full(4, value)}, run.state
    copies = jax.tree.map(np.array, (gradient, state, run.params))
    run(gradient)
    assert oracle.same_bits(copies, jax.tree.map(np.asarray, (gradient, state, run.params)))


def test_init_takes_shapes_for_parameters():
  tx = make()
  shapes = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, PARAMS))
  assert windows.types(tx.init(shapes)) == windows.types(tx.init(PARAMS))


def test_python_floats_are_parameters_and_gradients_too(standard_promotion):
  run = windows.Run(make(every_k=2, loss_scale=None), {"w": 2.0, "n": 3})
  types = windows.types(run.state)
  for value in 1.0, 0.0:
    updates = run({"w": value, "n": 0})
  assert updates["w"] == np.float32(-0.25) and windows.types(run.state) == types


def test_bits_survive_a_save_by_orbax_in_mid_window(path, tmp_path, standard_promotion):
  tx = ogc.clipped_multi_steps(optax.adamw(0.1), 1.0, every_k=3, loss_scale=ogc.DynamicLossScale(8.0))
  params = {"w": jnp.arange(4.0), "b": jnp.ones(2, jnp.bfloat16)}
  rng = np.random.default_rng(0)
  batches = [{"w": rng.normal(size=4).astype(np.float32), "b": jnp.asarray(rng.normal(size=2), jnp.bfloat16)}
             for _ in range(8)]
  straight, resumed = windows.Run(tx, params), windows.Run(tx, params)
  with orbax.checkpoint.StandardCheckpointer() as checkpointer:
    for i, batch in enumerate(batches):
      want = straight(batch)
      if i in (1, 5):
        checkpointer.save(tmp_path / str(i), resumed.state)
        checkpointer.wait_until_finished()
        resumed = windows.Run(tx, params)
        resumed.state = checkpointer.restore(tmp_path / str(i), jax.eval_shape(tx.init, params))
      assert oracle.same_bits(resumed(batch), want)
    assert oracle.same_bits(resumed.state, straight.state)


def test_bits_survive_numpy_in_mid_window(standard_promotion):
  straight, resumed = windows.Run(make(), PARAMS), windows.Run(make(), PARAMS)
  for batch in map(gradients, (1, 2, 3, 4, 5, 6)):
    want = straight(batch)
    resumed.state = windows.through_numpy(resumed.state)
    assert oracle.same_bits(resumed(batch), want)


def test_members_of_a_batch_are_in_windows_of_their_own(path):
  tx = make(every_k=2)
  params = np.float32([[1, 2], [3, 4], [5, 6]])
  singles = [windows.Run(tx, p) for p in params]
  state = jax.vmap(tx.init)(params)
  update = jax.jit(jax.vmap(lambda g, s, p, b: tx.update(g, s, p, boundary=b)))
  rng = np.random.default_rng(1)
  for step in range(7):
    batch = rng.normal(scale=4, size=(3, 2)).astype(np.float32)
    batch[2, 0] = np.nan if step in (2, 5) else batch[2, 0]
    # The second member ends its first window at once and is one micro-batch ahead from then on.
    ends = np.asarray([False, step == 0, False])
    updates, state = update(batch, state, params, ends)
    for i, single in enumerate(singles):
      np.testing.assert_array_equal(updates[i], single(batch[i], boundary=ends[i]))
  for i, single in enumerate(singles):
    assert oracle.same_bits(jax.tree.map(lambda leaf: leaf[i], state), single.state)


def test_each_number_is_found_by_one_name(standard_promotion):
  adamw = optax.adamw(optax.warmup_cosine_decay_schedule(0, 1e-3, 10, 100))
  tx = ogc.clipped_multi_steps(adamw, 1.0, every_k=4, loss_scale=ogc.DynamicLossScale(32.0))
  state = optax.chain(optax.identity(), tx).init({"w": jnp.zeros(2)})
  want = {"loss_scale": 32.0, "good_windows": 0, "micro_step": 0, "optimizer_step": 0, "updated": False,
          "weight_sum": 0.0, "global_norm": 0.0, "clip_factor": 0.0, "steps": 0, "clipped_steps": 0,
          "nonfinite_steps": 0, "consecutive_nonfinite": 0}
  for name, value in want.items():
    assert optax.tree.get(state, name) == value
  assert optax.tree.get(state, "micro_step") is not optax.tree.get(state, "optimizer_step")
  assert len(optax.tree.get_all_with_path(state, "count")) == 2   # adamw's own: of its moments and of its schedule


def test_what_mirrors_the_parameters_is_mapped_with_them(standard_promotion):
  tx = ogc.clipped_multi_steps(optax.adamw(1e-3), 1.0, every_k=4)
  params = {"w": jnp.zeros((4, 2)), "b": jnp.zeros(2)}
  specs = {"w": "rows", "b": "whole"}
  placed = optax.tree_utils.tree_map_params(tx, lambda leaf, spec: spec, tx.init(params), specs,
                                            transform_non_params=lambda leaf: "whole")
  assert placed.accumulators == specs
  adam = placed.inner_state[0]
  assert adam.mu == specs and adam.nu == specs and adam.count == "whole"
  assert placed.micro_step == placed.scale_state.loss_scale == placed.clip_state.global_norm == "whole"


def test_metrics_between_boundaries_are_the_last_windows():
  run = windows.Run(make(every_k=2, loss_scale=None), jnp.zeros(2))
  seen = []
  for gradient in ([6, 0], [0, 8], [0, 0], [0, 1]):
    run(np.float32(gradient))
    seen.append((run.metrics["global_norm"], run.metrics["clip_factor"], run.metrics["steps"]))
  assert seen == [(0, 0, 0), (5, pytest.approx(0.2), 1), (5, pytest.approx(0.2), 1), (0.5, 1, 2)]


def test_jitted_update_talks_to_no_host(path):
  run = windows.Run(make(), {"w": jnp.ones(3)})
  gradient = {"w": jnp.ones(3)}
  args = (gradient, run.state, run.params)
  compiled = run.update.lower(*args).compile()
  assert "callback" not in compiled.as_text()
  with jax.transfer_guard("disallow"):
    for _ in range(3):
      _, state = compiled(*args)
      args = (gradient, state, run.params)
