"""Does a changed backend give a changed program, of one and the same function?"""

import jax
import jax.numpy as jnp
import optax_globalclip as ogc
import pytest
from programs import targets

TREE = [jnp.array([3.0, 4.0])]


def test_within_it_every_program_takes_the_path_that_is_named():
  function = jax.jit(ogc.global_norm)
  for backend, calls in ("native", 1), ("reference", 0), ("native", 1):
    with ogc.use_backend(backend):
      assert sum(targets(function.lower(TREE).as_text()).values()) == calls
      assert function(TREE) == 5 and ogc.backend_info()["setting"] == backend


def test_it_wins_over_the_environment_and_ends_with_its_block(monkeypatch):
  monkeypatch.setenv("OPTAX_GLOBALCLIP_BACKEND", "native")
  with ogc.use_backend("reference"):
    assert ogc.backend_info()["setting"] == "reference"
  assert ogc.backend_info()["setting"] == "native"


def test_another_name_is_refused():
  with pytest.raises(ValueError, match="'auto', 'native' or 'reference', got 'gpu'"):
    ogc.use_backend("gpu")
