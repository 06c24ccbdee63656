"""Choosing the sharding of a value inside a program."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from partitioning.constraints import activation_layout, constrain
from partitioning.rules import Dim
from reports.tour.scene import Scene, blocks, close, draw, held_text, mesh_of, say, sent_text, spec

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

  results = []
  for function, title in ((left_alone, "before"), (constrained, "after")):
    compiled = jax.jit(function).lower(x, w).compile()
    results.append(y := compiled(x, w))
    draw(y, title)
    say(
      f"{title}: the result is sharded as {spec(y)}, {blocks(y)} ({held_text(y)}). Sent: "
      f"{sent_text(compiled, mesh)}."
    )
  say(f"The numbers are {close(*results)}.")


def two_layers(x_BD, w_DF, w_FD):
  """Returns what two layers compute, and the values between them."""
  hidden_BF = constrain(x_BD @ w_DF, "BF")
  return constrain(hidden_BF @ w_FD, "BD"), hidden_BF


def by_letters():
  """Constrains by letters, as the models of this project do, under two different tables.

  The program names dims: B, D and F. A table says which mesh axes a dim takes. So one program runs
  under every strategy. Here F takes no axis at first, and then `tensor`, which saves work.
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
    y, hidden = compiled(x_BD, w_DF, w_FD)
    results.append(y)
    axes = "+".join(feedforward) or "no axis"
    draw(hidden, f"hidden, feedforward takes {axes}", ("B", "F"))
    say(
      f"feedforward takes {axes}: the hidden values BF are sharded as {spec(hidden)}, "
      f"{blocks(hidden)}, and the result BD as {spec(y)}. Sent: {sent_text(compiled, mesh)}. "
      f"Operations on each device: {compiled.cost_analysis()['flops']:,.0f}."
    )
  say(f"The results are {close(*results)}.")


SCENES = (
  Scene("Before and after", before_and_after),
  Scene("By letters", by_letters, parts=(two_layers,)),
)
