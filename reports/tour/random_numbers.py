"""Random numbers that do not depend on the mesh."""

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from reports.drawings import holdings
from reports.tour import scene
from reports.tour.network import job_of
from reports.tour.scene import Scene, Shown, mesh_of

TITLE = "Random numbers"
OPENING = """
A run on another mesh should start with the same parameters and drop the same activations. JAX's
generator computes number i of an array from the key and i alone. So each device draws the numbers
of its own block. They are the same on every mesh, without communication.
"""

SHAPE = (8, 6)


def draw(partitionable=True):
  """Draws the same array on three meshes, each device its own block."""
  meshes = [mesh_of(), mesh_of(data=8), mesh_of(data=4, tensor=2)]
  results = []
  for mesh in meshes:
    with jax.threefry_partitionable(partitionable):
      program = jax.jit(
        lambda key: jax.random.normal(key, SHAPE),
        out_shardings=NamedSharding(mesh, P("data", "tensor")),
      )
      compiled = program.lower(jax.random.key(0)).compile()
    results.append((mesh, compiled, compiled(jax.random.key(0))))
  return results


def _draw(results) -> Shown:
  first = results[0][2]
  findings = [
    f"{scene.mesh_text(x)}: {scene.blocks(x)}. Sent: {scene.sent_text(compiled, mesh)}. The "
    f"numbers and those of the first mesh are {scene.same(x, first)}."
    for mesh, compiled, x in results
  ]
  sending = sum(bool(scene.sent(compiled, mesh)) for mesh, compiled, _ in results)
  equal = sum(np.array_equal(x, first) for _, _, x in results)
  if equal == len(results) and not sending:
    findings.append("The same numbers on every mesh, and no collective in any of the programs.")
  else:
    findings.append(
      f"{equal} of {len(results)} meshes have the numbers of the first, and {sending} of the "
      "programs communicate to draw them."
    )
  mesh, _, x = results[2]
  drawing = holdings(f"row 0 on {scene.mesh_text(x)}", mesh, _row(x))
  return Shown(findings, [drawing])


def _row(x) -> dict[int, str]:
  """Returns what each device holds of row 0."""
  return {
    shard.device.id: scene.numbers(shard.data[0], 2)
    if (shard.index[0].start or 0) == 0
    else "other rows"
    for shard in x.addressable_shards
  }


def draw_without():
  """Does the same with JAX's previous generator, which can still be switched on."""
  return draw(partitionable=False)


def parameters(strategies=("single", "dp4_tp2")):
  """Draws the parameters of a network as a run does: each device its own part of each array."""
  results = []
  for strategy in strategies:
    job = job_of(strategy)
    program = job.compile_init().function
    results.append((strategy, job, program, program(jax.random.key(job.config.seed)).params))
  return results


def _parameters(results) -> Shown:
  findings, first = [], jax.tree.leaves(results[0][3])
  for strategy, job, program, params in results:
    leaves = jax.tree.leaves(params)
    kernel = params["layer_2"]["kernel"]
    pairs = zip(leaves, first, strict=True)
    bits = sum(np.array_equal(ours, theirs) for ours, theirs in pairs)
    findings.append(
      f"{strategy}: layer_2/kernel is sharded as {scene.spec(kernel)}. Sent: "
      f"{scene.sent_text(program, job.mesh)}. {bits} of {len(leaves)} arrays equal those under "
      f"{results[0][0]} to the last bit."
    )
  return Shown(findings)


SCENES = (
  Scene("Each device draws its own block", draw, _draw),
  Scene("The previous generator", draw_without, _draw),
  Scene("The parameters of a network", parameters, _parameters),
)
