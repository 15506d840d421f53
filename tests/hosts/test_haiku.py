"""Haiku: parameters in a dict of modules of a dict of arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import pytest

hk = pytest.importorskip("haiku", reason="dm-haiku is not installed (pip install '.[hosts]')")

pytestmark = pytest.mark.usefixtures("as_users_run_it")


def test_a_transformed_network_trains_and_its_leaves_are_named_as_haiku_names_them(path):
  network = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(1, name="out")(x)))
  params = network.init(jax.random.key(0), jnp.zeros(2))
  tx = optax.chain(ogc.global_clip(1.0, monitor=True), optax.sgd(1.0))

  @jax.jit
  def step(params, state):
    grads = jax.grad(lambda params: 2 * network.apply(params, jnp.array([4.0, 6.0])).sum())(params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  after, state = step(params, tx.init(params))
  norm = np.sqrt(8.0**2 + 12**2 + 2**2)
  np.testing.assert_allclose(params["out"]["w"] - after["out"]["w"], [[8 / norm], [12 / norm]], rtol=1e-5)
  assert [row.path for row in ogc.leaf_report(state).rows] == ["out/w", "out/b"]
