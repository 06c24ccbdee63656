"""A sequence on several devices: how a layer with a state passes it from one to the next."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from models import mixers
from reports.tour.scene import (
  Scene,
  close,
  draw_held,
  held,
  mesh_of,
  numbers,
  same,
  say,
  sent_text,
)

TITLE = "A state between devices"
OPENING = """
Attention reads all earlier tokens. Other layers read a state of fixed size, to which every token
adds something while the rest decays: Mamba-2, Gated DeltaNet, Kimi Delta Attention. Where the axis
`context` splits the sequence, a device's first token needs the state after the last token of the
device before, which needs the one before that. Waiting for one another would leave all but one
device idle.

They need not wait. What a piece of the sequence does to any state S is A S + B. Each device
computes its own pair (A, B) while the others do, and pairs can be combined before S is known.
"""
DEVICES = 4
DECAYS = np.array([1, 0.5, 0.5, 0.5, 0, 1, 0.5, 1], np.float32)  # 0: a new document begins
VALUES = np.array([8, 0, 4, 0, 6, 2, 0, 1], np.float32)


def token_after_token(decays, values):
  """Returns the state after each token."""
  state, after = 0, []
  for decay, value in zip(decays, values, strict=True):
    state = decay * state + value
    after.append(state)
  return np.array(after, np.float32)


def joined(first, second):
  """Returns the pair of two pieces, one after the other."""
  return second[0] * first[0], second[0] * first[1] + second[1]


def pairs():
  """Splits eight tokens over four devices. The state is one number, which each token multiplies by
  its decay before it adds its value.

  A device's pair (A, B) is the product of its decays, and the state that it would reach from 0. Two
  pairs of neighbors make the pair of both pieces: S becomes A2 (A1 S + B1) + B2.

  The third device begins a new document, whose decay is 0: so is its A, and nothing passes.
  """
  mesh = mesh_of(context=DEVICES)
  placed = [jax.device_put(x, NamedSharding(mesh, P("context"))) for x in (DECAYS, VALUES)]
  draw_held("decays", mesh, held(placed[0], 1))
  draw_held("values", mesh, held(placed[1]))

  def on_device(decays, values):
    found = jnp.prod(decays), 0.0
    for decay, value in zip(decays, values, strict=True):
      found = found[0], decay * found[1] + value
    return jnp.stack(found)[None]

  run = jax.shard_map(on_device, mesh=mesh, in_specs=P("context"), out_specs=P("context"))
  compiled = jax.jit(run).lower(*placed).compile()
  found = compiled(*placed)
  draw_held("pairs (A, B)", mesh, held(found, 3))
  say(f"Sent: {sent_text(compiled, mesh)}. No device has waited for another.")
  a, b = np.asarray(jax.lax.associative_scan(joined, tuple(found.T)))
  say(f"Combined from the left, the pairs are {numbers(np.stack([a, b], 1), 3)}.")
  ends = token_after_token(DECAYS, VALUES)[1::2]
  say(f"Their second numbers and the states by NumPy, {numbers(ends)}, are {same(b, ends)}.")


def heads(length):
  """Returns keys, values, decays and strengths of two heads, as of a trained layer."""
  rng = np.random.default_rng(0)
  q, k, v = rng.standard_normal((3, 1, length, 2, 8), np.float32)
  q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
  log_decay, strength = -rng.uniform(0, 0.2, (1, length, 2)), rng.uniform(0, 1, (1, length, 2))
  return q, k, v, log_decay.astype(np.float32), strength.astype(np.float32)


def split(arrays):
  """Returns the outputs of Gated DeltaNet's recurrence, and its program, over four devices."""
  mesh = mesh_of(context=DEVICES)

  def on_device(*arrays):
    pieces = mixers.Pieces(("context",), 1, jax.lax.axis_index("context")[None])
    return mixers.through_pieces(*arrays, pieces, delta=True)

  spec = P(None, "context")
  placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays]
  run = jax.shard_map(on_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
  compiled = jax.jit(run).lower(*placed).compile()
  return mesh, compiled, compiled(*placed)


def by_numpy(q, k, v, log_decay, strength):
  """Returns the outputs token after token, in float64."""
  arrays = (np.asarray(x[0], np.float64) for x in (q, k, v, log_decay, strength))
  state, outputs = np.zeros((2, 8, 8)), []
  for q, k, v, log_decay, strength in zip(*arrays, strict=True):
    state = np.exp(log_decay)[:, None, None] * state
    read = np.einsum("nh,nhu->nu", k, state)
    state = state + np.einsum("nh,nu->nhu", k, strength[:, None] * (v - read))
    outputs.append(np.einsum("nh,nhu->nu", q, state))
  return np.array(outputs)[None]


def gated_delta_net():
  """Runs Gated DeltaNet as a train step does (`models/mixers.py`), on 256 and on 4,096 tokens.

  Its state is a matrix: a key reads a value from it, and the token writes a share of the difference
  to its own. So A is a matrix too, 8 x 8 for each of the two heads, as is B. The devices all-gather
  all pairs, and each combines those before its own piece, by `jax.lax.associative_scan`.
  """
  for length in (256, 4096):
    arrays = heads(length)
    mesh, compiled, out = split(arrays)
    say(
      f"{length:,} tokens, {length // DEVICES:,} on a device. "
      f"Sent: {sent_text(compiled, mesh)}. "
      f"The outputs and those token after token are {close(out, by_numpy(*arrays))}."
    )
  say("What is sent does not grow with the sequence, as attention's keys and values do.")


SCENES = (
  Scene("Pairs instead of states", pairs, parts=(token_after_token, joined)),
  Scene("A layer's recurrence over devices", gated_delta_net, parts=(heads, split, by_numpy)),
)
