"""Choosing the sharding of a value inside a program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
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


def before_and_after(spec=(None, "tensor")):
  """Multiplies x, sharded by rows, by a replicated w, without and with a constraint.

  The first program leaves the sharding to the compiler; the second sets it.
  """
  mesh = mesh_of(data=4, tensor=2)
  x = jax.device_put(jnp.ones((16, 12)), NamedSharding(mesh, P("data", None)))
  w = jax.device_put(jnp.ones((12, 8)), NamedSharding(mesh, P(None, None)))

  def left_alone(x, w):
    return jnp.sin(x @ w)

  def constrained(x, w):
    return jax.lax.with_sharding_constraint(jnp.sin(x @ w), NamedSharding(mesh, P(*spec)))

  programs = [jax.jit(f).lower(x, w).compile() for f in (left_alone, constrained)]
  return mesh, programs, [program(x, w) for program in programs]


def _before_and_after(result) -> Shown:
  mesh, programs, (before, after) = result
  findings = [
    f"Before: the result is sharded as {scene.spec(before)}, {scene.blocks(before)}; the "
    f"program sends {scene.sent_text(programs[0], mesh)}.",
    f"After: it is sharded as {scene.spec(after)}, {scene.blocks(after)}; the program sends "
    f"{scene.sent_text(programs[1], mesh)}.",
    f"The numbers are {scene.close(after, before)}.",
  ]
  if before.sharding.is_equivalent_to(after.sharding, after.ndim):
    findings.append("The constraint sets what the compiler had chosen: nothing changes.")
  else:
    findings.append(
      f"The constraint has an effect. A device holds "
      f"{rules.size_text(scene.held_bytes(before))} of the result before and "
      f"{rules.size_text(scene.held_bytes(after))} after."
    )
  drawn = ((before, "before"), (after, "after"))
  return Shown(findings, [_drawn(a, title) for a, title in drawn])


def _drawn(x, title):
  return picture(x.shape, x.sharding, title=title, dims=("row", "column"))


def two_layers(x_BD, w_DF, w_FD):
  """Returns what two layers compute, and the values between them."""
  hidden_BF = constrain(x_BD @ w_DF, "BF")
  return constrain(hidden_BF @ w_FD, "BD"), hidden_BF


def by_letters(tables=((), ("tensor",))):
  """Constrains by letters, as the models of this project do, under two different tables.

  The program names dims: B, D and F. A table says which mesh axes a dim takes. So one program runs
  under every strategy. Here F takes no axis at first, and then `tensor`.
  """
  legend = {"B": Dim("batch", None), "D": Dim("model", 12), "F": Dim("feedforward", 32)}
  mesh = mesh_of(data=4, tensor=2)
  x_BD = jax.device_put(jnp.ones((16, 12)), NamedSharding(mesh, P("data", None)))
  w_DF, w_FD = jnp.ones((12, 32)), jnp.ones((32, 12))

  results = []
  for feedforward in tables:
    table = {"batch": ("data",), "model": (), "feedforward": feedforward}
    with jax.set_mesh(mesh), activation_layout(legend, table):
      # A new function each time: JAX caches traces, and the table is not part of the cache key.
      program = jax.jit(functools.partial(two_layers))
      compiled = program.lower(x_BD, w_DF, w_FD).compile()
    results.append((table, compiled, *compiled(x_BD, w_DF, w_FD)))
  return mesh, results


def _by_letters(result) -> Shown:
  mesh, results = result
  findings = []
  for table, compiled, y, hidden in results:
    axes = "+".join(table["feedforward"]) or "no axis"
    findings.append(
      f"feedforward takes {axes}: the hidden values BF are sharded as {scene.spec(hidden)}, "
      f"{scene.blocks(hidden)}, and the result BD as {scene.spec(y)}. The program sends "
      f"{scene.sent_text(compiled, mesh)}."
    )
  first, second = (r[2] for r in results)
  findings.append(f"The results are {scene.close(second, first)}.")
  before, after = (_operations(compiled) for _, compiled, _, _ in results)
  if after < before:
    findings.append(
      f"The second table saves work: {after:,} operations on each device instead of {before:,}."
    )
  else:
    findings.append(f"The second table saves no work: {after:,} operations on each device.")
  pictures = [
    picture(hidden.shape, hidden.sharding, title=f"hidden, {name} table", dims=("B", "F"))
    for (_, _, _, hidden), name in zip(results, ("first", "second"), strict=True)
  ]
  return Shown(findings, pictures)


def _operations(compiled) -> int:
  """Returns the multiplications, additions and the like of one device, as the compiler counts."""
  return int(np.round(compiled.cost_analysis()["flops"]))


SCENES = (
  Scene("Before and after", before_and_after, _before_and_after),
  Scene("By letters", by_letters, _by_letters, parts=(two_layers,)),
)
