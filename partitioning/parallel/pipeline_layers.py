"""Which layers of a stack a pipeline stage computes, and how they get there.

The stack is stored in the order of the layers, split over `stage` into equal consecutive parts: an
array, and so a checkpoint, is the same for any number of stages and chunks, and without a pipeline.
With one chunk per stage these parts are the chunks. With more, chunk g of all is computed by stage
g % stages, and sent there once per step; gradients are sent back once.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from partitioning.parallel.pipeline_schedule import STAGE


def exchanges(stages: int, chunks: int) -> tuple[tuple[tuple[int, int, int], ...], ...]:
  """Returns rounds, in each of which every stage sends one chunk and receives one.

  Args:
    stages: S.
    chunks: v, per stage.

  Returns:
    v rounds of S entries, by the sending stage: (chunk as it is stored there, the receiving stage,
    chunk as it is computed there), chunks counted from 0.
  """
  # Stage -> the stored chunks that are still to be sent, by their receivers.
  left = [
    {(stage * chunks + chunk) % stages: [] for chunk in range(chunks)} for stage in range(stages)
  ]
  for stage in range(stages):
    for chunk in range(chunks):
      left[stage][(stage * chunks + chunk) % stages].append(chunk)
  rounds = []
  for _ in range(chunks):
    senders = _matched(left)  # a regular bipartite graph has a perfect matching (Kőnig)
    entries = []
    for stage in range(stages):
      to = senders.index(stage)
      chunk = left[stage][to].pop()
      entries.append((chunk, to, (stage * chunks + chunk) // stages))
    rounds.append(tuple(entries))
  return tuple(rounds)


def _matched(left: Sequence[dict[int, list[int]]]) -> list[int]:
  """Returns the sender of each receiver, all of them different: augmenting paths."""
  sender_of: dict[int, int] = {}

  def find(sender: int, tried: set[int]) -> bool:
    for receiver, there in left[sender].items():
      if not there or receiver in tried:
        continue
      tried.add(receiver)
      if receiver not in sender_of or find(sender_of[receiver], tried):
        sender_of[receiver] = sender
        return True
    return False

  for sender in range(len(left)):
    assert find(sender, set()), "no perfect matching"
  return [sender_of[receiver] for receiver in range(len(left))]


def to_compute(stored: jax.Array, stages: int, chunks: int) -> jax.Array:
  """Returns a stage's layers as it computes them, [chunks, layers of a chunk, ...].

  Inside a region that is manual over `stage`.

  Args:
    stored: the stage's part of a stacked parameter, [layers of a stage, ...].
    stages: S.
    chunks: v, per stage.
  """
  parts = stored.reshape(chunks, -1, *stored.shape[1:])
  return _moved(parts, stages, chunks, back=False)


def to_store(computed: jax.Array, stages: int, chunks: int) -> jax.Array:
  """Returns what `to_compute` was given."""
  parts = _moved(computed, stages, chunks, back=True)
  return parts.reshape(-1, *parts.shape[2:])


def _moved(parts: jax.Array, stages: int, chunks: int, *, back: bool) -> jax.Array:
  """Sends every chunk to its stage, or back."""
  stage = jax.lax.axis_index(STAGE)
  result = jnp.zeros_like(parts)
  of_this = functools.partial(_of_stage, stage)
  for entries in exchanges(stages, chunks):
    moves = [(sender, to) for sender, (_, to, _) in enumerate(entries)]
    taken = [chunk for chunk, _, _ in entries]  # by the sender
    given = [0] * stages  # by the receiver
    for _, to, chunk in entries:
      given[to] = chunk
    if back:
      moves, taken, given = [(to, sender) for sender, to in moves], given, taken
    sent = jax.lax.dynamic_index_in_dim(parts, of_this(taken), keepdims=False)
    received = jax.lax.ppermute(sent, STAGE, moves)
    result = jax.lax.dynamic_update_index_in_dim(result, received, of_this(given), 0)
  return result


def _of_stage(stage: jax.Array, values: Sequence[int]) -> jax.Array:
  return jnp.asarray(values, jnp.int32)[stage]
