"""What the clip did at each step of a run, as lines of JSON: `History`."""

import json
import math
import operator
import os
import pathlib
from typing import Any, Self

import jax
import numpy as np

from optax_globalclip import _thresholds
from optax_globalclip._arguments import to_float
from optax_globalclip._loss_scale import find_states, plain
from optax_globalclip._monitor import ClipState
from optax_globalclip._report import check_one, clip_metrics, leaf_report
from optax_globalclip._types import MaxNorm
from optax_globalclip._window_state import ClippedMultiStepsState

# What JSON has no word for, by the words of protocol buffers' JSON; `float` reads them all.
_SPELLED = ("NaN", "Infinity", "-Infinity")
_BEGINNING = b'{"step": '  # of every line


def _json_value(name: str, value: Any) -> Any:
  """`value` in JSON's own types."""
  if value is None or isinstance(value, (bool, int, str)):
    return value
  if isinstance(value, dict):
    items = {str(key): _json_value(f"{name}[{key!r}]", item) for key, item in value.items()}
    if len(items) < len(value):
      raise ValueError(f"History.write: {name}: expected keys that differ as strings, got {list(value)}")
    return items
  if isinstance(value, (list, tuple)):
    return [_json_value(f"{name}[{i}]", item) for i, item in enumerate(value)]
  if isinstance(value, (np.ndarray, np.generic, jax.Array)) and getattr(value.dtype, "kind", "") in tuple("biufV"):
    array = np.asarray(value)
    return _json_value(name, (array.astype(np.float64) if array.dtype.kind in "fV" else array).tolist())
  if not isinstance(value, float):
    raise TypeError(f"History.write: {name}: expected numbers, strings, None, or lists and dicts of them, got "
                    f"{type(value).__name__}")
  if math.isnan(value):
    return "NaN"
  return value if math.isfinite(value) else "Infinity" if value > 0 else "-Infinity"


def _python_value(value: Any) -> Any:
  if isinstance(value, dict):
    return {key: _python_value(item) for key, item in value.items()}
  if isinstance(value, list):
    return [_python_value(item) for item in value]
  return float(value) if isinstance(value, str) and value in _SPELLED else value


class History:
  """Writes what the clip did, a line of JSON a step, into a file that can be read at any time.

  A line goes to the system whole before `write` returns: of a process that is killed none is lost. What is there
  already stays. A run that goes on from a checkpoint appends, also where it takes some steps again: `History.read`
  keeps the later of two lines of one step, and nothing between them.

  Args:
    path: the file, `.jsonl` by custom; folders on the way are made. Of several processes the first one writes.
    max_norm: that of the clip, for the figure: an optimizer state holds a threshold only where it moves, and that one is
      written instead.
    leaves: how many of the largest leaves to write with `monitor=True`; `None` for all.

  Raises:
    ValueError: `path` holds something else, `leaves` is negative, or `max_norm` is negative or NaN.
    TypeError: a `max_norm` that is traced, or neither a number, nor a schedule, nor a rule.

  Examples:
    >>> import pathlib, tempfile
    >>> import jax.numpy as jnp, optax_globalclip as ogc
    >>> tx = ogc.global_clip(1.0, monitor=True)
    >>> state = tx.init({"a": jnp.zeros(1), "b": jnp.zeros(1)})
    >>> path = pathlib.Path(tempfile.mkdtemp(), "run.jsonl")
    >>> history = ogc.History(path, max_norm=1.0)
    >>> _, state = tx.update({"a": jnp.array([3.0]), "b": jnp.array([4.0])}, state)
    >>> written = history.write(state, loss=2.5)
    >>> record, = ogc.History.read(path)
    >>> record["step"], record["global_norm"], record["leaves"], record["loss"]
    (1, 5.0, {'b': 4.0, 'a': 3.0}, 2.5)

    `python -m optax_globalclip.plot run.jsonl` draws it, also while the run goes on.
  """

  def __init__(self, path: str | os.PathLike[str], *, max_norm: MaxNorm | None = None, leaves: int | None = 8) -> None:
    if leaves is not None and (not isinstance(leaves, (int, np.integer)) or leaves < 0):
      raise ValueError(f"History: leaves: expected None or an int of at least 0, got {leaves}")
    self._path, self._leaves = pathlib.Path(path), leaves
    if isinstance(max_norm, jax.core.Tracer):
      raise TypeError("History: max_norm: expected a concrete number, got a traced one: call it outside of jit")
    if max_norm is not None:
      _thresholds.check(max_norm, per_leaf=True)
    constant = max_norm is not None and not _thresholds.follows(max_norm)
    self._constants = {"threshold": to_float(max_norm)} if constant else {}
    self._file, self._torn = None, False
    if jax.process_index() == 0:
      self._file = self._open()

  def _open(self):
    self._path.parent.mkdir(parents=True, exist_ok=True)
    file = open(self._path, "a+b", buffering=0)
    file.seek(0)
    if not _torn(file.readline(1000)):
      file.close()
      raise ValueError(f"History: expected a new file or one that a History wrote, got {self._path}")
    end = file.seek(0, os.SEEK_END)
    if end:
      file.seek(end - 1)
      if file.read(1) != b"\n":
        # The machine stopped within a line: the next one begins on its own.
        file.write(b"\n")
    return file

  def write(self, opt_state: Any, *, step: int | None = None, **more: Any) -> dict[str, Any]:
    """Writes one line; call it outside of `jit`, after the update. It waits for the update's numbers.

    Of `clipped_multi_steps` a line is a window: within one nothing is written, unless `step` is given, and `{}` comes back.

    Args:
      opt_state: a state that `clip_metrics` reads. The line holds all of these, and with `monitor=True` `leaves`, the
        norms of the largest ones by name (`leaf_report`'s order), and `nonfinite`, the counts of those that hold NaN or
        infinity.
      step: the line's number, at least 0; by default the state's own count of updates, or windows.
      more: what else to write: numbers, strings, `None`, arrays, and lists and dicts of them. NaN and infinities are
        written as "NaN", "Infinity" and "-Infinity", as protocol buffers write them in JSON; `read` gives floats.

    Returns:
      The line, as `read` gives it.

    Raises:
      ValueError: a name in `more` that the line has already, two keys of one name, a negative `step`, or a state without
        a monitored clip or of several optimizers.
      TypeError: a value that JSON cannot hold, by its name; traced values.
      OSError: the line could not be written whole: a full disk, say.
    """
    metrics = clip_metrics(opt_state)
    if any(isinstance(value, jax.core.Tracer) for value in metrics.values()):
      raise TypeError("History.write: expected concrete arrays, got traced ones: call it outside of jit")
    check_one("History.write", np.shape(metrics["steps"]))
    if step is None and any(plain(window.micro_step) for window in find_states(opt_state, ClippedMultiStepsState)):
      return {}
    metrics = dict(zip(metrics, jax.device_get(list(metrics.values())), strict=True))
    step = operator.index(metrics["steps"] if step is None else step)
    if step < 0:
      raise ValueError(f"History.write: step: expected at least 0, got {step}")
    record = {"step": step} | self._constants | metrics
    if any(state.leaf_metrics is not None for state in find_states(opt_state, ClipState)):
      rows = leaf_report(opt_state).rows[:self._leaves]
      record["leaves"] = {row.path: row.norm for row in rows}
      if bad := {row.path: row.nonfinite for row in rows if row.nonfinite}:
        record["nonfinite"] = bad
    if taken := sorted(record.keys() & more.keys()):
      raise ValueError(f"History.write: {taken[0]} is in the line already: give it another name")
    record = {name: _json_value(name, value) for name, value in (record | more).items()}
    if self._file is not None:
      self._append(json.dumps(record, allow_nan=False).encode() + b"\n")
    return _python_value(record)

  def _append(self, line: bytes) -> None:
    # A full disk takes a part of a line and then raises; the next line begins on its own.
    rest = memoryview(b"\n" + line if self._torn else line)
    self._torn = True
    while rest:
      rest = rest[self._file.write(rest):]
    self._torn = False

  def close(self) -> None:
    """Closes the file; nothing waits to be written."""
    if self._file is not None:
      self._file.close()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *exception: object) -> None:
    self.close()

  @staticmethod
  def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a file as dicts, by rising `step`.

    Where a step is not above the one before it, the run was taken up again from there: the lines before with that
    step, or a later one, are left out. A last line without its end is left out too.

    Raises:
      ValueError: a line that is no history's, with its number.
    """
    records: list[dict] = []
    lines = pathlib.Path(path).read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], 1):
      try:
        record = _python_value(json.loads(line))
        step = record["step"]
      except (ValueError, TypeError, KeyError):
        if not _torn(line):
          raise ValueError(f"{path}, line {number}: expected the JSON of a step, got {line[:60]!r}") from None
        continue
      while records and records[-1]["step"] >= step:
        records.pop()
      records.append(record)
    return records


def _torn(line: bytes) -> bool:
  """Whether a line may be the beginning of one."""
  return line.startswith(_BEGINNING) or _BEGINNING.startswith(line)
