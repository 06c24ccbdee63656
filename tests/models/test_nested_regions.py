"""The decoder inside of regions that are manual over pipeline stages or experts, in float64."""

import contextlib
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from partitioning import rules
from partitioning.constraints import activation_layout
from partitioning.mesh import make_mesh
from partitioning.mesh_sizes import AXES
from tests.helpers.jobs import first_state, make_job

ROWS, LENGTH, LAYERS = 8, 12, 4
KEYS = {
  "training.parameter_dtype": "float64",
  "model.layers": LAYERS,
  "model.window": 5,
  "model.global_every": 3,
  "model.dropout_rate": 0.2,
}
# Inside of the region the rows are split over `expert` already: the tables' axis is left out there.
ROWS_OVER_EXPERTS = {"partitioning.activations.batch": ("data", "fsdp", "expert")}
TOKENS = np.random.default_rng(2).integers(0, 61, (ROWS, LENGTH), np.int32)


@contextlib.contextmanager
def traced_on(job, **mesh):
  """Sets a mesh that no job may have, since nothing uses the axis of the region yet."""
  sizes = {**dict.fromkeys(AXES, 1), **mesh}
  over = make_mesh(sizes, jax.devices()[: math.prod(sizes.values())])
  tables = job.config.partitioning
  with (
    jax.set_mesh(over),
    activation_layout(job.legend, tables.activations, parameters=tables.parameters),
    jax.default_matmul_precision("highest"),
  ):
    yield over


def graph(job, params):
  return nnx.merge(job.program.graphdef, params)


def plain(job, params, key):
  """Returns the logits without a surrounding region."""
  model = graph(job, params)
  batch = {"tokens": jnp.asarray(TOKENS)}
  return model.head(model.blocks(model.enter(batch), model.rows(batch), key)[0])


def staged(job, params, key):
  """Returns the logits of a pipeline of two stages, each with its half of the layers."""
  stack = {**params, "layers": {}}
  batch = {"tokens": jnp.asarray(TOKENS)}
  x_BRD = graph(job, params).enter(batch)

  def stage(layers, x_BRD):
    model = graph(job, {**stack, "layers": layers})
    rows = model.rows(batch)
    first = jax.lax.axis_index("stage") * (LAYERS // 2)

    def turn(x_BRD, _):
      y_BRD, _ = model.blocks(x_BRD, rows, key, first=first)
      return jax.lax.ppermute(y_BRD, "stage", [(0, 1)]), y_BRD

    # The second stage's first result is garbage, which nothing reads.
    return jax.lax.scan(turn, x_BRD, length=2)[1][1:]

  run = jax.shard_map(
    stage,
    in_specs=(PartitionSpec("stage"), PartitionSpec()),
    out_specs=PartitionSpec("stage"),
    axis_names={"stage"},
    check_vma=False,
  )
  return graph(job, params).head(run(params["layers"], x_BRD)[1])


def over_experts(job, params, key):
  """Returns the logits of rows that are split over `expert`, all else inside of its region."""

  def part(params, tokens_BT):
    model = graph(job, params)
    batch = {"tokens": tokens_BT}
    return model.head(model.blocks(model.enter(batch), model.rows(batch), key)[0])

  split = PartitionSpec("expert")
  run = jax.shard_map(
    part,
    in_specs=(PartitionSpec(), split),
    out_specs=split,
    axis_names={"expert"},
    check_vma=False,
  )
  return run(params, jnp.asarray(TOKENS))


def values(job, forward, key, **mesh):
  """Returns logits, and the gradient of a function of them, by a forward pass on a mesh."""
  weights_BTV = np.random.default_rng(3).standard_normal((ROWS, LENGTH, 61))

  def loss(params):
    logits_BTV = forward(job, params, key)[:, :, :61]
    return jnp.sum(jnp.sin(logits_BTV) * weights_BTV), logits_BTV

  start = jax.device_get(first_state(job).params)
  with traced_on(job, **mesh) as over:
    lie = rules.shardings(job.state.params, job.placements["parameters"], over)
    params = jax.device_put(start, lie)
    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (_, logits), gradient = step(params)
  return jax.device_get((logits, gradient))


@functools.cache
def without_region(*, dropping):
  """Returns the values on one device, with dropout or without."""
  return values(make_job("single", "lm", **KEYS), plain, jax.random.key(5) if dropping else None)


def assert_same(found, wanted):
  for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
    assert ours.dtype == np.float64
    assert np.linalg.norm(ours - theirs) <= 1e-12 * np.linalg.norm(theirs)


@pytest.mark.parametrize(
  ("forward", "mesh", "keys"),
  [
    (staged, {"stage": 2, "tensor": 2, "fsdp": 2}, {}),
    pytest.param(
      staged,
      {"stage": 2, "tensor": 2, "data": 2},
      {"partitioning.sequence_parallel": True},
      marks=pytest.mark.long,
    ),
    (over_experts, {"expert": 2, "tensor": 2, "fsdp": 2}, ROWS_OVER_EXPERTS),
  ],
)
def test_matmuls_inside_a_manual_region(forward, mesh, keys):
  with jax.enable_x64(True):
    job = make_job("single", "lm", **KEYS, **keys)
    dropping = jax.random.key(5) if forward is staged else None  # which no other split redraws
    wanted = without_region(dropping=forward is staged)
    assert_same(values(job, forward, dropping, **mesh), wanted)
