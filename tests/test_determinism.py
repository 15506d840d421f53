"""The result depends on nothing but the values: not on the run, the threads, or what else runs at the same time."""

import jax
import numpy as np
import optax_globalclip as ogc
import oracle
import processes
import pytest

PRELUDE = """
    import hashlib, json, os, sys, threading
    import jax, jax.numpy as jnp, numpy as np, optax, optax_globalclip as ogc

    def tree(seed, rows=40):
      random = np.random.default_rng(seed)
      shapes = [(700_001,), (3, 5), (), (129, 1031), (0,), *[(768,)] * rows]
      leaves = [random.standard_normal(shape).astype(np.float32) * np.float32(10.0 ** (i % 5))
                for i, shape in enumerate(shapes)]
      return leaves + [leaves[0][:40_001].astype(np.float16), leaves[0][:70_003].astype(jnp.bfloat16)]

    def digest(out):
      leaves = map(np.asarray, jax.tree.leaves(out))
      return hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest()
"""


def answer(code, **variables):
  """What a process that runs `code` prints last; one that does not end in time has deadlocked."""
  return processes.answer(processes.python(PRELUDE, code), timeout=300, **variables)


def test_the_same_bits_come_from_any_number_of_threads():
  code = """
      digests = {}
      for backend in ("native", "reference"):
        os.environ["OPTAX_GLOBALCLIP_BACKEND"] = backend
        run = jax.jit(lambda t: (ogc.clip_tree(t, 1.0), ogc.leaf_norms(t)))
        digests[backend] = digest(run(tree(0, rows=40 if backend == "native" else 2)))
      print(json.dumps(digests))
  """
  digests = [answer(code, NPROC=threads) for threads in ("1", "2", "7")]  # XLA's pool has NPROC threads
  assert digests[0] == digests[1] == digests[2]


def test_the_same_bits_come_from_every_run(path):
  random = np.random.default_rng(1)
  tree = [random.standard_normal(300_001).astype(np.float32), random.standard_normal((40, 33)).astype(np.float16)]
  run = jax.jit(lambda t: (ogc.clip_tree(t, 1.0), ogc.leaf_norms(t)))
  first = jax.device_get(run(tree))
  for _ in range(20):
    assert oracle.same_bits(first, jax.device_get(run(tree)))


def test_the_same_bits_come_from_any_address(path):
  random = np.random.default_rng(2)
  values = random.standard_normal(40_003).astype(np.float32)
  @jax.jit
  def run(whole, at):
    return ogc.clip_tree([jax.lax.dynamic_slice(whole, (at,), (values.size,))], 1.0)
  results = []
  for at in range(5):
    whole = np.zeros(values.size + 8, np.float32)
    whole[at:at + values.size] = values
    results.append(jax.device_get(run(whole, at)))
  assert all(oracle.same_bits(results[0], other) for other in results[1:])


@pytest.mark.parametrize("threads", ["1", "2", "4"])
def test_many_calls_at_once_neither_deadlock_nor_disturb_each_other(threads):
  code = """
      clip = jax.jit(lambda t: ogc.clip_tree(t, 1.0))
      trees = [jax.device_put(tree(seed)) for seed in range(4)]
      want = [digest(clip(t)) for t in trees]
      wrong = []
      def work(k):
        pending = [(i % 4, clip(trees[i % 4])) for i in range(k, k + 12)]  # dispatched before any is waited for
        wrong.extend(i for i, out in pending if digest(out) != want[i])
      threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
      for t in threads: t.start()
      for t in threads: t.join()
      print(json.dumps(len(wrong)))
  """
  assert answer(code, NPROC=threads) == 0


def test_two_clips_in_one_program_neither_deadlock_nor_disturb_each_other():
  code = """
      clip = lambda t: ogc.clip_tree(t, 1.0)
      both = jax.jit(lambda a, b: (clip(a), clip(b), ogc.global_norm(a), ogc.leaf_norms(b)))
      alone = jax.jit(clip)
      a, b = jax.device_put(tree(0)), jax.device_put(tree(1))
      want = jax.device_get((alone(a), alone(b)))
      wrong = 0
      for _ in range(30):
        got = jax.device_get(both(a, b))
        wrong += digest(got[:2]) != digest(want)
      print(json.dumps(wrong))
  """
  assert answer(code, NPROC="2") == 0


def test_many_devices_of_one_process_clip_at_once():
  code = """
      clip = jax.jit(lambda t: ogc.clip_tree(t, 1.0))
      want = digest(clip(tree(0)))
      trees = [jax.device_put(tree(0), device) for device in jax.devices()]
      for _ in range(5):
        assert {digest(out) for out in [clip(t) for t in trees]} == {want}
      print(json.dumps(len(trees)))
  """
  assert answer(code, XLA_FLAGS=processes.EIGHT_DEVICES) == 8
