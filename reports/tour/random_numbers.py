"""Random numbers that do not depend on the mesh."""

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from reports.tour.network import job_of
from reports.tour.scene import (
  Scene,
  blocks,
  draw_held,
  held,
  mesh_of,
  mesh_text,
  same,
  say,
  sent_text,
  spec,
)

TITLE = "Random numbers"
OPENING = """
A run on another mesh should start with the same parameters and drop the same activations. JAX's
generator computes number i of an array from the key and i alone. So each device draws the numbers
of its own block. They are the same on every mesh, without communication.
"""

SHAPE = (8, 6)


def drawn(partitionable=True):
  """Draws the same array on three meshes, each device its own block, without communication."""
  first = None
  for mesh in (mesh_of(), mesh_of(data=8), mesh_of(data=4, tensor=2)):
    with jax.threefry_partitionable(partitionable):
      program = jax.jit(
        lambda key: jax.random.normal(key, SHAPE),
        out_shardings=NamedSharding(mesh, P("data", "tensor")),
      )
      compiled = program.lower(jax.random.key(0)).compile()
    x = compiled(jax.random.key(0))
    first = x if first is None else first
    say(
      f"{mesh_text(x)}: {blocks(x)}. Sent: {sent_text(compiled, mesh)}. The numbers and those "
      f"of the first mesh are {same(x, first)}."
    )
  draw_held(f"all numbers on {mesh_text(x)}", mesh, held(x, 1))


def drawn_without():
  """Does the same with JAX's previous generator, which can still be switched on.

  The numbers are the same on every mesh, too, and devices communicate to draw them.
  """
  drawn(partitionable=False)


def parameters():
  """Draws the parameters of a network as a run does: each device its own part of each array."""
  first = None
  for strategy in ("single", "dp4_tp2"):
    job = job_of(strategy)
    program = job.compile_init().function
    params = program(jax.random.key(job.config.seed)).params
    first = params if first is None else first
    jax.tree.map(same, params, first)  # of each array, or this ends here
    say(
      f"{strategy}: layer_2/kernel is sharded as {spec(params['layer_2']['kernel'])}. Sent: "
      f"{sent_text(program, job.mesh)}. All {len(jax.tree.leaves(params))} arrays and those "
      f"under single are the same, to the last bit."
    )


SCENES = (
  Scene("Each device draws its own block", drawn),
  Scene("The previous generator", drawn_without),
  Scene("The parameters of a network", parameters),
)
