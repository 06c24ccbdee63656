"""Sampling from a model that is trained on rows of several documents, kept apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from inference.request import Request
from inference.sampler import Sampler
from tests.helpers.jobs import first_state, make_job
from tests.parity.latents import LATENTS

# Rows of documents of these lengths.
LENGTHS = ((3, 2, 7), (1, 10, 1), (12,), (4, 4, 4))
LENGTH = 12
TOKENS = np.random.default_rng(3).integers(1, 61, (len(LENGTHS), LENGTH)).astype(np.int32)
SEGMENTS = np.array([np.repeat(range(len(row)), row) for row in LENGTHS], np.int32)
APART = {"model.separate_documents": True, "training.matmul_precision": "highest"}
JOBS = {
  "single-windows": (
    "single",
    {"model.window": 3, "model.global_every": 2, "model.attention_sinks": True},
  ),
  "dp4_tp2-learned": ("dp4_tp2", {"model.positions": "learned", "model.attention_sinks": True}),
  "dp4_tp2-latent": ("dp4_tp2", LATENTS),
  "context-rotary": ("single", {"mesh.context": 2}),
}


def documents():
  """Returns (row, slots) of each document."""
  return [
    (row, np.flatnonzero(SEGMENTS[row] == number))
    for row, lengths in enumerate(LENGTHS)
    for number in range(len(lengths))
  ]


class Uncompiled(Sampler):
  """A sampler's sizes and tables, without its programs: here the logits are read, not a draw."""

  def _compile(self):
    return None, None


def by_cache(job, params):
  """Yields ((row, slot), logits [V]) of each token, every document read alone through the cache.

  A document's first two tokens are its prompt; the tokens are given: what is drawn plays no part.
  """
  alone = [TOKENS[row, slots] for row, slots in documents()]
  prompts = tuple(bytes(tokens[:2].tolist()) for tokens in alone)
  made = Uncompiled(job, Request(prompts, max_new_tokens=LENGTH - 2))

  def read(params, tokens_BT, counts_B, cache):
    return nnx.merge(job.program.graphdef, params).extend(tokens_BT, counts_B, cache)

  cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(made._empty_cache))
  tokens_BT = np.full((made.rows, LENGTH), 60, np.int32)
  counts_B = np.ones(made.rows, np.int32)
  for row, tokens in enumerate(alone):
    tokens_BT[row, : len(tokens)], counts_B[row] = tokens, min(2, len(tokens))
  step = jax.jit(read)
  with job.tracing(made.activations):
    logits_BV, cache = step(params, tokens_BT[:, :2], counts_B, cache)
    for extra in range(LENGTH - 1):
      for number, (row, slots) in enumerate(documents()):
        if (place := counts_B[number] - 1 + extra) < len(slots):
          yield (row, slots[place]), np.asarray(logits_BV)[number]
      following_B1 = np.take_along_axis(tokens_BT, np.minimum(counts_B + extra, 11)[:, None], 1)
      logits_BV, cache = step(params, following_B1, np.ones(made.rows, np.int32), cache)


def packed(job, params, *all_segments_BT):
  """Returns the logits of the forward pass over the rows, as many of them as the mesh needs.

  For each way in which the rows are divided into documents.
  """
  tokens_BT, *all_segments_BT = (np.concatenate([x, x]) for x in (TOKENS, *all_segments_BT))
  forward = job.compile(
    lambda params, tokens_BT, segments_BT: nnx.merge(job.program.graphdef, params)(
      tokens_BT, None, segments_BT
    ),
    *(job.state.params, tokens_BT, tokens_BT),
    in_shardings=(job.state_shardings.params, None, None),
  ).function
  return [np.asarray(forward(params, tokens_BT, segments_BT)) for segments_BT in all_segments_BT]


@pytest.mark.parametrize(
  "name", [pytest.param(n, marks=pytest.mark.long) if n == "dp4_tp2-latent" else n for n in JOBS]
)
def test_sampled_logits_are_those_of_a_packed_row(name):
  strategy, overrides = JOBS[name]
  job = make_job(strategy, "lm", **APART, **overrides)
  params = first_state(job).params
  expected, together = packed(job, params, SEGMENTS, np.zeros_like(SEGMENTS))
  compared, differing = 0, 0
  for (row, slot), logits_V in by_cache(job, params):
    found, wanted = logits_V[:61], expected[row, slot][:61]
    assert np.linalg.norm(found - wanted) <= 1e-5 * np.linalg.norm(wanted)
    compared += 1
    differing += np.abs(together[row, slot][:61] - wanted).max() > 0.01
  assert compared >= 38
  assert differing > 10, "documents that see one another would give the same"
