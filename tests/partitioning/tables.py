"""A small model's legend, axis table and parameters, with distinct sizes."""

import math

import jax
import jax.numpy as jnp

from partitioning.rules import Dim
from partitioning.verdict import check_layout

LEGEND = {
  "L": Dim("layers", 3),
  "D": Dim("model", 12),
  "F": Dim("feedforward", 20),
  "K": Dim("kv_heads", 7, may_replicate=True),
  "H": Dim("head", 5),
}


TABLE = {
  "layers": (),
  "model": ("fsdp",),
  "feedforward": ("tensor",),
  "kv_heads": ("tensor",),
  "head": (),
}


SIZES = {"data": 1, "fsdp": 2, "stage": 1, "expert": 1, "context": 1, "tensor": 4}


def array(*shape):
  """Returns an abstract float32 array."""
  return jax.ShapeDtypeStruct(shape, jnp.float32)


def params(**more):
  """Returns a tree of parameters that the rules place without a failure."""
  layers = {"up": {"kernel": array(3, 12, 20)}, "gate": {"kernel": array(3, 12, 20)}}
  layers["key"] = {"kernel": array(3, 12, 7, 5)}
  return {"layers": layers, "norm": {"scale": array(12)}, **more}


RULES = {"layers/(up|gate)/kernel": "LDF", "layers/key/kernel": "LDKH", "norm/scale": "D"}


def specs(tree, *, names=RULES, legend=LEGEND, table=TABLE, sizes=SIZES, overrides=()):
  """Returns name -> PartitionSpec of parameters, as the verdict lays them out.

  An activation takes every axis, so that none is unused.
  """
  tables = {"parameters": table, "optimizer": table, "activations": table}
  layout = check_layout(
    tree,
    {},
    {"all": array(math.prod(sizes.values()))},
    lambda: None,
    names=names,
    batch_letters={"all": "B"},
    legend={**legend, "B": Dim("batch", None)},
    tables={title: {**table, "batch": tuple(sizes)} for title, table in tables.items()},
    sizes=sizes,
    overrides=overrides,
  )
  return {name: found.spec for name, found in layout.placements["parameters"].items()}
