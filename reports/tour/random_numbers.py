"""Random numbers that do not depend on the mesh."""

import jax
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
  findings.append(
    f"The same numbers on every mesh; {sending or 'none'} of the {len(results)} programs "
    f"{'communicate' if sending else 'communicates'} to draw them."
  )
  mesh, _, x = results[2]
  row = {
    shard.device.id: scene.numbers(shard.data[0], 2) if not shard.index[0].start else "other rows"
    for shard in x.addressable_shards
  }
  return Shown(findings, [holdings(f"row 0 on {scene.mesh_text(x)}", mesh, row)])


def draw_without():
  """Does the same with JAX's previous generator, which can still be switched on."""
  return draw(partitionable=False)


def parameters():
  """Draws the parameters of a network as a run does: each device its own part of each array."""
  results = []
  for strategy in ("single", "dp4_tp2"):
    job = job_of(strategy)
    program = job.compile_init().function
    results.append((strategy, job, program, program(jax.random.key(job.config.seed)).params))
  return results


def _parameters(results) -> Shown:
  findings, first = [], jax.tree.leaves(results[0][3])
  for strategy, job, program, params in results:
    [equal] = {scene.same(*pair) for pair in zip(jax.tree.leaves(params), first, strict=True)}
    findings.append(
      f"{strategy}: layer_2/kernel is sharded as {scene.spec(params['layer_2']['kernel'])}. Sent: "
      f"{scene.sent_text(program, job.mesh)}. All {len(first)} arrays and those under "
      f"{results[0][0]} are {equal}."
    )
  return Shown(findings)


SCENES = (
  Scene("Each device draws its own block", draw, _draw),
  Scene("The previous generator", draw_without, _draw),
  Scene("The parameters of a network", parameters, _parameters),
)
