"""Contenders take turns, A B C, B C A, ..., and their ratio is taken within a turn: what slows the whole machine down
for a while slows all of them."""

import statistics
import time
from typing import NamedTuple


class Seconds(NamedTuple):
  wall: float
  cpu: float  # of all threads together: other processes change it less


def stopwatch():
  """A function that says how long ago it was made."""
  wall, cpu = time.perf_counter(), time.process_time()
  return lambda: Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def seconds(call, at_least=0.02):
  """Of one call, from as many as take `at_least` together, after one that finds the caches as the last contender left
  them: full of what it wrote, to be written back to memory first."""
  call()
  calls, passed = 0, stopwatch()
  while True:
    call()
    calls += 1
    wall, cpu = passed()
    if wall >= at_least:
      return Seconds(wall / calls, cpu / calls)


def take_turns(contenders, turns, measure=seconds, after_turn=lambda turn, measured: None):
  """`measure(contender)` of every contender, turn by turn; each turn begins with another one.

  What a first turn finds, in which functions are still compiled and memory is new, is thrown away."""
  names = list(contenders)
  for contender in contenders.values():
    measure(contender)
  measured = {name: [] for name in names}
  for turn in range(turns):
    for name in names[turn % len(names):] + names[:turn % len(names)]:
      measured[name].append(measure(contenders[name]))
    after_turn(turn, measured)
  return measured


def quartiles(values, digits):
  """The median, and what a quarter of the values lie below and above."""
  low, median, high = statistics.quantiles(values, n=4, method="inclusive")
  return {"median": round(median, digits), "quartiles": [round(low, digits), round(high, digits)]}


def ratio(times, ours, theirs):
  """How many times as long `ours` takes as `theirs`: over turns, of CPU time, and of the best turn of each."""
  cpu = statistics.median(a.cpu / b.cpu for a, b in zip(times[ours], times[theirs]))
  best = min(times[ours]).wall / min(times[theirs]).wall
  return {"of": ours, "to": theirs, **quartiles([a.wall / b.wall for a, b in zip(times[ours], times[theirs])], 3),
          "cpu median": round(cpu, 3), "best": round(best, 3)}


def summary(times, pairs, calls=1):
  """Milliseconds of every contender, divided by `calls`, and the ratios of `pairs`."""
  def in_milliseconds(values):
    return round(1e3 * values / calls, 4)
  milliseconds = {
      name: {"median": in_milliseconds(statistics.median(x.wall for x in t)), "best": in_milliseconds(min(t).wall),
             "cpu median": in_milliseconds(statistics.median(x.cpu for x in t))} for name, t in times.items()}
  return dict(milliseconds=milliseconds, turns=len(next(iter(times.values()))),
              ratios=[ratio(times, *pair) for pair in pairs])
