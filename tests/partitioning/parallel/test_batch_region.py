"""Sums over parts of a batch: one all-reduce, and what the model does inside of such a region."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from models import layers
from partitioning.constraints import activation_layout, batch_part, constrain
from partitioning.mesh import make_mesh
from partitioning.mesh_sizes import resolve_sizes
from partitioning.parallel.batch_region import summed_over_batch_parts
from partitioning.rules import Dim
from runtime import collectives

LEGEND = {
  "B": Dim("batch", None),
  "R": Dim("length", None),
  "D": Dim("model", 6),
}
TABLE = {"batch": ("data", "fsdp"), "length": ("tensor",), "model": ()}
ROWS = 8


def compiled(function, *arguments):
  """Returns the compiled function on data=2 x fsdp=2 x tensor=2, its mesh, and what was traced."""
  mesh = make_mesh(resolve_sizes({"data": 2, "fsdp": 2, "tensor": 2}, None))
  with jax.set_mesh(mesh), activation_layout(LEGEND, TABLE) as layout:
    program = jax.jit(function).lower(*arguments).compile()
  return program, mesh, layout


def test_sums_of_ten_passes_are_reduced_once():
  x_BD = np.random.default_rng(0).standard_normal((ROWS, 6)).astype(np.float32)
  spec = NamedSharding(
    make_mesh(resolve_sizes({"data": 2, "fsdp": 2, "tensor": 2}, None)), PartitionSpec("data")
  )

  def sums(x_BD, scale):
    def one(carry, factor):
      return jax.tree.map(jnp.add, carry, {"x": jnp.sum(x_BD, 0) * factor, "n": factor}), None

    first = {"x": jnp.zeros((6,)), "n": jnp.zeros(())}
    return jax.lax.scan(one, first, scale)[0]

  def program(x_BD, scale_S):
    return summed_over_batch_parts(sums, "data", x_BD, scale_S)

  scale_S = jnp.arange(10, dtype=jnp.float32)
  arguments = jax.device_put(x_BD, spec), scale_S
  ours, mesh, _ = compiled(program, *arguments)
  found = ours(*arguments)
  np.testing.assert_allclose(found["x"], 45 * x_BD.sum(0), rtol=1e-5)
  assert float(found["n"]) == 2 * 45  # of each part: what is no sum over rows is added up too
  sent = collectives.collectives(ours.as_text(), mesh)
  over_data = [c for c in sent if "data" in c.axes]
  assert sum(c.count * c.arrays for c in over_data) == 2
  assert sum(c.count * c.bytes for c in over_data) == 4 * (6 + 1)


def test_a_part_drops_what_the_complete_batch_drops_and_is_recorded_as_it():
  x_BRD = jnp.ones((ROWS, 4, 6))
  slots_R = jnp.asarray([0, 3, 1, 2], jnp.int32)
  key = jax.random.key(3)

  def dropped(x_BRD, key):
    assert batch_part() is None or x_BRD.shape[0] == ROWS // 2
    return layers.dropout(constrain(x_BRD, "BRD"), 0.4, key, slots_R)

  def by_parts(x_BRD, key):
    def placed(x_BRD, key):  # at its rows among zeros
      mine = dropped(x_BRD, key)
      first = batch_part().index() * (ROWS // 2)
      return jax.lax.dynamic_update_slice(jnp.zeros((ROWS, 4, 6)), mine, (first, 0, 0))

    return summed_over_batch_parts(placed, "data", x_BRD, key)

  whole, _, judged = compiled(dropped, x_BRD, key)
  parts, _, seen = compiled(by_parts, x_BRD, key)
  wanted = np.asarray(whole(x_BRD, key))
  np.testing.assert_array_equal(np.asarray(parts(x_BRD, key)), wanted)
  assert 0 < (wanted == 0).sum() < wanted.size
  assert seen.seen == judged.seen
  assert batch_part() is None
