"""Scaled rotary positions are those of training, however short the text: beside NumPy, float64."""

import functools

import numpy as np
import pytest

from inference.chat import CachedSampler
from inference.request import Request
from inference.sampler import Sampler, TrainedModel
from inference.scoring import Continuation, Scorer
from partitioning.rules import named_leaves
from tests.helpers.jobs import first_state, make_job
from tests.models import numpy_decoder

LENGTH, NEW = 64, 5
PROMPT = (7, 21, 3, 50, 9, 33, 12, 5)
SCALINGS = {
  "dynamic": {"factor": 3.0},
  "longrope": {
    "factor": 4.0,
    "short_factors": (1.0, 1.2, 1.5),
    "long_factors": (1.3, 2.5, 6.0),
  },
}


def made(kind, original):
  """Returns a job, its parameters, and NumPy's logits of tokens, of a row of LENGTH."""
  scaling = (kind, {**SCALINGS[kind], "original_length": original})
  job = make_job(
    "single",
    "lm",
    **{"model.layers": 1, "model.rotary_scaling": scaling, "data.sequence_length": LENGTH},
    **{"training.matmul_precision": "highest", "data.global_batch_size": 4},
  )
  params = first_state(job).params
  arrays = {name: np.asarray(leaf) for name, leaf in named_leaves(params).items()}
  return job, params, functools.partial(numpy_decoder.logits, job.config, arrays)


def greedy(logits_of):
  """Returns the likeliest tokens behind PROMPT by NumPy."""
  tokens = [*PROMPT]
  for _ in range(NEW):
    tokens.append(int(logits_of(np.array(tokens))[-1].argmax()))
  return tokens[len(PROMPT) :]


# A cache that adds space for a piece is longer than rows of the original length.
def test_a_long_cache_has_the_frequencies_of_a_row():
  job, params, logits_of = made("longrope", LENGTH)
  request = Request((PROMPT,), max_new_tokens=NEW, temperature=0.0)
  drawing = CachedSampler(TrainedModel(job, params)).draw([*PROMPT], request)
  assert [next(drawing) for _ in range(NEW)] == greedy(logits_of)


# The cache and the row of a short text are shorter than the original length, and rows are longer.
def test_a_short_text_has_the_frequencies_of_a_row():
  job, params, logits_of = made("dynamic", 40)
  wanted, model = greedy(logits_of), TrainedModel(job, params)
  request = Request((PROMPT,), max_new_tokens=NEW, temperature=0.0)
  drawn = []

  def take(_, token, log_probability):
    drawn.append((token, log_probability))
    return len(drawn) < NEW

  Sampler(job, request).run(model.given, [np.array(PROMPT, np.int32)], request, take)
  assert [token for token, _ in drawn] == wanted
  text = np.array([*PROMPT, *wanted], np.uint32)
  [score] = Scorer(model.job)(model.given, [Continuation(text, NEW)])
  shares_TV = numpy_decoder.softmax(logits_of(text[:-1]))[-NEW:]
  likelihood = np.log(shares_TV[np.arange(NEW), wanted]).sum()
  assert score.log_likelihood == pytest.approx(likelihood, rel=1e-5)
  assert score.greedy
  assert sum(log_p for _, log_p in drawn) == pytest.approx(likelihood, rel=1e-5)
