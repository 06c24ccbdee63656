"""Programs made of a few lines, and what is told of them."""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from runtime.collectives import collectives


def make_mesh(devices=None, **sizes):
  shape = tuple(sizes.values())
  devices = np.array(jax.devices() if devices is None else devices).reshape(shape)
  return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def told(text, mesh):
  return [(c.kind, c.axes, c.bytes, c.count) for c in collectives(text, mesh)]


def entry(*lines):
  """A program whose ENTRY has these lines."""
  return "HloModule m\n\nENTRY %main (p: f32[6]) -> f32[6] {\n" + "\n".join(lines) + "\n}\n"


def all_reduce(groups, shape="f32[6]", more="channel_id=1, use_global_device_ids=true"):
  return entry(
    f"  %p = {shape} parameter(0)",
    f"  ROOT %r = {shape} all-reduce(%p), replica_groups={groups}, {more}, to_apply=%add",
  )
