"""Scaled rotary positions are those of training, however short the text: beside NumPy, float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

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
# Rows are as long as the original length, and a cache that adds space for a piece is longer; or
# rows are longer, and the cache and the row of a short text are not.
ORIGINALS = (LENGTH, 40)


@functools.cache
def made(kind, original, strategy):
  """Returns a job, its parameters, and NumPy's logits of tokens, of a row of LENGTH."""
  mesh = {"mesh.context": 2} if strategy == "context" else {}
  scaling = (kind, {**SCALINGS[kind], "original_length": original})
  job = make_job(
    "single",
    "lm",
    **mesh,
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


@pytest.mark.parametrize(
  ("kind", "original", "strategy"),
  [("longrope", LENGTH, "single"), ("dynamic", 40, "single"), ("longrope", 40, "context")],
)
def test_a_short_text_has_the_frequencies_of_a_row(kind, original, strategy):
  job, params, logits_of = made(kind, original, strategy)
  wanted = greedy(logits_of)
  request = Request((PROMPT,), max_new_tokens=NEW, temperature=0.0)
  assert Sampler(job, request)(params, request) == [bytes(wanted)]
  model = TrainedModel(job, params)
  drawing = CachedSampler(model).draw([*PROMPT], request)
  assert [next(drawing) for _ in range(NEW)] == wanted
  text = np.array([*PROMPT, *wanted], np.uint32)
  [score] = Scorer(model.job)(model.given, [Continuation(text, NEW)])
  shares_TV = numpy_decoder.softmax(logits_of(text[:-1]))[-NEW:]
  likelihood = np.log(shares_TV[np.arange(NEW), wanted]).sum()
  assert score.log_likelihood == pytest.approx(likelihood, rel=1e-5)
  assert score.greedy


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("original", ORIGINALS)
def test_cached_logits_are_those_of_the_training_pass(kind, original):
  job, params, logits_of = made(kind, original, "single")
  tokens_T = np.random.default_rng(1).integers(1, 61, LENGTH).astype(np.int32)
  tokens_BT = np.tile(tokens_T, (4, 1))
  trained = job.compile(
    lambda params, tokens_BT: nnx.merge(job.program.graphdef, params)(tokens_BT), params, tokens_BT
  ).function(params, tokens_BT)
  request = Request((PROMPT,), max_new_tokens=NEW, temperature=0.0)

  def read(empty_cache, params):
    model, counts_B = nnx.merge(job.program.graphdef, params), jnp.full(1, 9, jnp.int32)
    return model.extend(jnp.asarray(tokens_BT[:1, :9]), counts_B, empty_cache())[0]

  wanted_TV = logits_of(tokens_T)
  size = np.abs(wanted_TV).max()
  np.testing.assert_allclose(trained[0, :, :61], wanted_TV, atol=2e-6 * size)
  for sampler in (Sampler(job, request), CachedSampler(TrainedModel(job, params))):
    found = jax.jit(functools.partial(read, sampler._empty_cache))
    with job.tracing(sampler.activations):
      found_V = np.asarray(found(params))[0, :61]
    np.testing.assert_allclose(found_V, wanted_TV[8], atol=2e-6 * size)
