"""What XLA makes of clipping on an H200, counted in programs compiled for one without having one.

    pip install '.[aot]'
    python benchmarks/h200_deviceless.py                    # prints, and writes benchmarks/results/h200_deviceless.json
    python benchmarks/h200_deviceless.py --layers 2 --check # small, and exits with 1 where a claim of README.md fails

For each program: launches (instructions that run on the device), kernels (a call of ours launches two for a norm and
three for a clip), copies, and the bytes that all of them read and write, each operand and result counted once. The tree
is that of a GPT of 92 M float32 parameters in 148 leaves.
"""

import argparse
import importlib.metadata
import json
import os
import pathlib
import re
import sys
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
DUMP = tempfile.TemporaryDirectory()
os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"
                           f" --xla_dump_to={DUMP.name} --xla_dump_hlo_module_re=in_a_command_buffer"
                           " --xla_gpu_graph_min_graph_size=1")

import gpt
import hlo
import jax
import jax.numpy as jnp
import optax
import optax_globalclip as ogc
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

FOLDER = pathlib.Path(__file__).parent
H200 = FOLDER.parent / "tests" / "h200.txtpb"
RESULTS = FOLDER / "results" / "h200_deviceless.json"
HEADS, BATCH, LENGTH = 12, 8, 256
RULES = {"schedule": optax.linear_schedule(2.0, 1.0, 1000), "ema_clip": ogc.ema_clip(), "zclip": ogc.zclip(),
         "autoclip": ogc.autoclip()}


def place_on_one():
  """A function that gives the leaves of a tree of shapes their place on one H200."""
  topology = topologies.get_topology_desc("h200", "cuda", target_config=H200.read_text(), topology="1x1x1")
  sharding = SingleDeviceSharding(topology.devices[0])
  return lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def layer_norm(p, x):
  x = x - jnp.mean(x, -1, keepdims=True)
  return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


def attention(p, x):
  width = x.shape[-1] // HEADS
  heads = lambda w: jnp.reshape(x @ w, (BATCH, LENGTH, HEADS, width))
  scores = jnp.einsum("bqhd,bkhd->bhqk", heads(p["query"]), heads(p["key"])) / width ** 0.5
  scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -1e9)
  mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), heads(p["value"]))
  return jnp.reshape(mixed, x.shape) @ p["out"]


def loss(params, tokens):
  x = params["tokens"][tokens] + params["positions"][:LENGTH]
  for p in params["layers"]:
    x = x + attention(p["attention"], layer_norm(p["ln_1"], x))
    m = p["mlp"]
    x = x + jax.nn.gelu(layer_norm(p["ln_2"], x) @ m["up"] + m["up_bias"]) @ m["down"] + m["down_bias"]
  logits = layer_norm(params["ln_out"], x) @ params["tokens"].T
  return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]))


def programs(params, tokens):
  """`name -> (function, arguments, donated)`."""
  def update(transform):
    state = jax.eval_shape(transform.init, params)
    return (lambda grads, state, params: transform.update(grads, state, params)), (params, state, params), (0, 1)

  def train_step(transform):
    state = jax.eval_shape(transform.init, params)
    def step(params, state, tokens):
      value, grads = jax.value_and_grad(loss)(params, tokens)
      updates, state = transform.update(grads, state, params)
      return optax.apply_updates(params, updates), state, value
    return step, (params, state, tokens), (0, 1)

  def whole(transform):
    """update and apply"""
    def step(params, state, grads):
      updates, state = transform.update(grads, state, params)
      return optax.apply_updates(params, updates), state
    return step, (params, jax.eval_shape(transform.init, params), params), (0, 1, 2)

  def fused(gradients_of, given, **options):
    transform = ogc.clipped_adamw(1e-3, 1.0, **options)
    def step(params, state, given):
      value, grads = gradients_of(params, given)
      return *transform.step(grads, state, params), value
    return step, (params, jax.eval_shape(transform.init, params), given), (0, 1)

  adamw = lambda *before: optax.chain(*before, optax.adamw(1e-3))
  stage = lambda scale_stage: ogc.global_clip(1.0, scale_stage=scale_stage)
  stock = optax.clip_by_global_norm(1.0)
  return {
      "norm: ogc.global_norm": (ogc.global_norm, (params,), ()),
      "norm: optax.tree.norm": (optax.tree.norm, (params,), ()),
      "clip: ogc.clip_tree": ((lambda grads: ogc.clip_tree(grads, 1.0)), (params,), (0,)),
      "clip: optax.clip_by_global_norm": ((lambda grads: stock.update(grads, stock.init(grads))[0]), (params,), (0,)),
      "chain with adamw: ogc auto": update(adamw(stage("auto"))),
      "chain with adamw: ogc kernel": update(adamw(stage("kernel"))),
      "chain with adamw: optax": update(adamw(stock)),
      "chain with adamw: no clip": update(adamw()),
      **{f"chain with adamw: {name}": update(adamw(ogc.global_clip(rule))) for name, rule in RULES.items()},
      "chain with adamw: per_tensor_clip": update(adamw(ogc.per_tensor_clip(1.0))),
      "chain with adamw: adagc": update(adamw(ogc.per_tensor_clip(ogc.adagc()))),
      "clip: ogc.global_clip": update(stage("kernel")),
      "clip: ogc.global_clip, monitored": update(ogc.global_clip(1.0, scale_stage="kernel", monitor=True)),
      "chain with adamw: ogc auto, monitored": update(adamw(ogc.global_clip(1.0, monitor=True))),
      "whole step: clipped_adamw.step": fused(lambda params, grads: ((), grads), params),
      "whole step: the same, skipping": fused(lambda params, grads: ((), grads), params, on_nonfinite="skip"),
      "whole step: chain, ogc auto": whole(adamw(stage("auto"))),
      "whole step: chain, optax": whole(adamw(stock)),
      "train step: clipped_adamw.step": fused(jax.value_and_grad(loss), tokens),
      "train step: ogc auto": train_step(adamw(stage("auto"))),
      "train step: ogc kernel": train_step(adamw(stage("kernel"))),
      "train step: optax": train_step(adamw(stock)),
      "train step: no clip": train_step(adamw()),
  }


def thunks(function, arguments):
  """What XLA will run, as it prints it: thunks, those of a command buffer indented below it."""
  def in_a_command_buffer(*args):
    return function(*args)
  jax.jit(in_a_command_buffer, donate_argnums=0).trace(*arguments).lower(lowering_platforms=("cuda",)).compile()
  return next(pathlib.Path(DUMP.name).glob("*thunk_sequence_after_thunk_passes.txt")).read_text()


def check(results, tree_mb):
  """The claims, as `(sentence, whether it holds)`."""
  norm = results["norm: ogc.global_norm"]
  clip, stock = results["clip: ogc.clip_tree"], results["clip: optax.clip_by_global_norm"]
  chain, stock_chain = results["chain with adamw: ogc auto"], results["chain with adamw: optax"]
  bare = results["chain with adamw: no clip"]
  yield "clip_tree of a donated tree is one custom call and no copy", clip["custom_calls"] == 1 and clip["copies"] == 0
  yield "clip_tree takes three kernels, and a norm two", (clip["kernels"], norm["kernels"]) == (3, 2)
  yield "clip_tree reads the tree once where nothing is clipped", clip["mb_unclipped"] <= 1.01 * tree_mb
  yield "clip_tree moves no more than optax where all is clipped", clip["mb_clipped"] <= 1.01 * stock["mb_clipped"]
  kernel = results["chain with adamw: ogc kernel"]
  most = max(chain["kernels"], kernel["kernels"])
  yield "a chain with adamw takes at most five kernels more than adamw alone", most <= bare["kernels"] + 5
  yield "the chain moves no more than optax's", chain["mb_clipped"] <= 1.001 * stock_chain["mb_clipped"]
  for name in ("clip: ogc.global_clip", "chain with adamw: ogc auto"):
    plain, monitored = results[name], results[f"{name}, monitored"]
    more = monitored["mb_clipped"] - plain["mb_clipped"]
    yield f"monitor=True reads no gradient again ({name})", more < 0.001 * tree_mb
  whole = results["whole step: clipped_adamw.step"]
  yield "a whole step of 148 leaves is at most five launches and no copy", whole["kernels"] <= 5 and whole["copies"] == 0
  yield "a whole step moves 32 bytes a parameter", whole["mb_clipped"] <= 1.01 * 8 * tree_mb
  yield "a train step with it copies nothing more", (results["train step: clipped_adamw.step"]["copied_mb"]
                                                    <= results["train step: no clip"]["copied_mb"] + 0.01)
  # How many launches a rule may add; of autoclip's, the sort is one.
  for name, most in {"schedule": 4, "ema_clip": 4, "zclip": 4, "autoclip": 7}.items():
    added = results[f"chain with adamw: {name}"]["launches"] - chain["launches"]
    yield f"{name} adds at most {most} launches to the chain", added <= most
  added = results["chain with adamw: adagc"]["launches"] - results["chain with adamw: per_tensor_clip"]["launches"]
  yield "adagc adds at most 4 launches to a chain with per_tensor_clip", added <= 4
  for name in ("auto", "kernel"):
    step, without = results[f"train step: ogc {name}"], results["train step: no clip"]
    yield f"a train step ({name}) copies no gradient", step["copied_mb"] <= without["copied_mb"] + 0.01


def main(argv=None):
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--layers", type=int, default=gpt.SMALL.layers)
  parser.add_argument("--check", action="store_true", help="exit with 1 where a claim fails, and write no file")
  parser.add_argument("--only", default="", help="the programs whose names begin so")
  parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
  args = parser.parse_args(argv)

  if not ogc.backend_info()["cuda"].startswith("native"):
    sys.exit(f"no CUDA library: {ogc.backend_info()['cuda']}")
  place = place_on_one()
  params = place(gpt.parameters(gpt.SMALL._replace(layers=args.layers)))
  tokens = place(jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32))

  results = {}
  for name, (function, arguments, donated) in programs(params, tokens).items():
    if not name.startswith(args.only):
      continue
    traced = jax.jit(function, donate_argnums=donated).trace(*place(arguments))
    compiled = traced.lower(lowering_platforms=("cuda",)).compile()
    results[name] = hlo.measure(compiled.as_text())
    print(f"{name:36}", *(f"{key} {value:g}" for key, value in results[name].items()), sep="  ", flush=True)

  leaves = jax.tree.leaves(params)
  tree_mb = sum(leaf.size for leaf in leaves) * 4 / 1e6
  claims = {} if args.only else dict(check(results, tree_mb))
  if not args.only:
    sequence = thunks(lambda tree: ogc.clip_tree(tree, 1.0), [place([jax.ShapeDtypeStruct((1000,), jnp.float32)] * 3)])
    claims["XLA puts the call in a command buffer"] = bool(re.search(r"kCommandBuffer.*\n +\d+: kCustomCall", sequence))
  for sentence, holds in claims.items():
    print("ok  " if holds else "FAIL", sentence)
  if not args.check and not args.only:
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "jax-cuda13-plugin", "optax")}
    record = {"device": "NVIDIA H200, compiled for without one", "versions": versions, "leaves": len(leaves),
              "parameters": sum(leaf.size for leaf in leaves), "tree_mb": round(tree_mb, 1), "programs": results,
              "claims": claims}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n")
  return 0 if all(claims.values()) else 1


if __name__ == "__main__":
  sys.exit(main())
