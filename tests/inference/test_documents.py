"""Sampling where the documents of a row are kept apart, as the model was trained."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from inference.sampler import Request, Sampler
from models import token_positions, transformer
from models.kv_cache import Cache
from models.token_positions import END
from tests.helpers.jobs import first_state, make_job

# A row each, and how many of its tokens are the prompt: with ends of documents in prompts and
# behind them, one after the other, at the end of a prompt, and none.
ROWS = (
  ([3, END, 5, 7, END, END, 9, 4, 2, END, 6, 8], 3),
  ([END, 11, 12, END, 13, 14, 15, 16, 17, 18, END, 19], 1),
  ([21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32], 5),
  ([41, 42, 43, END, 44, 45, 46, END, 47, 48, 49, 50], 4),
)
TOKENS = np.array([row for row, _ in ROWS], np.int32)
LENGTH = TOKENS.shape[1]
APART = {"model.separate_documents": True, "training.matmul_precision": "highest"}
JOBS = {
  "single-rotary": ("single", {}),
  "single-learned": ("single", {"model.positions": "learned"}),
  "single-windows": ("single", {"model.window": 3, "model.global_every": 2}),
  "dp4_tp2-learned": ("dp4_tp2", {"model.positions": "learned"}),
  "fsdp8-rotary": ("fsdp8", {}),
  "context-rotary": ("single", {"mesh.context": 2}),
}


def by_cache(job, params):
  """Returns each row's logits after its prompt and after every token that follows, [T V] each.

  The tokens are given: what is drawn plays no part.
  """
  counts = [count for _, count in ROWS]
  longest = max(counts)
  prompts = tuple(bytes(row[:count]) for row, count in ROWS)
  made = Sampler(job, Request(prompts, max_new_tokens=LENGTH - longest))

  def read(params, tokens_BT, counts_B, cache):
    return nnx.merge(job.program.graphdef, params).extend(tokens_BT, counts_B, cache)

  # Not an empty cache but one that would show if what lies past a row's length were seen.
  cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(made._empty_cache))
  tokens_BT = np.full((made.rows, longest), 60, np.int32)
  counts_B = np.ones(made.rows, np.int32)
  for row, count in enumerate(counts):
    tokens_BT[row, :count], counts_B[row] = TOKENS[row, :count], count
  step = jax.jit(read)
  found = [{} for _ in ROWS]
  with job.tracing(made._table):
    logits_BV, cache = step(params, tokens_BT, counts_B, cache)
    for extra in range(LENGTH - longest + 1):
      for row, count in enumerate(counts):
        found[row][count + extra - 1] = np.asarray(logits_BV)[row]
      if extra < LENGTH - longest:
        following = np.full((made.rows, 1), 60, np.int32)
        following[: len(ROWS), 0] = [TOKENS[row, count + extra] for row, count in enumerate(counts)]
        logits_BV, cache = step(params, following, np.ones(made.rows, np.int32), cache)
  return found


def whole(job, params, tokens_BT):
  """Returns the logits of the forward pass over whole rows, as many of them as the mesh needs."""
  rows = np.concatenate([tokens_BT] * 8)[: max(8, len(tokens_BT))]
  forward = job.compile(
    lambda params, tokens_BT: nnx.merge(job.program.graphdef, params)(tokens_BT),
    *(job.state.params, rows),
    in_shardings=(job.state_shardings.params, None),
  ).function
  return np.asarray(forward(params, rows))[: len(tokens_BT)]


def close(found, expected):
  """Asserts that two logits are equal to rounding, those of padding apart."""
  found, expected = found[:61], expected[:61]
  assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize("name", JOBS)
def test_sampled_logits_are_those_of_the_forward_pass(name):
  strategy, overrides = JOBS[name]
  job = make_job(strategy, "lm", **APART, **overrides)
  params = first_state(job).params
  found = by_cache(job, params)
  expected = whole(job, params, TOKENS)
  for row, logits in enumerate(found):
    assert len(logits) > 5
    for place, logits_V in logits.items():
      close(logits_V, expected[row, place])


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_sampled_logits_are_those_of_each_document_alone(positions):
  """What other documents are in the row changes nothing, and positions restart."""
  keys = {"model.positions": positions}
  apart = make_job("single", "lm", **APART, **keys)
  plain = make_job("single", "lm", **{**APART, **keys, "model.separate_documents": False})
  params = first_state(apart).params
  pieces = []  # (row, the place of its first token, tokens)
  for row in range(len(ROWS)):
    ends = [0, *(place + 1 for place in np.flatnonzero(TOKENS[row] == END)), LENGTH]
    pieces += [(row, a, TOKENS[row, a:b]) for a, b in itertools.pairwise(ends) if a < b]
  alone = np.full((len(pieces), LENGTH), 33, np.int32)
  for number, (_, _, tokens) in enumerate(pieces):
    alone[number, : len(tokens)] = tokens
  expected = whole(plain, params, alone)
  found, compared, differing = by_cache(apart, params), 0, 0
  together = whole(plain, params, TOKENS)
  for number, (row, start, tokens) in enumerate(pieces):
    for place in range(len(tokens)):
      if start + place in found[row]:
        close(found[row][start + place], expected[number, place])
        compared += 1
        distance = np.abs(together[row, start + place] - expected[number, place])[:61].max()
        differing += start > 0 and distance > 0.01
  assert compared > 30
  assert differing > 10, "documents that see one another would give the same"


def documents_of(rows, counts):
  """Returns documents and positions of the first tokens of rows, one token after the other."""
  found = []
  for row, count in zip(rows, counts, strict=True):
    document, position, pairs = 0, 0, []
    for token in row[:count]:
      pairs.append((document, position))
      document, position = (document + 1, 0) if token == END else (document, position + 1)
    found.append(pairs)
  return found


def test_documents_and_positions_read_in_parts_are_those_of_the_whole(monkeypatch):
  monkeypatch.setattr(token_positions, "constrain", lambda x, _: x)
  random = np.random.default_rng(0)
  read = jax.jit(token_positions.read_on)
  for _ in range(20):
    rows = random.integers(0, 4, (5, 12)).astype(np.int32)  # a quarter of them ends documents
    first = random.integers(1, 6, 5)
    none = jnp.zeros(5, jnp.int32)
    cache = Cache(None, None, none, jnp.full((5, 12), 99, jnp.int32), none, none)
    segments, positions, cache = read(rows[:, :6], first.astype(np.int32), cache)
    cache = Cache(None, None, jnp.asarray(first, jnp.int32), *list(vars(cache).values())[3:])
    more = np.stack([row[count : count + 6] for row, count in zip(rows, first, strict=True)])
    more_segments, more_positions, cache = read(more, np.full(5, 6, np.int32), cache)
    for row, expected in enumerate(documents_of(rows, first + 6)):
      begun = pairs(segments[row, : first[row]], positions[row, : first[row]])
      assert begun + pairs(more_segments[row], more_positions[row]) == expected
      assert cache.segments[row, : first[row] + 6].tolist() == [d for d, _ in expected]


def pairs(segments_T, positions_T):
  """Returns (document, position) of each token."""
  return list(zip(segments_T.tolist(), positions_T.tolist(), strict=True))


def test_a_model_that_keeps_documents_together_has_no_more_in_its_cache():
  config = make_job("single", "lm").config
  cache = jax.eval_shape(lambda: transformer.empty_cache(config, 2, 5))
  assert (cache.segments, cache.ends, cache.starts) == (None, None, None)
