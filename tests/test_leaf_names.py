"""Does a report name the right leaf, whatever the leaves are called? (Case 63.)"""

import io
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import pytest
import windows

pytestmark = pytest.mark.reference_repeats


class Layer(NamedTuple):
  kernel: Any
  bias: Any


# Names that an ASCII reader knows at once come out as they are.
PLAIN = {"a": 1.0, "layers": [Layer(2.0, (3.0, 4.0)), {"x": 5.0}], "é": 6.0, "名前": 7.0, "with space": 8.0}
PLAIN_PATHS = ["a", "layers/0/kernel", "layers/0/bias/0", "layers/0/bias/1", "layers/1/x", "é", "名前", "with space"]

TREES = {
    "a name that is another's full path": {"a": {"b": 3.0}, "a/b": 2.0, "['a']['b']": 1.0},
    "line break": {"one\ntwo": 1.0, "b": 2.0, "z": 3.0},
    "line breaks of every kind": {f"x{c}y": i + 1.0 for i, c in enumerate("\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")},
    "break at either end": {"\nb": 1.0, "b": 2.0, "b\n": 3.0, "\n": 4.0},
    "lone surrogate": {"\udc80": 1.0, "b": 2.0},
    "surrogates": {"\udc80": 1.0, "\udc81": 2.0, "\\udc80": 3.0, "\ud800\udc80": 4.0},  # noqa: F601
    "empty": {"": 1.0, "b": 2.0},
    "empty within empty": {"": {"": 1.0, "b": 2.0}, "/": 3.0, "/b": 4.0, "b": 5.0},
    "slash": {"a/b": 1.0, "a": {"b": 2.0}},
    "slashes": {"a/b/c": 1.0, "a": {"b": {"c": 2.0}, "b/c": 3.0}, "a/b": {"c": 4.0}},
    "backslash": {"a\\nb": 1.0, "a\nb": 2.0, "a\\\\nb": 3.0, "a\\": 4.0},
    "backslash before a slash": {"a\\/b": 1.0, "a\\": {"b": 2.0}, "a/b": 3.0, "a": {"b": 4.0}},
    "not ascii": {"é": 1.0, "e\u0301": 2.0, "\\xe9": 3.0, "\U0001f600": 4.0},
    "indices and attributes": {"a": [1.0, {"0": 2.0}], "a/0": 3.0, "b": Layer(4.0, (5.0, 6.0)), "b/kernel": 7.0},
    "dot": {".": 1.0, "": 2.0},
    "control characters": {"\x00": 1.0, "\x1b[31m": 2.0, "\t": 3.0},
    "plain": PLAIN,
}
trees = pytest.mark.parametrize("tree", TREES.values(), ids=TREES)


def gradients(tree):
  return jax.tree.map(lambda x: jnp.full(1, x, jnp.float32), tree)


def of_clip(make):
  """Makes a function of a tree that says what the state reports of it."""
  def reporter(like):
    tx = make(1.0, monitor=True)
    state, update = tx.init(like), jax.jit(tx.update)
    return lambda tree: ogc.leaf_report(update(tree, state)[1])
  return reporter


def of_window(every_k):
  def reporter(like):
    run = windows.Run(ogc.clipped_multi_steps(optax.identity(), 1.0, every_k=every_k, monitor=True), like)
    def report(tree):
      for _ in range(every_k):
        run(tree)
      return ogc.leaf_report(run.state)
    return report
  return reporter


STATES = {"global_clip": of_clip(ogc.global_clip), "per_tensor_clip": of_clip(ogc.per_tensor_clip),
          "window of 1": of_window(1), "window of 2": of_window(2)}


def check_report(reporter, tree):
  """The report of a state says what that of the tree says, of each leaf's norm and of each leaf's NaN."""
  of_state, whole = reporter(gradients(tree)), ogc.leaf_report(gradients(tree))
  assert sorted(row.norm for row in whole.rows) == list(range(1, len(whole.rows) + 1))
  assert of_state(gradients(tree)) == whole
  for row in whole.rows:
    bad = gradients(jax.tree.map(lambda x: np.nan if x == row.norm else x, tree))
    for report in of_state(bad), ogc.leaf_report(bad):
      first, *rest = report.rows
      assert (first.path, first.nonfinite) == (row.path, 1)
      assert [(r.path, r.norm, r.nonfinite) for r in rest] == [
          (r.path, r.norm, 0) for r in whole.rows if r.path != row.path]


@trees
@pytest.mark.parametrize("kind", ["global_clip", "window of 2"])
def test_63_the_report_of_a_state_blames_the_leaf_that_the_report_of_the_tree_blames(tree, kind):
  check_report(STATES[kind], tree)


@pytest.mark.parametrize("kind", STATES)
def test_63_so_it_does_for_every_kind_of_state(path, kind):
  check_report(STATES[kind], TREES["line break"])


@trees
def test_63_no_two_leaves_have_one_path(tree):
  paths = [row.path for row in ogc.leaf_report(gradients(tree)).rows]
  assert len(set(paths)) == len(paths)


@trees
def test_63_a_report_prints_as_a_line_for_each_leaf(tree):
  found = ogc.leaf_report(gradients(tree))
  stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="")
  print(found, file=stream, end="")
  stream.flush()
  lines = stream.buffer.getvalue().decode().splitlines()
  assert len(lines) == 1 + len(found.rows)
  for line, row in zip(lines[1:], found.rows, strict=True):
    assert row.path in line and f"{row.norm:.4g}" in line.split()


def test_63_plain_names_come_out_as_they_are():
  by_norm = sorted(ogc.leaf_report(gradients(PLAIN)).rows, key=lambda row: row.norm)
  assert [row.path for row in by_norm] == PLAIN_PATHS


def test_63_a_plain_name_keeps_its_path_beside_strange_ones():
  rows = {row.norm: row.path for row in ogc.leaf_report(gradients({"one\ntwo": 1.0, "\udc80": 2.0, "b": 3.0})).rows}
  assert rows[3.0] == "b" and "one" in rows[1.0] and "two" in rows[1.0]


# ----------------------------------------------------------------------------------------------------------------------
# States of the version before, whose paths are lines


NAMES = ["a", "b/0", "deep/er/w", "é"]
STORED = np.frombuffer("\n".join(NAMES).encode(), np.uint8)
OLD_TREE = {"a": 1.0, "b": [2.0], "deep": {"er": {"w": 3.0}}, "é": 4.0}


def test_63_what_is_stored_of_plain_names_is_what_the_version_before_stored():
  for state in (ogc.global_clip(1.0, monitor=True).init(gradients(OLD_TREE)),
                ogc.clipped_multi_steps(optax.identity(), 1.0, monitor=True).init(gradients(OLD_TREE)).clip_state):
    assert state.leaf_metrics.paths.dtype == np.uint8
    np.testing.assert_array_equal(state.leaf_metrics.paths, STORED)


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_63_a_state_stored_by_the_version_before_reads_right(path, convert):
  tree = gradients(OLD_TREE)
  def expect(state):
    assert [(row.path, row.norm) for row in ogc.leaf_report(state).rows] == [
        ("é", 4), ("deep/er/w", 3), ("b/0", 2), ("a", 1)]
  tx = ogc.global_clip(1.0, monitor=True)
  state = jax.tree.map(convert, tx.update(tree, tx.init(tree))[1])
  state = state._replace(leaf_metrics=state.leaf_metrics._replace(paths=convert(STORED)))
  expect(state)
  expect(jax.jit(tx.update)(tree, state)[1])   # and goes on
  tx = ogc.clipped_multi_steps(optax.identity(), 1.0, every_k=2, monitor=True)
  state = tx.init(tree)
  for _ in range(2):
    _, state = jax.jit(tx.update)(tree, state, tree)
  metrics = state.clip_state.leaf_metrics._replace(paths=convert(STORED))
  expect(state._replace(clip_state=state.clip_state._replace(leaf_metrics=metrics)))


def test_63_a_state_with_strange_names_goes_through_numpy_and_on(path):
  tree = gradients({"one\ntwo": 1.0, "\udc80": 2.0, "a/b": 3.0, "a": {"b": 4.0}})
  tx = ogc.global_clip(1.0, monitor=True)
  update, state = jax.jit(tx.update), tx.init(tree)
  _, state = update(tree, windows.through_numpy(state))
  assert ogc.leaf_report(windows.through_numpy(state)).rows == ogc.leaf_report(tree).rows
