"""What does a fused step refuse, and does its error name the leaf, what was expected and what came?"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import pytest

PARAMS = {"a": jnp.ones(3), "b": jnp.ones((2, 2))}


def step(grads=PARAMS, params=PARAMS, state=None, **extra):
  tx = ogc.clipped_adamw(0.1, 1.0)
  return tx.step(grads, tx.init(PARAMS) if state is None else state, params, **extra)


@pytest.mark.parametrize("arguments, words", [
    (dict(params={"a": jnp.ones(3)}), r"params\['b'\]: expected the structure of the gradients, which have a leaf of shape \(2, 2\)"),
    (dict(params=PARAMS | {"c": jnp.ones(1)}), r"params\['c'\]: expected the structure of the gradients, which have no such leaf"),
    (dict(params=PARAMS | {"a": jnp.ones(4)}), r"params\['a'\]: expected shape \(3,\), that of the gradient; got \(4,\)"),
    (dict(grads=PARAMS | {"a": None}), r"params\['a'\]: .*no such leaf"),
    (dict(grads={"a": jnp.ones(3), "b": jnp.ones(4)}), r"params\['b'\]: expected shape \(4,\).*got \(2, 2\)"),
    (dict(grads=[jnp.ones(3)], params=(jnp.ones(3),)), r"params: expected the structure of the gradients"),
])
def test_trees_of_other_structures_and_shapes_are_refused(path, arguments, words):
  with pytest.raises(ValueError, match=words):
    step(**arguments)


def test_moments_of_other_parameters_are_refused(path):
  with pytest.raises(ValueError, match=r"mu\['b'\]: expected the structure of the gradients"):
    step(state=ogc.clipped_adamw(0.1, 1.0).init({"a": jnp.ones(3)}))


OTHER_STATES = {"empty": optax.EmptyState(), "adamw alone": optax.adamw(0.1).init(PARAMS),
                "sgd": optax.chain(ogc.global_clip(1.0), optax.sgd(0.1)).init(PARAMS)}


@pytest.mark.parametrize("state", OTHER_STATES.values(), ids=OTHER_STATES)
def test_a_state_of_another_transformation_is_refused(path, state):
  with pytest.raises(TypeError, match="state: expected"):
    step(state=state)


@pytest.mark.parametrize("options", [dict(), dict(every_k=2)], ids=["step", "windows"])
@pytest.mark.parametrize("name, made, wanted", [("learning_rate", 0.1, lambda count: 0.1), ("learning_rate", lambda count: 0.1, 0.1),
                                                ("weight_decay", 0.1, lambda count: 0.1)], ids=["to a schedule", "to a number", "decay"])
def test_a_state_with_another_kind_of_rate_is_refused(options, name, made, wanted):
  old, new = (ogc.clipped_adamw(**({"learning_rate": 0.1, "max_norm": np.inf} | {name: value})) for value in (made, wanted))
  if options:
    old, new = (ogc.clipped_multi_steps(tx, 1.0, **options) for tx in (old, new))
  with pytest.raises(TypeError, match=f"state: made with a (number|schedule) for {name}, expected one made with a"):
    new.step(PARAMS, old.init(PARAMS), PARAMS)


def test_leaves_of_other_dtypes_are_refused_by_name(path):
  with pytest.raises(TypeError, match=r"\['a'\].*float8"):
    step(grads=PARAMS | {"a": jnp.ones(3, jnp.float8_e4m3fn)})


@pytest.mark.parametrize("options, error, words", [
    (dict(max_norm=-1.0), ValueError, "max_norm"), (dict(max_norm="1"), TypeError, "max_norm"),
    (dict(max_norm=1.0, on_nonfinite="ignore"), ValueError, "'skip'"), (dict(max_norm=1.0, loss_scale=0.0), ValueError, "loss_scale"),
    (dict(max_norm=1.0, update_dtype="int8"), TypeError, "update_dtype"), (dict(max_norm=1.0, scale_stage="gpu"), ValueError, "scale_stage"),
    (dict(max_norm=1.0, axis_name=3), TypeError, "axis_name"),
    (dict(max_norm=1.0, learning_rate=jnp.array([0.1])), TypeError, r"learning_rate: .*a schedule will do.*shape \(1,\)"),
    (dict(max_norm=1.0, b2="0.9"), TypeError, "b2"), (dict(max_norm=1.0, b1=lambda count: 0.9), TypeError, "b1"), (dict(max_norm=1.0, weight_decay=None), TypeError, "weight_decay"),
])
def test_options_are_checked_when_it_is_made(options, error, words):
  with pytest.raises(error, match=words):
    ogc.clipped_adamw(**({"learning_rate": 0.1} | options))


def test_a_loss_scale_of_a_call_is_checked(path):
  with pytest.raises(ValueError, match="loss_scale"):
    step(loss_scale=-1.0)


def test_update_cannot_skip_and_says_what_can(path):
  tx = ogc.clipped_adamw(0.1, 1.0, on_nonfinite="skip")
  with pytest.raises(ValueError, match="step can"):
    tx.update(PARAMS, tx.init(PARAMS), PARAMS)


def test_a_derivative_is_refused_and_the_error_says_what_has_one(path):
  tx = ogc.clipped_adamw(0.1, 1.0)
  def total(params):
    return sum(jnp.sum(x) for x in jax.tree.leaves(tx.step(PARAMS, tx.init(PARAMS), params)[0]))
  with pytest.raises(NotImplementedError, match="step has no derivative: differentiate its update"):
    jax.grad(total)(PARAMS)


def test_other_arguments_are_accepted_as_a_chain_accepts_them(path):
  plain, extra = step(), step(value=jnp.float32(1.0))
  for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(extra), strict=True):
    np.testing.assert_array_equal(a, b)
