"""The rules' formulas in float64 NumPy, a norm at a time; where a rule has several leaves, one model a leaf."""

import numpy as np


class Rule:
  """What all rules do: thresholds within bounds, and no norm that is 0 or not finite in the statistics."""

  def __init__(self, minimum=0.0, maximum=np.inf, **numbers):
    self.minimum, self.maximum = minimum, maximum
    vars(self).update(numbers)
    self.taken = 0

  def step(self, norm, finite=True, global_norm=None):
    """The threshold that the norm is compared with."""
    enters = finite and norm > 0
    threshold = min(max(self.threshold(norm if enters else None, global_norm), self.minimum), self.maximum)
    if enters:
      self.take(norm, min(norm, threshold))
      self.taken += 1
    return threshold

  def weight(self):
    return 1 / (self.taken + 1) if self.taken < self.warmup else 1 - self.decay


class Ema(Rule):
  mean = 0.0

  def threshold(self, norm, global_norm):
    return self.factor * self.mean if self.taken >= self.warmup else np.inf

  def take(self, norm, clipped):
    self.mean += self.weight() * (clipped - self.mean)


class ZClip(Rule):
  mean = variance = 0.0
  eps = 1e-6

  def threshold(self, norm, global_norm):
    if self.taken < self.warmup:
      return np.inf
    deviation = np.sqrt(self.variance)
    plain = self.mean + self.z_threshold * deviation
    if norm is None:
      return plain
    # Times (deviation + eps), which may be 0.
    if norm - self.mean > self.z_threshold * (deviation + self.eps):
      return self.mean + self.z_threshold**2 * deviation * (deviation + self.eps) / (norm - self.mean)
    return max(plain, norm)

  def take(self, norm, clipped):
    if self.taken < self.warmup:
      self.norms = [*getattr(self, "norms", []), clipped]
      self.mean, self.variance = np.mean(self.norms), np.var(self.norms)
    else:
      self.mean = self.decay * self.mean + (1 - self.decay) * clipped
      self.variance = self.decay * self.variance + (1 - self.decay) * (clipped - self.mean) ** 2


class AutoClip(Rule):
  norms = ()

  def threshold(self, norm, global_norm):
    if norm is not None:
      self.norms = (*self.norms, norm)[-self.n:]
    return np.percentile(self.norms, self.percentile) if self.norms else np.inf

  def take(self, norm, clipped):
    pass


class AdaGC(Rule):
  average = None
  updates = 0

  def step(self, norm, finite=True, global_norm=None):
    out = super().step(norm, finite, global_norm if finite else None)
    self.updates += finite
    return out

  def threshold(self, norm, global_norm):
    if self.updates < self.warmup:
      if global_norm is None:
        return np.inf
      return (norm or 0.0) * min(1.0, self.lambda_abs / global_norm if global_norm else 1.0)
    return np.inf if self.average is None else self.lambda_rel * self.average

  def take(self, norm, clipped):
    if self.average is None:
      self.average = clipped
    elif self.updates < self.warmup:
      self.average = min(self.average, clipped)
    else:
      self.average = self.decay * self.average + (1 - self.decay) * clipped
