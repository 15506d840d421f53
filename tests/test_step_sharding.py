"""Is a fused step of sharded leaves that of one device, wherever they lie, without moving them?"""

import jax
import jax.numpy as jnp
import numpy as np
import optax_globalclip as ogc
import oracle
import pytest
import sharded
from jax.sharding import NamedSharding
from sharded import AUTO, EXPLICIT, P

pytestmark = pytest.mark.reference_repeats

RATE = 0.05


def whole_step(values, bad=0.0, *, on_nonfinite="propagate", **placement):
  """`(parameters, norm)` after two steps; the leaf that is no number passes by."""
  steps = values["steps"]
  grads = {name: x for name, x in values.items() if name != "steps"}
  for name in ("axis_name", "specs"):
    if name in placement:
      placement[name] = {key: value for key, value in placement[name].items() if key != "steps"}
  tx = ogc.clipped_adamw(RATE, 10.0, weight_decay=0.1, monitor=True, on_nonfinite=on_nonfinite, **placement)
  params = {name: (x / x.dtype.type(64)).astype(x.dtype) for name, x in grads.items()}
  state = tx.init(params)
  params, state = tx.step(grads, state, params)
  grads = {name: x + (x * 0).astype(x.dtype) + jnp.asarray(bad).astype(x.dtype) for name, x in grads.items()}
  params, state = tx.step(grads, state, params)
  return params | {"steps": steps}, ogc.clip_metrics(state)["global_norm"]


def check_close(got, want):
  for name, x in want.items():
    assert got[name].dtype == x.dtype
    info = jnp.finfo(x.dtype) if name != "steps" else None
    np.testing.assert_allclose(np.asarray(got[name], np.float32), np.asarray(x, np.float32),
                               rtol=8 * float(info.eps) if info else 0, atol=1e-5 if info else 0)


@pytest.mark.parametrize("where", sharded.WHOLE + sharded.PARTLY_AUTO, ids=lambda f: f.__name__)
def test_a_step_of_shards_is_that_of_one_device(path, where):
  values = sharded.tree()
  want, want_norm = jax.jit(whole_step)(values)
  got, norm = where(whole_step)(values)
  check_close(got, want)
  exact = where in sharded.WHOLE
  assert oracle.ulps(norm, np.longdouble(np.asarray(want_norm))) <= (1 if exact else 16)


@pytest.mark.parametrize("where", [sharded.on_auto_mesh, sharded.on_explicit_mesh, sharded.in_shard_map], ids=lambda f: f.__name__)
def test_a_nan_on_one_shard_is_skipped_on_every_device(path, where):
  def step(values, **placement):
    return whole_step(values, on_nonfinite="skip", **placement)
  values = sharded.tree()
  values["both"][5, 3] = np.nan
  got, norm = where(step)(values)
  # Both steps were skipped: parameters are what they were.
  for name, x in values.items():
    want = x if name == "steps" else (x / x.dtype.type(64)).astype(x.dtype)
    np.testing.assert_array_equal(np.asarray(got[name], np.float32), np.asarray(want, np.float32))
  assert np.all(np.isinf(sharded.everywhere(norm)))


SPECS = {"a": P("x", "y"), "b": P(), "c": P(None, "x")}


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["Auto", "Explicit"])
def test_no_gradient_moves_and_what_was_donated_is_written_in_place(kind):
  mesh = sharded.make_mesh(kind)
  shapes = {"a": (512, 128), "b": (3,), "c": (4, 64)}
  grads, params = (sharded.put({name: np.ones(shape, np.float32) for name, shape in shapes.items()}, mesh, SPECS)
                   for _ in range(2))
  tx = ogc.clipped_adamw(RATE, 1.0)
  state = tx.init(params)
  compiled = jax.jit(lambda params, state, grads: tx.step(grads, state, params), donate_argnums=(0, 1)).lower(
      params, state, grads).compile()
  sent = sharded.collectives(compiled.as_text())
  assert {name for name, _ in sent} <= {"all-reduce"} and len(sent) <= 2 and sum(size for _, size in sent) <= 128
  shard = 512 * 128 * 4 // 8
  assert compiled.memory_analysis().alias_size_in_bytes >= 3 * shard
  assert compiled.memory_analysis().temp_size_in_bytes < shard // 8
  new_params, new_state = compiled(params, state, grads)
  for tree in (new_params, new_state[1][0].mu, new_state[1][0].nu):
    for name, leaf in tree.items():
      assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, SPECS[name]), leaf.ndim)


def test_uneven_shards_are_stepped_to_the_last_element(path):
  mesh = sharded.line(8)
  rng = np.random.default_rng(0)
  values = {"w": rng.standard_normal((13, 3)).astype(np.float32)}
  def step(values):
    # A constraint may leave shards uneven, which an argument may not be.
    uneven = jax.lax.with_sharding_constraint(values, NamedSharding(mesh, P("x")))
    tx = ogc.clipped_adamw(RATE, 1.0)
    return tx.step(uneven, tx.init(uneven), uneven)
  want = jax.jit(lambda values: (lambda tx: tx.step(values, tx.init(values), values))(ogc.clipped_adamw(RATE, 1.0)))(values)
  got = jax.jit(step)(values)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6)


def test_gradients_that_lie_otherwise_than_parameters_go_the_plain_way_or_fail_as_optax_does():
  mesh = sharded.make_mesh(EXPLICIT)
  params = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P("x")))
  grads = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P("y")))
  tx = ogc.clipped_adamw(RATE, 1.0)
  with pytest.raises(Exception, match="[Ss]harding"):
    jax.jit(tx.step)(grads, tx.init(params), params)
