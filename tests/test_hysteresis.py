"""How many non-finite windows does a dynamic scale tolerate before it backs off?"""

import jax
import numpy as np
import optax
import optax_globalclip as ogc
import pytest

GOOD, BAD = np.float32([1]), np.float32([np.inf])


def scales(windows, **options):
  tx = ogc.clipped_multi_steps(optax.sgd(0.1), 1e9, loss_scale=ogc.DynamicLossScale(16.0, **options))
  state, found = tx.init(GOOD), []
  update = jax.jit(tx.update)
  for gradient in windows:
    _, state = update(gradient, state)
    found.append(float(ogc.current_loss_scale(state)))
  return found


def test_by_default_it_backs_off_at_once(path):
  assert scales([BAD, GOOD, BAD]) == [8, 8, 4]


def test_with_n_the_first_n_less_one_leave_it_and_each_one_after_lowers_it(path):
  assert scales([BAD, BAD, BAD, BAD], hysteresis=3) == [16, 16, 8, 4]
  assert scales([BAD, GOOD, BAD, GOOD, BAD], hysteresis=3) == [16, 16, 16, 16, 8]


def test_growth_grants_the_tolerance_anew(path):
  assert scales([BAD, GOOD, GOOD, BAD, BAD], hysteresis=2, growth_interval=2) == [16, 16, 32, 32, 16]


def test_a_growing_scale_stops_at_the_maximum():
  assert scales([GOOD] * 3, growth_interval=1, maximum=50.0) == [32, 50, 50]


@pytest.mark.parametrize("value, error", [(0, ValueError), (1.5, TypeError), (True, TypeError)])
def test_a_wrong_hysteresis_is_named(value, error):
  with pytest.raises(error, match="hysteresis"):
    ogc.DynamicLossScale(hysteresis=value)


def test_a_state_of_another_hysteresis_is_refused():
  def make(n):
    return ogc.clipped_multi_steps(optax.sgd(0.1), 1.0, loss_scale=ogc.DynamicLossScale(hysteresis=n))
  for mine, theirs in (1, 2), (2, 1):
    with pytest.raises(ValueError, match="hysteresis.*call init again"):
      make(mine).update(GOOD, make(theirs).init(GOOD))
