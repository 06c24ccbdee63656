"""partitioning/verdict.py: one answer about tables, names and traced activations."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from partitioning.constraints import constrain
from partitioning.rules import Dim, LayoutError
from partitioning.verdict import TABLES, check_layout

LEGEND = {
  "B": Dim("batch", None),
  "D": Dim("model", 12),
  "F": Dim("feedforward", 20),
  "O": Dim("outputs", 6),
}
TABLE = {"batch": ("data",), "model": ("fsdp",), "feedforward": ("tensor",), "outputs": ()}
SIZES = {"data": 2, "fsdp": 3, "tensor": 4}
NAMES = {"up": "DF", "down": "FO"}
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


def array(*shape):
  """Returns an abstract float32 array."""
  return jax.ShapeDtypeStruct(shape, jnp.float32)


def two_matmuls(params, x_BD):
  """Constrains what it computes."""
  x_BF = constrain(constrain(x_BD, "BD") @ params["up"], "BF")
  return constrain(x_BF @ params["down"], "BO")


def verdict(*, sizes=SIZES, legend=LEGEND, rows=8, forward=two_matmuls, **changes):
  """Returns the layout of a network of two matmuls; `changes` are arguments of `check_layout`."""
  width, outputs = legend["F"].size, legend["O"].size
  params = {"up": array(12, width), "down": array(width, outputs)}
  mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))

  def trace():
    with jax.sharding.use_abstract_mesh(mesh):
      jax.eval_shape(lambda *arguments: forward(*arguments), params, array(rows, 12))

  given = {
    "names": NAMES,
    "batch_letters": {"inputs": "BD"},
    "legend": legend,
    "tables": dict.fromkeys(TABLES, TABLE),
    "sizes": sizes,
  }
  state = jax.eval_shape(OPTIMIZER.init, params)
  return check_layout(params, state, {"inputs": array(rows, 12)}, trace, **{**given, **changes})


def refusal(**changes):
  """Returns the failures for which a layout is refused."""
  with pytest.raises(LayoutError) as error:
    verdict(**changes)
  return error.value.failures


def test_every_array_is_laid_out():
  layout = verdict()
  specs = {name: p.spec for section in layout.placements.values() for name, p in section.items()}
  assert specs == {
    "up": PartitionSpec("fsdp", "tensor"),
    "down": PartitionSpec("tensor", None),
    "optimizer/0/trace/up": PartitionSpec("fsdp", "tensor"),
    "optimizer/0/trace/down": PartitionSpec("tensor", None),
    "batch/inputs": PartitionSpec("data", "fsdp"),
  }
  assert [(c.letters, c.shape) for c in layout.activations.seen] == [
    ("BD", (8, 12)),
    ("BF", (8, 20)),
    ("BO", (8, 6)),
  ]
  assert layout.activations.axes() == {"data", "fsdp", "tensor"}


def test_a_cause_is_named_with_the_arrays_that_are_stored_and_once():
  failures = refusal(legend={**LEGEND, "F": Dim("feedforward", 22)})
  assert [failure.partition(":")[0] for failure in failures] == ["down", "up"]
  assert all("dim F (feedforward) = 22 is not divisible" in failure for failure in failures)


def test_another_cause_of_the_same_dim_is_named_too():
  tables = {**dict.fromkeys(TABLES, TABLE), "activations": {**TABLE, "feedforward": ("fsdp",)}}
  *stored, activation = refusal(legend={**LEGEND, "F": Dim("feedforward", 22)}, tables=tables)
  assert all("= 22 is not divisible by mesh axis tensor=4" in failure for failure in stored)
  assert activation.startswith(
    "activation BF [8, 22]: dim F (feedforward) = 22 is not divisible by mesh axis fsdp=3"
  )


def test_failures_of_all_sections_come_together():
  failures = refusal(
    rows=7,
    names={**NAMES, "across": "D"},
    overrides=(("upp", ()),),
    legend={**LEGEND, "O": Dim("outputs", 5)},
    tables={**dict.fromkeys(TABLES, TABLE), "activations": {**TABLE, "outputs": ("tensor",)}},
  )
  assert [failure.partition(":")[0] for failure in failures] == [
    "rule 'across'",
    "partitioning.overrides",
    "batch/inputs",
    "activation BO [7, 5]",
  ]


def test_a_wrong_table_is_refused_before_anything_is_traced():
  wrong = {**TABLE, "outputs": ("tensr",)}

  def unreachable(*_):
    raise AssertionError

  [failure] = refusal(
    tables={**dict.fromkeys(TABLES, TABLE), "optimizer": wrong}, forward=unreachable
  )
  assert failure.startswith("partitioning.optimizer.outputs: unknown mesh axis 'tensr'")


def test_an_unused_axis_and_replicated_bytes():
  unused, replicated = refusal(
    sizes={**SIZES, "stage": 2},
    tables={**dict.fromkeys(TABLES, TABLE), "parameters": dict.fromkeys(TABLE, ())},
    max_replicated_bytes=400,
  )
  assert unused.startswith("mesh.stage=2: no parameter, activation or schedule")
  held = 4 * (12 * 20 + 20 * 6) / 1024
  assert replicated.startswith(f"{held:.1f} KiB per device are replicated")
  assert "the largest is up [12, 20]" in replicated
