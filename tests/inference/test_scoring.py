"""Log-likelihoods on meshes: those of each row alone, on one device, summed by NumPy."""

import jax
import numpy as np
import pytest
from flax import nnx

from inference import scoring
from inference.sampler import doubled
from inference.scoring import Continuation, Scorer
from input_pipeline.text.tokenizer import ByteTokenizer
from tests.helpers.jobs import first_state, make_job

WIDE = {"training.parameter_dtype": "float64", "training.compute_dtype": "float64"}
LENGTH = 64  # so that rows are 32 or 64 tokens wide
SIZES = {"data.sequence_length": LENGTH, "data.global_batch_size": 8, "model.layers": 1, **WIDE}
# Which of the ways to compute logits a mesh takes.
JOBS = {
  "dp4_tp2, chunks": ("dp4_tp2", {"training.loss_chunks": 2}),
  "context=2, a ring": ("single", {"mesh.context": 2, "mesh.data": 2}),
}
# Tokens and how many of them are scored; the third has too much context, the last is all scored.
COUNTS = ((5, 2), (33, 7), (90, 3), (34, 1), (2, 1), (65, 60), (20, 4), (65, 64), (40, 39), (3, 1))


def continuations():
  random = np.random.default_rng(5)
  return [
    Continuation(random.integers(1, 61, count).astype(np.uint32), scored)
    for count, scored in COUNTS
  ]


def alone(job, params):
  """Returns (log-likelihood, greedy) of each continuation by NumPy, from the logits of its row."""
  forward = jax.jit(lambda tokens: nnx.merge(job.program.graphdef, params)(tokens))
  found = []
  for one in continuations():
    tokens = one.tokens[-LENGTH - 1 :].astype(np.int32)
    padded = np.zeros((1, LENGTH), np.int32)  # causal: what follows changes nothing
    padded[0, : len(tokens) - 1] = tokens[:-1]
    with job.tracing():
      logits = np.asarray(forward(padded))[0, : len(tokens) - 1]
    shifted = logits - logits.max(1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    targets = tokens[1:]
    scored = slice(len(targets) - one.scored, None)
    values = log_p[np.arange(len(targets)), targets][scored]
    found.append((values.sum(), bool((logits.argmax(1) == targets)[scored].all())))
  return found


@pytest.fixture(scope="module")
def expected():
  with jax.enable_x64(True):
    job = make_job("single", "lm", **SIZES)
    return alone(job, first_state(job).params)


@pytest.mark.parametrize("name", JOBS)
def test_scores_are_those_of_each_row_alone(name, expected):
  strategy, overrides = JOBS[name]
  with jax.enable_x64(True):
    job = make_job(strategy, "lm", **SIZES, **overrides)
    scorer = Scorer(job)
    before = []
    given = first_state(job).params, {}
    found = scorer(given, continuations(), lambda *batch: before.append(batch) is None)
  assert before == [(0, 2), (1, 2)]
  np.testing.assert_allclose(
    [one.log_likelihood for one in found], [value for value, _ in expected], rtol=1e-12
  )
  assert [one.greedy for one in found] == [greedy for _, greedy in expected]
  assert [one.truncated for one in found] == [0, 0, 25, 0, 0, 0, 0, 0, 0, 0]
  assert sorted(scorer._compiled) == [32, 64]


def test_a_continuation_that_the_model_would_write_is_greedy():
  job = make_job("dp4_tp2", "lm", **{**SIZES, **dict.fromkeys(WIDE, "float32")})
  params = first_state(job).params
  scorer, given, tokens = Scorer(job), (params, {}), [3, 5, 7]
  forward = jax.jit(lambda tokens: nnx.merge(job.program.graphdef, params)(tokens))
  for _ in range(3):
    padded = np.zeros((8, LENGTH), np.int32)
    padded[:, : len(tokens)] = tokens
    with job.tracing():
      tokens.append(int(np.asarray(forward(padded))[0, len(tokens) - 1].argmax()))
  right = np.array(tokens, np.uint32)
  wrong = np.where(np.arange(6) == 4, (right + 1) % 60, right)
  both = scorer(given, [Continuation(right, 3), Continuation(wrong, 3)])
  assert [one.greedy for one in both] == [True, False]
  assert scorer(given, [Continuation(right, 3)], lambda number, count: False) is None, "stopped"


# ---- Texts as continuations ----


def test_the_border_is_where_the_harness_has_it():
  encoder = ByteTokenizer()

  def parts(context, text, **settings):
    one = scoring.pair(encoder, context, text, **{"begin": False, "length": 9, **settings})
    return bytes(one.tokens.tolist()), one.scored

  assert parts("ab", " c") == (b"ab c", 2)
  assert parts("ab ", "c") == (b"ab c", 2), "spaces belong to the continuation"
  assert parts("", "c") == (b"\0c", 1), "a document begins"
  assert parts("  ", "c") == (b"\0  c", 3)
  assert parts("ab", "c", begin=True) == (b"\0abc", 1)
  with pytest.raises(ValueError, match="adds no token"):
    parts("ab", "")
  with pytest.raises(ValueError, match=r"10 tokens.*data\.sequence_length=9"):
    parts("ab", "0123456789")


class Merging(ByteTokenizer):
  """Writes `bc` as one token, 200."""

  def encode(self, texts):
    replaced = [text.encode().replace(b"bc", bytes([200])) for text in texts]
    return [np.frombuffer(text, np.uint8).astype(np.uint32) for text in replaced]


def test_what_a_tokenizer_joins_across_the_border_is_scored():
  one = scoring.pair(Merging(), "ab", "cd", begin=False, length=9)
  # Of "ab" and "cd" there are three tokens, and "ab" alone has two.
  assert (one.tokens.tolist(), one.scored) == ([97, 200, 100], 1)


@pytest.mark.parametrize("size", [1, 3, 4, 5, 8, 11])
def test_each_token_of_a_long_text_is_scored_once(size):
  text = bytes(range(65, 65 + size)).decode()
  found = list(scoring.windows(ByteTokenizer(), text, 4))
  assert b"".join(bytes(one.tokens[-one.scored :].tolist()) for one in found).decode() == text
  assert found[0].tokens[0] == 0, "the first begins a document"
  assert all(1 < len(one.tokens) <= 5 for one in found)
  if size == 11:
    assert [(bytes(one.tokens.tolist()), one.scored) for one in found] == [
      (b"\0ABCD", 4),
      (b"DEFGH", 4),
      (b"GHIJK", 3),  # as much context as fits
    ]


def test_widths_are_halved_while_the_mesh_divides_them():
  assert doubled(256) == [32, 64, 128, 256]
  assert doubled(96) == [48, 96]
  assert doubled(100) == [50, 100]
  assert doubled(7) == [7]


def test_a_model_without_tokens_is_refused():
  with pytest.raises(ValueError, match=r"model\.name='mlp' gives texts no log-likelihood"):
    scoring.check_model("mlp")
