"""Does a run's history hold what the clip did, whatever ends the run?"""

import json
import math
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_globalclip as ogc
import processes
import pytest

TX = ogc.global_clip(1.0, monitor=True)
PARAMS = {"a": jnp.zeros(2), "b": jnp.zeros(3)}


def updated(state=None, a=3.0, b=0.0):
  gradients = {"a": jnp.array([a, 0.0]), "b": jnp.array([b, 0.0, 0.0])}
  return jax.jit(TX.update)(gradients, TX.init(PARAMS) if state is None else state)[1]


@pytest.mark.parametrize("monitor", [True, "leaves"])
def test_a_line_holds_the_metrics_the_largest_leaves_and_what_else_was_given(monitor, tmp_path, path):
  tx = ogc.global_clip(1.0, monitor=monitor)
  file = tmp_path / "new" / "run.jsonl"
  state = jax.jit(tx.update)({"a": jnp.array([3.0, 0.0]), "b": jnp.array([4.0, 0.0, 0.0])}, tx.init(PARAMS))[1]
  with ogc.History(file, max_norm=1, leaves=1) as history:
    written = history.write(state, loss=jnp.float32(2.5), by_source={"docs": np.float64(1.5)}, ids=np.arange(2), run="x")
  record, = ogc.History.read(file)
  assert written == record == json.loads(file.read_text())
  assert {name: record[name] for name in ogc.clip_metrics(state)} == {
      name: pytest.approx(float(value)) for name, value in ogc.clip_metrics(state).items()}
  assert record["leaves"] == {"b": 4.0} and record["threshold"] == 1.0 and record["step"] == 1
  assert (record["loss"], record["by_source"], record["ids"], record["run"]) == (2.5, {"docs": 1.5}, [0, 1], "x")


def test_without_a_monitor_of_leaves_there_are_none(tmp_path):
  tx = ogc.clipped_multi_steps(optax.sgd(1.0), 1.0, every_k=2, loss_scale=8)
  state = tx.init(PARAMS)
  record = ogc.History(tmp_path / "run.jsonl").write(state)
  assert "leaves" not in record and record["loss_scale"] == 8 and record["step"] == 0


def test_of_micro_batches_a_line_is_a_window(tmp_path):
  tx = ogc.clipped_multi_steps(optax.sgd(1.0), 1.0, every_k=3)
  state = tx.init(PARAMS)
  with ogc.History(tmp_path / "run.jsonl") as history:
    for i in range(8):
      state = jax.jit(tx.update)(PARAMS | {"a": jnp.array([3.0 * i, 0.0])}, state)[1]
      assert bool(history.write(state, loss=i)) == (i in (2, 5))
    history.write(state, step=7)
  lines = ogc.History.read(tmp_path / "run.jsonl")
  assert [(line["step"], line["global_norm"], line.get("loss")) for line in lines] == [(1, 3.0, 2), (2, 12.0, 5), (7, 12.0, None)]


def test_nan_and_infinities_are_json_and_come_back_as_floats(tmp_path):
  file = tmp_path / "run.jsonl"
  written = ogc.History(file, max_norm=math.inf).write(updated(a=jnp.inf, b=2.0), loss=float("nan"), least=-math.inf)
  def refuse(word):
    raise AssertionError(f"{word} is no JSON")
  json.loads(file.read_text(), parse_constant=refuse)
  record, = ogc.History.read(file)
  for values in (written, record):
    assert values["global_norm"] == values["threshold"] == math.inf and values["least"] == -math.inf
    assert math.isnan(values["loss"]) and values["nonfinite"] == {"a": 1} and list(values["leaves"]) == ["a", "b"]


def test_numbers_of_every_type_are_written_as_they_are(tmp_path):
  values = {"half": jnp.bfloat16(1.5), "numpy": np.float16(0.5), "flag": np.bool_(True), "count": np.int64(2**60),
            "none": None}
  record = ogc.History(tmp_path / "run.jsonl").write(updated(), **values)
  assert [record[name] for name in values] == [1.5, 0.5, True, 2**60, None]


def test_a_run_taken_up_again_replaces_the_steps_it_takes_twice(tmp_path):
  file = tmp_path / "run.jsonl"
  for steps in ((1, 2, 3, 4), (3, 4, 5)):
    with ogc.History(file) as history:
      for step in steps:
        history.write(updated(), step=step, first=steps[0])
  assert [(r["step"], r["first"]) for r in ogc.History.read(file)] == [(1, 1), (2, 1), (3, 3), (4, 3), (5, 3)]
  assert len(file.read_text().splitlines()) == 7


@pytest.mark.parametrize("left", [1, 8, 9, 60])
def test_a_line_cut_off_by_a_crash_is_left_out(tmp_path, left):
  file = tmp_path / "run.jsonl"
  ogc.History(file).write(updated(), step=1)
  whole = file.read_bytes()
  file.write_bytes(whole + whole[:left])
  assert [r["step"] for r in ogc.History.read(file)] == [1]
  ogc.History(file).write(updated(), step=2)
  assert [r["step"] for r in ogc.History.read(file)] == [1, 2]


def test_every_line_survives_a_process_that_is_killed(tmp_path):
  file = tmp_path / "run.jsonl"
  code = f"""
    import time, jax.numpy as jnp, optax_globalclip as ogc
    history, tx = ogc.History({str(file)!r}), ogc.global_clip(1.0, monitor=True)
    state = tx.init([jnp.zeros(1)])
    for step in range(5):
      state = tx.update([jnp.ones(1)], state)[1]
      history.write(state)
    print("written", flush=True)
    time.sleep(600)
  """
  process = processes.start(processes.python(code))
  assert process.stdout.readline() == "written\n"
  process.send_signal(signal.SIGKILL)
  process.communicate()
  assert [r["step"] for r in ogc.History.read(file)] == [1, 2, 3, 4, 5]


def test_a_line_that_a_full_disk_cuts_off_is_an_error_and_costs_no_other_line(tmp_path):
  file = tmp_path / "run.jsonl"
  processes.output(processes.python(f"""
    import os, resource, signal
    import jax.numpy as jnp, optax_globalclip as ogc
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    state = ogc.global_clip(1.0, monitor=True).init([jnp.zeros(1)])
    history = ogc.History({str(file)!r}, max_norm=10**400)
    for step in range(5):
      room = os.path.getsize({str(file)!r}) + 50 if step == 2 else resource.RLIM_INFINITY
      resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
      try:
        history.write(state, step=step)
      except OSError:
        assert step == 2
      else:
        assert step != 2
    """))
  assert [(line["step"], line["threshold"]) for line in ogc.History.read(file)] == [(step, math.inf) for step in (0, 1, 3, 4)]


def test_files_of_another_kind_are_refused_and_left_alone(tmp_path):
  for content in ("not a history\n", '{"lr": 1}\n', "\n1\n"):
    file = tmp_path / "other"
    file.write_text(content)
    with pytest.raises(ValueError, match="expected a new file or one that a History wrote, got .*other"):
      ogc.History(file)
    assert file.read_text() == content
  with pytest.raises(ValueError, match="line 1: expected the JSON of a step, got b'not"):
    file.write_text("not a history\n")
    ogc.History.read(file)


def test_bad_arguments_are_named(tmp_path):
  history, state = ogc.History(tmp_path / "run.jsonl"), updated()
  with pytest.raises(ValueError, match="clip_factor is in the line already"):
    history.write(state, clip_factor=1.0)
  with pytest.raises(TypeError, match=r"History.write: sets\['a'\]: expected numbers.*, got set"):
    history.write(state, sets={"a": {1}})
  with pytest.raises(ValueError, match="clip_metrics: expected an optimizer state with one monitored clip"):
    history.write(optax.sgd(1.0).init(PARAMS))
  with pytest.raises(TypeError, match="traced ones: call it outside of jit"):
    jax.jit(lambda s: history.write(s) and 0)(state)
  with pytest.raises(ValueError, match="leaves: expected None or an int of at least 0, got -1"):
    ogc.History(tmp_path / "other.jsonl", leaves=-1)
  with pytest.raises(ValueError, match="leaves: expected None or an int of at least 0, got 1.5"):
    ogc.History(tmp_path / "other.jsonl", leaves=1.5)
  with pytest.raises(TypeError, match="History.write: key: expected numbers"):
    history.write(state, key=jax.random.key(0))
  with pytest.raises(ValueError, match=r"History.write: two: expected keys that differ as strings, got \[1, '1'\]"):
    history.write(state, two={1: 2, "1": 3})
  with pytest.raises(ValueError, match=r"History.write: expected the state of one optimizer, got a batch of shape \(2,\)"):
    history.write(jax.tree.map(lambda x: jnp.stack([x, x]), state))
  with pytest.raises(ValueError, match="step: expected at least 0, got -1"):
    history.write(state, step=-1)
  with pytest.raises(ValueError, match="max_norm: expected a number that is not negative and not NaN, got -1.0"):
    ogc.History(tmp_path / "other.jsonl", max_norm=-1.0)
  with pytest.raises(TypeError, match="max_norm: expected a number .*a schedule or a rule will do too.*, got '1'"):
    ogc.History(tmp_path / "other.jsonl", max_norm="1")
  with pytest.raises(TypeError, match="max_norm: expected a concrete number, got a traced one"):
    jax.jit(lambda x: ogc.History(tmp_path / "other.jsonl", max_norm=x) and x)(1.0)
  assert ogc.History.read(tmp_path / "run.jsonl") == []
