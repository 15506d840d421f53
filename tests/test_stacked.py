"""Has each layer of a leaf that stacks several a norm of its own?"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import oracle
import pytest
from jax.sharding import NamedSharding
from sharded import AUTO, EXPLICIT, P, line

pytestmark = pytest.mark.reference_repeats


def layers(axis=0, dtype=np.float32):
  """Norms 5, 0.5 and 10 along the axis."""
  return np.moveaxis(np.asarray([[3, 4], [0.3, 0.4], [6, 8]], dtype), 0, axis)


def tree():
  return {"blocks": {"w": layers(), "b": layers(1)}, "head": np.float32([0, 12]), "steps": np.int32(7)}


AXES = {"blocks": {"w": 0, "b": 1}, "head": None, "steps": None}


def update(updates, stacked_axis=AXES, max_norm=1.0, **options):
  tx = ogc.per_tensor_clip(max_norm, stacked_axis=stacked_axis, **options)
  return tx.update(updates, tx.init(updates))


def by_slice(leaf, axis, max_norm=1.0, **options):
  """In float64, each slice by itself."""
  slices = [oracle.clip(part, max_norm, **options) for part in np.moveaxis(leaf, axis, 0)]
  return np.moveaxis(np.stack(slices), 0, axis).astype(np.float64)


jitted_or_not = pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jitted", "eager"])


@jitted_or_not
def test_each_slice_is_clipped_by_its_own_norm(path, wrap):
  got = wrap(lambda t: update(t)[0])(tree())
  for name, axis in ("w", 0), ("b", 1):
    np.testing.assert_allclose(got["blocks"][name], by_slice(layers(axis), axis), rtol=1e-6)
  np.testing.assert_allclose(got["head"], [0, 1], rtol=1e-6)
  assert got["steps"] == 7 and got["blocks"]["b"].shape == layers(1).shape


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.float32, np.complex64], ids=str)
def test_in_every_dtype_and_with_a_loss_scale(path, dtype):
  got = update(layers(dtype=dtype), -2, loss_scale=8.0, update_dtype="complex64" if dtype == np.complex64 else "float32")[0]
  want = np.stack([oracle.clip(part, 1.0, loss_scale=8) for part in layers(dtype=dtype)])
  np.testing.assert_allclose(got, want.astype(np.complex128), rtol=1e-6)


def test_a_slice_at_or_below_the_threshold_keeps_its_bits(path):
  got = update(layers(), 0, 5.0)[0]
  assert oracle.same_bits(got[:2], layers()[:2]) and not oracle.same_bits(got[2], layers()[2])


def test_one_axis_may_speak_for_a_whole_subtree(path):
  values = {"a": layers(), "b": {"c": layers()}, "d": layers()}
  got = update(values, {"a": 0, "b": 0, "d": None})[0]
  np.testing.assert_allclose(got["b"]["c"], by_slice(layers(), 0), rtol=1e-6)
  np.testing.assert_allclose(got["d"], oracle.clip(layers(), 1.0).astype(np.float64), rtol=1e-6)


def test_none_as_a_node_and_masked_and_empty_leaves_pass_through(path):
  values = {"a": layers(), "none": None, "masked": optax.MaskedNode(), "empty": np.zeros((0, 3), np.float32)}
  got = update(values, 0)[0]
  assert jax.tree.structure(got) == jax.tree.structure(values) and got["empty"].shape == (0, 3)
  np.testing.assert_allclose(got["a"], by_slice(layers(), 0), rtol=1e-6)


def test_a_nan_in_one_slice_reaches_every_update(path):
  values = tree()
  values["blocks"]["w"] = values["blocks"]["w"] * np.float32([[1], [np.nan], [1]])
  got = update(values)[0]
  assert np.isnan(got["blocks"]["w"]).all() and np.isnan(got["head"]).all()


def rows(report):
  return {row.path: (round(row.norm, 5), row.nonfinite) for row in report.rows}


WANTED = {"blocks/w/0": (5, 0), "blocks/w/1": (0.5, 0), "blocks/w/2": (10, 0), "blocks/b/0": (5, 0),
          "blocks/b/1": (0.5, 0), "blocks/b/2": (10, 0), "head": (12, 0)}


def test_a_report_of_gradients_has_a_row_for_each_slice(path):
  assert rows(ogc.leaf_report(tree(), stacked_axis=AXES)) == WANTED
  bad = np.concatenate([layers(), np.float32([[np.inf, 0]])])
  assert ogc.leaf_report({"w": bad}, stacked_axis=0).rows[0][::3] == ("w/3", 1)


@jitted_or_not
def test_a_report_of_a_monitored_state_has_a_row_for_each_slice(path, wrap):
  state = wrap(lambda t: update(t, monitor=True)[1])(tree())
  assert rows(ogc.leaf_report(state)) == WANTED
  assert ogc.clip_metrics(state)["clip_factor"] == pytest.approx(1 / 12)


def test_a_rule_has_a_threshold_for_each_slice(path):
  tx = ogc.per_tensor_clip(ogc.ema_clip(factor=2.0, warmup=1), stacked_axis=0)
  state = jax.eval_shape(tx.init, layers())
  assert state.threshold.shape == (3,)
  _, state = tx.update(layers(), tx.init(layers()))
  got, _ = tx.update(3 * layers(), state)
  np.testing.assert_allclose(got, 2 * layers(), rtol=1e-5)


def test_the_state_may_be_made_of_shapes_alone(path):
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree())
  tx = ogc.per_tensor_clip(1.0, stacked_axis=AXES, monitor=True)
  assert jax.tree.structure(tx.init(shapes)) == jax.tree.structure(tx.init(tree()))


def test_the_derivative_and_batches_are_those_of_the_slices(path):
  clip = functools.partial(update, stacked_axis=0)
  got = jax.grad(lambda x: jnp.sum(clip(x)[0][:, 0]))(jnp.asarray(layers()))
  np.testing.assert_allclose(got[0], np.float64([0.128, -0.096]), rtol=1e-5)  # 1 / |x| (e - x <x, e> / |x|^2)
  np.testing.assert_array_equal(got[1], [1, 0])
  batch = jax.vmap(lambda x: clip(x)[0])(jnp.stack([layers(), 2 * layers()]))
  np.testing.assert_allclose(batch[1], by_slice(2 * layers(), 0), rtol=1e-6)


# ----------------------------------------------------------------------------------------------------------------------
# Sharded leaves


def wide():
  return np.repeat(layers(), 4, axis=1) * np.float32(0.5)  # norms as of `layers`


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=str)
@jitted_or_not
def test_leaves_sharded_along_another_axis_are_clipped_by_slice(path, kind, wrap):
  leaf = jax.device_put(wide(), NamedSharding(line(kind=kind), P(None, "x")))
  got = wrap(lambda x: update(x, 0)[0])(leaf)
  np.testing.assert_allclose(got, by_slice(wide(), 0), rtol=1e-6)


@jitted_or_not
def test_on_an_auto_mesh_the_stacked_axis_itself_may_be_sharded(path, wrap):
  values = np.concatenate([wide()] * 3)[:8]
  leaf = jax.device_put(values, NamedSharding(line(), P("x")))
  np.testing.assert_allclose(wrap(lambda x: update(x, 0)[0])(leaf), by_slice(values, 0), rtol=1e-6)


@jitted_or_not
def test_on_an_explicit_mesh_a_sharded_stacked_axis_is_refused_by_name(wrap):
  leaf = jax.device_put(np.concatenate([wide()] * 3)[:8], NamedSharding(line(kind=EXPLICIT), P("x")))
  with pytest.raises(ValueError, match=r"updates\['w'\]: the stacked axis 0 is sharded over 'x'"):
    wrap(lambda x: update(x, 0)[0])({"w": leaf})


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map_it_is_refused_by_name(check_vma):
  run = jax.shard_map(lambda x: update(x, 0, on_nonfinite="zero")[0], mesh=line(), in_specs=P("x"), out_specs=P("x"),
                      check_vma=check_vma)
  with pytest.raises(ValueError, match="updates: inside shard_map"):
    run(np.ones((8, 2), np.float32))


# ----------------------------------------------------------------------------------------------------------------------
# Errors


@pytest.mark.parametrize("axis, error, words", [
    (2, ValueError, r"updates\['w'\]: expected a leaf with the stacked axis 2, got one of shape \(3, 2\)"),
    ({"w": 0, "v": 0}, ValueError, "stacked_axis: expected .* a prefix of the updates"),
    (True, TypeError, "stacked_axis: expected an int, None or a tree of those, got True"),
    ({"w": 0.0}, TypeError, "stacked_axis: expected an int, None or a tree of those, got 0.0"),
])
def test_what_is_no_axis_of_the_leaf_is_refused(axis, error, words):
  with pytest.raises(error, match=words):
    update({"w": layers()}, axis)


def test_an_injected_axis_names_static_args():
  tx = optax.inject_hyperparams(ogc.per_tensor_clip)(1.0, stacked_axis=0)
  with pytest.raises(TypeError, match=r"static_args=\('stacked_axis',\)"):
    tx.update(layers(), tx.init(layers()))


def test_axis_name_mesh_and_states_do_not_go_with_it():
  with pytest.raises(ValueError, match="stacked_axis: expected neither axis_name nor mesh"):
    ogc.per_tensor_clip(1.0, stacked_axis=0, axis_name="x")
  state = update(layers(), 0, monitor=True)[1]
  with pytest.raises(ValueError, match="stacked_axis is for a tree of gradients"):
    ogc.leaf_report(state, stacked_axis=0)
