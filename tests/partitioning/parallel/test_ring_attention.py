"""A sequence split over `context`: attention in a ring and by gathering, beside one device."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from models import attention
from partitioning.constraints import activation_layout
from partitioning.parallel import ring_attention, split_sequence
from planning.traced_step import body, equations, fixed_and_carried
from runtime import collectives
from tests.helpers.jobs import first_state, host_batch, make_job, place
from tests.parity.comparison import (
  assert_equal,
  train,
)

MESHES = {
  "context8": {"mesh.context": 8},
  "context4_tensor2": {"mesh.context": 4, "mesh.tensor": 2},
  "fsdp2_context2_tensor2": {"mesh.fsdp": 2, "mesh.context": 2, "mesh.tensor": 2},
}
RING = {"model.context_attention": "ring"}
LONG = {"data.sequence_length": 32, **RING}
# What changes who sees whom: a window beyond a device's part, soft caps, documents.
SEEN = {
  "model.window": 11,
  "model.global_every": 2,
  "model.attention_soft_cap": 0.5,
  "model.separate_documents": True,
}
# Heads that tensor does not divide: every device holds the one key/value head whole. And what is
# dropped of a token must not depend on where it lies.
ONE_HEAD = {"model.kv_heads": 1, "model.dropout_rate": 0.2}


@functools.cache
def on_one_device(changed: bool):
  """Returns what one device gives for a longer sequence; with `SEEN` and `ONE_HEAD`, or without."""
  return train("lm", "float64", {**LONG, **({**SEEN, **ONE_HEAD} if changed else {})})


@pytest.mark.parametrize(
  ("mesh", "kind"),
  [
    ("context4_tensor2", "ring"),
    ("context8", "gather"),
    ("context4_tensor2", "ulysses"),
    pytest.param("fsdp2_context2_tensor2", "ring", marks=pytest.mark.long),
  ],
)
def test_windows_soft_caps_documents_dropout_and_a_replicated_head(mesh, kind):
  overrides = {**LONG, **SEEN, **ONE_HEAD, **MESHES[mesh], "model.context_attention": kind}
  if kind == "ring":  # where the sequence stays split over `context`
    overrides["training.loss_chunks"] = 2
  assert_equal(train("lm", "float64", overrides), on_one_device(True), "float64")


@pytest.mark.parametrize("kind", ["ring", "gather"])
def test_no_step_has_all_its_scores(kind, monkeypatch):
  monkeypatch.setitem(attention.TILES, "cpu", attention.Tiles((8, 8), 128, ""))

  def scores(kernel):
    keys = {"data.sequence_length": 256, "training.attention_kernel": kernel}
    found = equations(traced(**keys, **{"model.context_attention": kind}))
    every = (x.aval.shape[-2:] for one in found for x in one.outvars if x.aval.ndim > 3)
    # No dim of the model is a multiple of 32; a device has 64 queries, and all of their keys pass.
    return {shape for shape in every if all(size % 32 == 0 for size in shape)}

  assert scores("xla") == ({(32, 64), (64, 32), (32, 32)} if kind == "ring" else {(256, 256)})
  assert not scores("blockwise")


@functools.cache
def evaluated(kind, **overrides):
  """Returns the sums of an evaluation step on the first state."""
  return sums({**overrides, "model.context_attention": kind})


def sums(overrides):
  """Returns the sums of an evaluation step on the first state."""
  job = make_job("single", "lm", **{**LONG, **overrides})
  step = job.compile_eval_step().function
  found = step(first_state(job).params, place(job, host_batch(job)))
  return {key: float(value) for key, value in found.items()}


def test_cudnn_attends_over_complete_rows_of_some_heads():
  keys = {"model.head_size": 8, "training.compute_dtype": "bfloat16"}
  split = {**MESHES["fsdp2_context2_tensor2"], "training.attention_kernel": "cudnn"}
  found = evaluated("auto", **keys, **split)
  # On CPUs its place is taken by blocks, on the same parts of the same arrays.
  assert found == pytest.approx(evaluated("gather", **keys), rel=1e-3)


# ------------------------------ which of the three ------------------------------


@pytest.mark.parametrize(
  ("length", "count", "tensor", "heads", "fastest"),
  [
    (8192, 8, 1, (32, 8), "ring"),  # llama3_8b: 1,024 tokens of a device, groups of 4 query heads
    (4096, 8, 1, (32, 8), "ulysses"),  # half of the compute does not hide what a ring sends
    (4096, 8, 2, (32, 8), "gather"),  # 16 devices need each key/value head twice
    (8192, 8, 1, (32, 32), "ulysses"),  # llama2_7b
    (131072, 8, 1, (32, 32), "ring"),
    (8192, 8, 8, (32, 8), "ring"),  # 64 devices have no head each
    (8196, 12, 1, (64, 8), "gather"),  # 683 tokens of a device make no two pieces
  ],
)
def test_the_fastest_way_follows_from_what_is_sent_and_computed(
  length, count, tensor, heads, fastest
):
  given = "auto", "blockwise", length, *heads
  assert split_sequence.fastest_way(*given, count=count, tensor=tensor) == fastest
  # cuDNN's kernel takes complete rows alone.
  given = "auto", "cudnn", *given[2:]
  found = split_sequence.fastest_way(*given, count=count, tensor=tensor)
  assert found == (fastest if heads[0] % (count * tensor) else "ulysses")


@pytest.mark.parametrize(("operations", "rings"), [(1, True), (1e9, False)])
def test_the_default_follows_the_formula(operations, rings, monkeypatch):
  monkeypatch.setattr(split_sequence, "OPERATIONS_PER_BYTE", operations)
  jaxpr = traced(**{"mesh.context": 2, "model.context_attention": "auto"})
  sent = [one for one in equations(jaxpr) if one.primitive.name == "ppermute"]
  assert bool(sent) == rings
  assert all(one.params["axis_name"] in ("context", ("context",)) for one in sent)


# ------------------------------ what each device does ------------------------------


def test_the_order_gives_each_device_an_early_and_a_late_piece():
  assert ring_attention.zigzag_order(16, 4).tolist() == [
    0,
    1,
    14,
    15,
    2,
    3,
    12,
    13,
    4,
    5,
    10,
    11,
    6,
    7,
    8,
    9,
  ]
  with pytest.raises(ValueError, match="a sequence of 12 is not divisible into 2 x 4 pieces"):
    ring_attention.zigzag_order(12, 4)


@pytest.mark.parametrize("manual", [(), ("data",), ("data", "fsdp")])
def test_tokens_are_put_in_order_also_where_a_region_has_some_of_the_rows(manual):
  # XLA's own gather along the split dim would abort this process in the second and third case.
  job = make_job("single", "lm", **{"mesh.data": 2, "mesh.fsdp": 2, "mesh.context": 2}, **LONG)
  order = ring_attention.zigzag_order(32, 2)
  tokens = np.random.default_rng(0).integers(0, 1000, (16, 32)).astype(np.int32)

  def ordered(tokens):
    inside = functools.partial(ring_attention.in_order, order_T=order, letters="BT")
    if not manual:
      return inside(tokens)
    rows = PartitionSpec(manual)
    return jax.shard_map(inside, in_specs=rows, out_specs=rows, axis_names={*manual})(tokens)

  with jax.set_mesh(job.mesh), activation_layout(job.legend, job.config.partitioning.activations):
    rows = jax.jit(ordered)(tokens)
  np.testing.assert_array_equal(rows, tokens[:, order])
  assert rows.sharding.shard_shape(rows.shape) == (4, 16)


def sizes(context):
  """Returns (bytes of temporary memory, collectives) of a compiled step."""
  overrides = {
    "data.sequence_length": 256,
    "data.global_batch_size": 2,
    "mesh.context": context,
    **RING,
    "training.rematerialization": "full",
  }
  job = make_job("single", "lm", **overrides)
  step = job.compile_train_step().function
  found = collectives.collectives(step.as_text(), job.mesh)
  return step.memory_analysis().temp_size_in_bytes, {(c.kind, c.axes) for c in found}


@pytest.mark.long
def test_memory_falls_with_the_axis_and_keys_go_round():
  one, _ = sizes(1)
  two, _ = sizes(2)
  eight, kinds = sizes(8)
  # What CPUs report is of one device.
  assert eight < 0.5 * two < 0.5 * one
  assert ("collective-permute", ("context",)) in kinds


# ------------------------------ mutations ------------------------------


# ------------------------------ what the traced program holds ------------------------------


def traced(**overrides):
  """Returns the jaxpr of the gradients of two layers under context=4, so of three rounds."""
  job = make_job("single", "lm", **{**LONG, "mesh.context": 4, **overrides})
  with job.tracing():
    key = jax.random.key(0)
    return jax.make_jaxpr(job.program.gradients)(job.program.params, job.batch, key).jaxpr


@pytest.mark.parametrize("rematerialization", ["none", "full"])
def test_nothing_of_a_round_is_kept(rematerialization):
  # The last of seven rounds is outside of the scan.
  jaxpr = traced(**{"mesh.context": 8, "training.rematerialization": rematerialization})
  rounds = [one for one in equations(jaxpr) if one.params.get("length") == 6]
  assert rounds
  for one in rounds:
    assert shapes(one.outvars) == shapes(body(one).outvars), "nothing is of all rounds"


def test_no_fill_of_scores_is_handed_to_the_layers():
  piece = LONG["data.sequence_length"] // 8  # two for each of four devices
  for one in layers_of(traced()):
    fixed, _ = fixed_and_carried(one)
    # What sums begin with is handed in: slots and a head's 6 are its last dimensions.
    found = shapes(x for x in one.invars[:fixed] if x.aval.ndim == 4)
    assert not [shape for shape in found if set(shape[2:]) <= {piece, 2 * piece}], found


def layers_of(jaxpr):
  """Returns the scans over the two layers, forward and backward."""
  layers = [one for one in jaxpr.eqns if one.params.get("length") == 2]
  assert len(layers) == 2
  return layers


def shapes(variables):
  """Returns the shape of each."""
  return [x.aval.shape for x in variables]
