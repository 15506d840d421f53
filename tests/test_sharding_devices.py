"""Does the norm depend on how many devices a tree is spread over, or on how?"""

import jax
import jax.numpy as jnp
import numpy as np
import optax_globalclip as ogc
import oracle
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sharded import P, line, put

# Few shapes, so that few programs are compiled; the values are what is drawn.
SHAPES = {"matrix": (8, 6), "vector": (16,), "bias": (3,)}
LAYOUTS = [(1, {"matrix": P(), "vector": P(), "bias": P()}),
           (2, {"matrix": P("x"), "vector": P("x"), "bias": P()}),
           (4, {"matrix": P("x"), "vector": P(), "bias": P()}),
           (8, {"matrix": P("x"), "vector": P("x"), "bias": P()}),
           (8, {"matrix": P(), "vector": P("x"), "bias": P()})]
norm = jax.jit(ogc.global_norm)


@st.composite
def trees(draw):
  """Leaves of float32 whose magnitudes lie anywhere in its range, each leaf and row about its own."""
  rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
  tree = {}
  for name, shape in SHAPES.items():
    center, spread = draw(st.integers(-80, 110)), draw(st.sampled_from([0, 1, 30]))
    exponents = np.clip(center + rng.integers(-spread, spread + 1, shape), -110, 126)
    tree[name] = np.ldexp(rng.uniform(-1, 1, shape), exponents).astype(np.float32)
  return tree


@settings(max_examples=150)
@given(trees())
@example({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()})
@example({name: np.full(shape, 3e38, np.float32) for name, shape in SHAPES.items()})
def test_norms_agree_to_one_ulp_on_1_2_4_and_8_devices(tree):
  want = oracle.norm(tree)
  for devices, specs in LAYOUTS:
    got = norm(put(tree, line(devices), specs))
    values = {np.asarray(shard.data).tobytes() for shard in got.addressable_shards}
    assert len(values) == 1
    if want > np.finfo(np.float32).max:
      assert np.isposinf(got)
    else:
      assert oracle.ulps(got, want) <= 1, (devices, specs)


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1))
def test_the_order_of_devices_changes_no_bit(seed):
  rng = np.random.default_rng(seed)
  shards = np.ldexp(rng.uniform(-1, 1, 8), rng.integers(-20, 20, 8)).astype(np.float32)
  mesh = line()
  values = {np.asarray(norm(put(rng.permutation(shards), mesh, P("x")))).tobytes() for _ in range(4)}
  assert len(values) == 1


def test_a_million_elements_on_eight_devices_lose_nothing():
  values = np.full(1_000_000, 0.1, np.float32)
  got = norm(put(jnp.asarray(values), line(), P("x")))
  assert oracle.ulps(got, oracle.norm(values)) <= 1
