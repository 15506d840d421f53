"""Does a changed backend give a changed program, of one and the same function?"""

import jax
import jax.numpy as jnp
import optax
import optax_globalclip as ogc
import pytest
from optax_globalclip import _native
from programs import targets

TREE = [jnp.array([3.0, 4.0])]


def is_native(jitted, *args):
  return bool(targets(jitted.lower(*args).as_text()))


def update(tree):
  return ogc.global_clip(1.0).update(tree, optax.EmptyState())[0]


def window(tree):
  tx = ogc.clipped_multi_steps(optax.identity(), 1.0)
  return tx.update(tree, tx.init(tree), tree)[0]


def derivative(tree):
  return jax.grad(lambda t: sum(map(jnp.sum, ogc.clip_tree(t, 1.0)[0])))(tree)


def batch(tree):
  return jax.vmap(ogc.global_norm)(jax.tree.map(lambda x: jnp.stack([x, 2 * x]), tree))


def scan(tree):
  return jax.lax.scan(lambda t, _: (update(t), ogc.global_norm(t)), tree, length=2)[1]


def remat(tree):
  return jax.checkpoint(lambda t: update(t))(tree)  # JAX keeps the trace of a function that it knows


functions = pytest.mark.parametrize("function", [ogc.global_norm, ogc.leaf_norms, update, window, derivative, batch, scan,
                                                 remat], ids=lambda function: function.__name__)


@functions
def test_within_it_every_program_takes_the_path_that_is_named(function):
  jitted = jax.jit(function)
  for backend in "native", "reference", "native":
    with ogc.use_backend(backend):
      jax.block_until_ready(jitted(TREE))
      assert is_native(jitted, TREE) == (backend == "native") and ogc.backend_info()["setting"] == backend


@functions
def test_a_function_jitted_after_the_environment_changed_takes_the_new_path(function, monkeypatch):
  for backend in "reference", "native", "reference":
    monkeypatch.setenv("OPTAX_GLOBALCLIP_BACKEND", backend)
    assert is_native(jax.jit(lambda tree: function(tree)), TREE) == (backend == "native")


def test_calls_outside_of_jit_follow_the_environment_at_once(monkeypatch):
  traced = []
  original = _native.norm
  monkeypatch.setattr(_native, "norm", lambda *args, **options: traced.append(args) or original(*args, **options))
  for size, backend in (101, "native"), (102, "reference"), (103, "native"):  # sizes that nothing else has compiled
    monkeypatch.setenv("OPTAX_GLOBALCLIP_BACKEND", backend)
    assert ogc.global_norm([jnp.ones(size)]) ** 2 == pytest.approx(size)
    assert len(traced) == (backend == "native")
    traced.clear()


def test_a_jitted_function_keeps_its_path_when_the_environment_changes(monkeypatch):
  jitted = jax.jit(lambda tree: ogc.global_norm(tree))
  monkeypatch.setenv("OPTAX_GLOBALCLIP_BACKEND", "native")
  assert jitted(TREE) == 5 and is_native(jitted, TREE)
  monkeypatch.setenv("OPTAX_GLOBALCLIP_BACKEND", "reference")
  assert is_native(jitted, TREE)
  with ogc.use_backend("reference"):
    assert not is_native(jitted, TREE)


def test_a_compiled_program_stays_what_it_is():
  with ogc.use_backend("native"):
    compiled = jax.jit(lambda tree: ogc.global_norm(tree)).lower(TREE).compile()
  with ogc.use_backend("reference"):
    assert compiled(TREE) == 5 and targets(compiled.as_text())


def test_it_wins_over_the_environment_and_ends_with_its_block(monkeypatch):
  monkeypatch.setenv("OPTAX_GLOBALCLIP_BACKEND", "native")
  with ogc.use_backend("reference"):
    assert ogc.backend_info()["setting"] == "reference"
  assert ogc.backend_info()["setting"] == "native"


def test_another_name_is_refused():
  with pytest.raises(ValueError, match="'auto', 'native' or 'reference', got 'gpu'"):
    ogc.use_backend("gpu")
