"""Launches, copies and bytes, counted in the text of a module that XLA has compiled for a GPU."""

import math
import re

BYTES = {"pred": 1, "s8": 1, "u8": 1, "f16": 2, "bf16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8,
         "s64": 8, "u64": 8, "c64": 8, "c128": 16, "token": 0}
# Instructions that name memory and move none.
FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id",
        "copy-done"}


def shape_bytes(text):
  """The bytes of all the shapes in a text; a KeyError for a dtype that is not in the table."""
  return sum(BYTES[dtype] * math.prod(map(int, filter(None, dimensions.split(","))))
             for dtype, dimensions in re.findall(r"(\w+)\[([\d,]*)\]", text))


def computations(text):
  """`name -> [(result, opcode, operands, attributes)]`, and the name of the entry."""
  found, entry, current, sizes = {}, None, None, {}
  for line in text.splitlines():
    head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
    if head:
      current, sizes = found.setdefault(head.group(2), []), {}
      entry = head.group(2) if head.group(1) else entry
      continue
    parsed = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z\-]+)\((.*)$", line)
    if not parsed or current is None:
      continue
    name, shape, opcode, rest = parsed.groups()
    sizes[name] = shape_bytes(shape)
    operands, _, attributes = rest.partition(")")
    current.append((sizes[name], opcode, [sizes.get(o, 0) for o in re.findall(r"%([\w.\-]+)", operands)], attributes))
  return found, entry


def measure(text):
  """Launches, copies and bytes of a compiled module: where our kernels clip nothing, and where they clip."""
  found, entry = computations(text)
  total = {"launches": 0, "kernels": 0, "custom_calls": 0, "copies": 0, "copied_mb": 0.0, "mb_unclipped": 0.0,
           "mb_clipped": 0.0}
  def walk(name):
    for result, opcode, operands, attributes in found[name]:
      called = re.findall(r"(?:to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)", attributes)
      if opcode in ("call", "while", "conditional"):
        for each in called:
          walk(each)
        continue
      if opcode in FREE:
        continue
      total["launches"] += 1
      ours = re.search(r'custom_call_target="optax_globalclip_(\w+)_cuda_v2"', attributes)
      total["kernels"] += {"norm": 2, "scale": 1, "clip": 3, "adamw": 1}[ours.group(1)] if ours else 1
      total["custom_calls"] += bool(ours)
      if opcode in ("copy", "copy-start"):
        total["copies"] += 1
        total["copied_mb"] += sum(operands) / 1e6
      read = sum(operands) / 1e6
      once, again = {"norm": (1, 0), "scale": (0, 2), "clip": (1, 2), "adamw": (1, 0)}[ours.group(1)] if ours else (1, 0)
      written = 0 if ours and ours.group(1) != "adamw" else result / 1e6
      total["mb_unclipped"] += once * read + written
      total["mb_clipped"] += (once + again) * read + written
  walk(entry)
  return {key: round(value, 1) for key, value in total.items()}
