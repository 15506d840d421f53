"""What does a compiled program send between devices for the sake of the clip?"""

import importlib.util

import jax
import jax.numpy as jnp
import optax
import optax_globalclip as ogc
import processes
import pytest
import sharded
from jax.sharding import NamedSharding
from sharded import AUTO, EXPLICIT, P, make_mesh, put


def update(tx):
  return lambda tree: tx.update(tree, tx.init(tree))[0]


def check_small(collectives, most_bytes=64):
  assert {kind for kind, _ in collectives} <= {"all-reduce"}, collectives
  assert 1 <= len(collectives) <= 2
  assert all(size <= most_bytes for _, size in collectives), collectives


FUNCTIONS = {"global_clip": update(ogc.global_clip(1.0)), "loss_scale": update(ogc.global_clip(1.0, loss_scale=8.0)),
             "clip_tree": lambda t: ogc.clip_tree(t, 1.0), "global_norm": ogc.global_norm}


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_whole_tree_costs_two_small_all_reduces(function, kind):
  tree = put(sharded.tree(), make_mesh(kind), sharded.SPECS)
  check_small(sharded.collectives(sharded.compiled(FUNCTIONS[function], tree)))


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_the_reference_path_costs_no_more(kind, monkeypatch):
  monkeypatch.setenv("OPTAX_GLOBALCLIP_BACKEND", "reference")
  tree = put(sharded.tree(), make_mesh(kind), sharded.SPECS)
  check_small(sharded.collectives(sharded.compiled(FUNCTIONS["global_clip"], tree)))


def test_manual_and_given_meshes_cost_the_same():
  mesh = make_mesh(AUTO)
  tree = put(sharded.tree(), mesh, sharded.SPECS)
  manual = jax.shard_map(lambda t: ogc.clip_tree(t, 1.0), mesh=mesh, in_specs=(sharded.SPECS,),
                         out_specs=(sharded.SPECS, P()))
  given = update(ogc.global_clip(1.0, mesh=mesh, specs=sharded.SPECS))
  for function in (manual, given):
    check_small(sharded.collectives(sharded.compiled(function, tree)))


def test_float64_costs_two_small_all_reduces(x64):
  tree = put({"a": jnp.ones(16, jnp.float64)}, make_mesh(AUTO), {"a": P("x")})
  check_small(sharded.collectives(sharded.compiled(update(ogc.global_clip(1.0)), tree)))


def test_leaf_norms_cost_a_few_numbers_a_leaf():
  tree = put(sharded.tree(), make_mesh(AUTO), sharded.SPECS)
  for function in (ogc.leaf_norms, update(ogc.per_tensor_clip(1.0)),
                   lambda t: ogc.global_clip(1.0, monitor=True).update(t, ogc.global_clip(1.0, monitor=True).init(t))):
    check_small(sharded.collectives(sharded.compiled(function, tree)), most_bytes=20 * (len(tree) + 1))  # a row for the tree too


RULES = {"schedule": optax.linear_schedule(2.0, 1.0, 10), "ema_clip": ogc.ema_clip(), "zclip": ogc.zclip(),
         "autoclip": ogc.autoclip(n=8)}


def of_update(tx, tree):
  """What an update of a state that is given, not made inside, sends: with the state it returns."""
  return sharded.collectives(sharded.compiled(tx.update, tree, tx.init(tree)))


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_sends_no_more_than_a_constant(rule, kind):
  tree = put(sharded.tree(), make_mesh(kind), sharded.SPECS)
  constant = of_update(ogc.global_clip(1.0), tree)
  check_small(constant)
  assert of_update(ogc.global_clip(RULES[rule]), tree) == constant


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_a_rule_of_every_leaf_sends_no_more_than_a_constant(kind):
  tree = put(sharded.tree(), make_mesh(kind), sharded.SPECS)
  constant = of_update(ogc.per_tensor_clip(1.0), tree)
  for rule in (ogc.adagc(), ogc.zclip()):
    assert of_update(ogc.per_tensor_clip(rule), tree) == constant


# ----------------------------------------------------------------------------------------------------------------------
# A train step with fully sharded parameters (along fsdp) and tensor parallelism (along model)


def train_step(tx, mesh, specs):
  def loss(params, batch):
    x = batch
    for layer in ("first", "second"):
      x = jnp.tanh(x @ params[layer]["up"] + params[layer]["bias"][None]) @ params[layer]["down"]
      x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("fsdp")))
    return jnp.mean(jnp.square(x))

  def step(params, state, batch):
    value, grads = jax.value_and_grad(loss)(params, batch)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value

  layouts = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda spec: isinstance(spec, P))
  state_layouts = optax.tree.map_params(tx, lambda _, layout: layout, jax.eval_shape(tx.init, shapes()), layouts,
                                        transform_non_params=lambda _: NamedSharding(mesh, P()))
  return jax.jit(step, in_shardings=(layouts, state_layouts, NamedSharding(mesh, P("fsdp"))),
                 out_shardings=(layouts, state_layouts, NamedSharding(mesh, P())))


def shapes():
  layer = {"up": jax.ShapeDtypeStruct((32, 128), jnp.float32), "down": jax.ShapeDtypeStruct((128, 32), jnp.float32),
           "bias": jax.ShapeDtypeStruct((128,), jnp.float32)}
  return {"first": layer, "second": layer}


LAYER_SPECS = {"up": P("fsdp", "model"), "down": P("model", "fsdp"), "bias": P("model")}
MODEL_SPECS = {"first": LAYER_SPECS, "second": LAYER_SPECS}


def train_step_collectives(tx, mesh):
  state = jax.eval_shape(tx.init, shapes())
  hlo = train_step(tx, mesh, MODEL_SPECS).lower(shapes(), state, jax.ShapeDtypeStruct((16, 32), jnp.float32)).compile()
  return sharded.collectives(hlo.as_text())


def moving(collectives):
  return sorted(c for c in collectives if c[0] != "all-reduce")


@pytest.mark.parametrize("shardy", [True, False])
def test_a_train_step_gathers_as_much_with_the_clip_as_without(shardy, standard_promotion):
  mesh = make_mesh(AUTO, shape=(4, 2), names=("fsdp", "model"))
  jax.config.update("jax_use_shardy_partitioner", shardy)
  try:
    bare = train_step_collectives(optax.adamw(1e-3), mesh)
    clipped = train_step_collectives(optax.chain(ogc.global_clip(1.0), optax.adamw(1e-3)), mesh)
    by_rule = train_step_collectives(optax.chain(ogc.global_clip(ogc.zclip()), optax.adamw(1e-3)), mesh)
  finally:
    jax.config.update("jax_use_shardy_partitioner", True)
  assert [kind for kind, _ in bare].count("all-gather") > 0
  for collectives in (clipped, by_rule):
    assert moving(collectives) == moving(bare)
    added = len(collectives) - len(bare)
    assert added <= 2 and sum(size for _, size in collectives) - sum(size for _, size in bare) <= 128


def test_a_window_that_may_be_skipped_sends_no_more_than_another(standard_promotion):
  mesh = make_mesh(AUTO, shape=(4, 2), names=("fsdp", "model"))
  def of_windows(max_norm, **options):
    return train_step_collectives(ogc.clipped_multi_steps(optax.adamw(1e-3), max_norm, every_k=2, **options), mesh)
  spikes = ogc.SpikeRule(window=8, deviations=6.0)
  assert sorted(of_windows(ogc.zclip(), skip_spikes=spikes)) == sorted(of_windows(1.0))


# ----------------------------------------------------------------------------------------------------------------------
# Meshes that this machine does not have

COLLECTIVES = """
    import json, time
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    import optax_globalclip as ogc, sharded

    def report(mesh, leaves, specs):
      layouts = [NamedSharding(mesh, spec) for spec in specs]
      tree = {f"leaf{i}": jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=layouts[i % len(layouts)])
              for i, shape in enumerate(leaves)}
      tx = ogc.global_clip(1.0)
      start = time.perf_counter()
      hlo = jax.jit(lambda t: tx.update(t, tx.init(t))[0]).lower(tree).compile().as_text()
      print(json.dumps(dict(seconds=time.perf_counter() - start, collectives=sharded.collectives(hlo),
                            custom_calls=hlo.count("optax_globalclip_"))))
"""


def elsewhere(script, **variables):
  return processes.answer(processes.python(COLLECTIVES, script), timeout=300, **variables)


def test_512_devices_compile_soon_and_cost_the_same():
  found = elsewhere("""
      mesh = jax.make_mesh((8, 32, 2), ("data", "fsdp", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
      report(mesh, [(64, 64)] * 48, [P("fsdp", "model"), P("model", "fsdp"), P()])
  """, XLA_FLAGS="--xla_force_host_platform_device_count=512")
  check_small(found["collectives"])
  assert found["seconds"] < 60


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None,
                    reason="compiling for an H200 without one needs jax-cuda13-plugin")
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_eight_h200_cost_two_small_all_reduces(backend):
  found = elsewhere(f"""
      from jax.experimental import topologies
      topology = topologies.get_topology_desc("h200", "cuda", topology="1x1x8",
                                              target_config=open({str(processes.TESTS / "h200.txtpb")!r}).read())
      report(Mesh(np.asarray(topology.devices).reshape(4, 2), ("fsdp", "model")), [(64, 64)] * 12,
             [P("fsdp", "model"), P("model"), P()])
  """, JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1", XLA_FLAGS="--xla_gpu_autotune_level=0", OPTAX_GLOBALCLIP_BACKEND=backend)
  check_small(found["collectives"])
  built = ogc.backend_info()["cuda"].startswith("native")
  assert (found["custom_calls"] > 0) == (built and backend == "auto")
