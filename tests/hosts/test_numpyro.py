"""NumPyro: `optax_to_numpyro` around a chain and around windows."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import pytest

pytest.importorskip("numpyro", reason="numpyro is not installed (pip install '.[hosts]')")

import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta
from numpyro.optim import optax_to_numpyro

pytestmark = pytest.mark.usefixtures("as_users_run_it")

DATA = np.full(4, 5.0, np.float32)


def model(data):
  mean = numpyro.sample("mean", dist.Normal(0.0, 10.0))
  with numpyro.plate("data", len(data)):
    numpyro.sample("observed", dist.Normal(mean, 1.0), obs=data)


def run(tx, steps):
  svi = SVI(model, AutoDelta(model, init_loc_fn=numpyro.infer.init_to_value(values={"mean": jnp.float32(0)})),
            optax_to_numpyro(tx), Trace_ELBO())
  state = svi.init(jax.random.key(0), jnp.asarray(DATA))
  means = []
  for _ in range(steps):
    state, _ = svi.update(state, jnp.asarray(DATA))
    means.append(float(svi.get_params(state)["mean_auto_loc"]))
  return means, state


def test_the_gradient_of_an_elbo_is_clipped(path):
  (mean,), state = run(optax.chain(ogc.global_clip(2.0, monitor=True), optax.sgd(0.1)), 1)
  np.testing.assert_allclose(mean, 0.2, rtol=1e-6)
  np.testing.assert_allclose(ogc.clip_metrics(state.optim_state)["global_norm"], DATA.sum(dtype=np.float64), rtol=1e-6)


def test_windows_update_every_other_step(path):
  means, state = run(ogc.clipped_multi_steps(optax.sgd(0.1), 2.0, every_k=2), 4)
  np.testing.assert_allclose(means, [0, 0.2, 0.2, 0.4], rtol=1e-6)
  assert ogc.has_updated(state.optim_state)
