"""Choosing the sharding of a value inside a program."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from partitioning import rules
from partitioning.constraints import activation_layout, constrain
from partitioning.rules import Dim
from reports.drawings import picture
from reports.tour import scene
from reports.tour.scene import Scene, Shown, mesh_of

TITLE = "Constraints"
OPENING = """
The compiler chooses the sharding of all intermediate values. Where its choice is not the one you
want, the program sets it: `with_sharding_constraint` returns its argument in the given sharding.
The numbers stay the same. What each device holds, and what is sent, can change.
"""


def before_and_after():
  """Multiplies x, sharded by rows, by a replicated w, without and with a constraint.

  The first program leaves the sharding to the compiler; the second sets it.
  """
  mesh = mesh_of(data=4, tensor=2)
  x = jax.device_put(jnp.ones((16, 12)), NamedSharding(mesh, P("data", None)))
  w = jax.device_put(jnp.ones((12, 8)), NamedSharding(mesh, P(None, None)))

  def left_alone(x, w):
    return jnp.sin(x @ w)

  def constrained(x, w):
    by_columns = NamedSharding(mesh, P(None, "tensor"))
    return jax.lax.with_sharding_constraint(jnp.sin(x @ w), by_columns)

  programs = [jax.jit(f).lower(x, w).compile() for f in (left_alone, constrained)]
  return mesh, programs, [program(x, w) for program in programs]


def _before_and_after(result) -> Shown:
  mesh, programs, arrays = result
  sent = [scene.sent_text(program, mesh) for program in programs]
  before, after = (rules.size_text(scene.held_bytes(x)) for x in arrays)
  findings = [
    f"Before: the result is sharded as {scene.spec(arrays[0])}, {scene.blocks(arrays[0])}; the "
    f"program sends {sent[0]}.",
    f"After: it is sharded as {scene.spec(arrays[1])}, {scene.blocks(arrays[1])}; the program "
    f"sends {sent[1]}.",
    f"The numbers are {scene.close(*arrays)}.",
    f"A device holds {before} of the result before and {after} after.",
  ]
  titled = zip(arrays, ("before", "after"), strict=True)
  return Shown(findings, [_drawn(x, title, "row", "column") for x, title in titled])


def _drawn(x, title, *dims):
  return picture(x.shape, x.sharding, title=title, dims=dims)


def two_layers(x_BD, w_DF, w_FD):
  """Returns what two layers compute, and the values between them."""
  hidden_BF = constrain(x_BD @ w_DF, "BF")
  return constrain(hidden_BF @ w_FD, "BD"), hidden_BF


def by_letters():
  """Constrains by letters, as the models of this project do, under two different tables.

  The program names dims: B, D and F. A table says which mesh axes a dim takes. So one program runs
  under every strategy. Here F takes no axis at first, and then `tensor`.
  """
  legend = {"B": Dim("batch", None), "D": Dim("model", 12), "F": Dim("feedforward", 32)}
  mesh = mesh_of(data=4, tensor=2)
  x_BD = jax.device_put(jnp.ones((16, 12)), NamedSharding(mesh, P("data", None)))
  w_DF, w_FD = jnp.ones((12, 32)), jnp.ones((32, 12))

  results = []
  for feedforward in ((), ("tensor",)):
    table = {"batch": ("data",), "model": (), "feedforward": feedforward}
    with jax.set_mesh(mesh), activation_layout(legend, table):
      # A new function each time: JAX caches traces, and the table is not part of the cache key.
      program = jax.jit(functools.partial(two_layers))
      compiled = program.lower(x_BD, w_DF, w_FD).compile()
    results.append((table, compiled, *compiled(x_BD, w_DF, w_FD)))
  return mesh, results


def _by_letters(result) -> Shown:
  mesh, results = result
  findings = [
    f"feedforward takes {'+'.join(table['feedforward']) or 'no axis'}: the hidden values BF are "
    f"sharded as {scene.spec(hidden)}, {scene.blocks(hidden)}, and the result BD as "
    f"{scene.spec(y)}. The program sends {scene.sent_text(compiled, mesh)}."
    for table, compiled, y, hidden in results
  ]
  (_, first, ours, plain), (_, second, theirs, cut) = results
  before, after = (round(one.cost_analysis()["flops"]) for one in (first, second))
  findings += [
    f"The results are {scene.close(theirs, ours)}.",
    f"The second table saves work: {after:,} operations on each device instead of {before:,}.",
  ]
  titles = ((plain, "hidden, first table"), (cut, "hidden, second table"))
  return Shown(findings, [_drawn(hidden, title, "B", "F") for hidden, title in titles])


SCENES = (
  Scene("Before and after", before_and_after, _before_and_after),
  Scene("By letters", by_letters, _by_letters, parts=(two_layers,)),
)
