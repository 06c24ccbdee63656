"""Answers for training: what they depend on, and their log-probabilities by whole rows."""

import functools

import jax
import numpy as np
from flax import nnx

from inference.request import Request
from inference.rollouts import RolloutSampler
from tests.helpers.jobs import first_state, make_job

FLOAT64 = {"training.parameter_dtype": "float64", "training.compute_dtype": "float64"}
# Layers with a state, and layers with keys of a window and sinks.
KEYS = {
  **{**FLOAT64, "model.mixer": "gated_delta", "model.layer_types": ("mixer", "sliding")},
  **{"model.window": 4, "model.attention_sinks": True},
}
NEW, LONGEST = 7, 5
GROUPS = [[3, 5, 7], [44], [9, 60, 9, 1, 2], [8, 8]]
PROMPTS = [np.array(one, np.int32) for one in GROUPS for _ in range(3)]
MOST = 1 + len(PROMPTS) // 4
STOPS = tuple(range(1, 12))  # so that rows end apart, and are refilled beside others


@functools.cache
def ready(strategy):
  with jax.enable_x64(True):
    job = make_job(strategy, "lm", **KEYS)
    return job, first_state(job).params


@functools.cache
def sampler(strategy, together=0):
  job, _ = ready(strategy)
  with jax.enable_x64(True):
    sizes = {"prompt_tokens": LONGEST, "new_tokens": NEW, "rows": len(PROMPTS)}
    return RolloutSampler(job, **sizes, temperature=1.3, stop_tokens=STOPS, together=together)


@functools.cache
def answers(strategy, together=0):
  """Returns (answers, how many steps of decode they took)."""
  made, params = sampler(strategy, together), ready(strategy)[1]
  steps, decode = [], made.sampler.decode
  made.sampler.decode = lambda *given: steps.append(1) or decode(*given)
  with jax.enable_x64(True):
    return made(params, None, PROMPTS, seed=3, step=5), len(steps)


def assert_same(found, wanted):
  np.testing.assert_array_equal(found.tokens, wanted.tokens)
  np.testing.assert_array_equal(found.lengths, wanted.lengths)
  np.testing.assert_array_equal(found.ended, wanted.ended)
  np.testing.assert_allclose(found.log_probabilities, wanted.log_probabilities, rtol=0, atol=1e-12)


def test_log_probabilities_are_those_of_whole_rows_without_a_cache():
  """Of rows that were refilled beside others; of other kinds of layers: test_grpo.py."""
  job, params = ready("single")
  found, _ = answers("single", MOST)
  rows = np.zeros((len(PROMPTS), LONGEST + NEW), np.int32)
  for row, (prompt, drawn) in enumerate(zip(PROMPTS, found.tokens, strict=True)):
    rows[row, : len(prompt) + NEW] = np.concatenate([prompt, drawn])
  with jax.enable_x64(True):
    logits = jax.jit(lambda p, x: nnx.merge(job.program.graphdef, p)(x))
    with job.tracing():
      logits_BTV = np.asarray(logits(params, rows), np.float64) / 1.3
  top = logits_BTV.max(-1, keepdims=True)
  log_BTV = logits_BTV - top - np.log(np.exp(logits_BTV - top).sum(-1, keepdims=True))
  for row, prompt in enumerate(PROMPTS):
    count = found.lengths[row]
    places = len(prompt) - 1 + np.arange(count)
    wanted = log_BTV[row, places, found.tokens[row, :count]]
    np.testing.assert_allclose(found.log_probabilities[row, :count], wanted, rtol=0, atol=1e-12)
    assert not found.log_probabilities[row, count:].any()
    assert not found.tokens[row, count:].any()
  ends = np.isin(found.tokens[np.arange(len(PROMPTS)), found.lengths - 1], [0, *STOPS])
  np.testing.assert_array_equal(found.ended, ends)


def test_an_answer_depends_on_no_row_beside_it_nor_on_the_mesh():
  wanted, steps = answers("dp4_tp2")
  assert len({*map(bytes, wanted.tokens)}) == len(PROMPTS), "equal prompts draw different answers"
  assert steps == NEW - 1
  refilled, more_steps = answers("single", MOST)
  assert steps < more_steps < 4 * NEW
  assert_same(refilled, wanted)


def test_an_answer_depends_on_its_number_and_not_on_the_order():
  made, params = sampler("single", MOST).sampler, ready("single")[1]
  with jax.enable_x64(True):
    drawn = {}
    for order in (range(len(PROMPTS)), [7, 3, 11, 0, 5]):
      texts = [[] for _ in order]

      def take(place, token, log_probability, texts=texts):
        texts[place].append((token, round(log_probability, 11)))
        return len(texts[place]) < NEW

      prompts = [PROMPTS[number] for number in order]
      assert made.run((params, {}), prompts, Request(()), take, numbers=order)
      drawn[len(texts)] = dict(zip(order, texts, strict=True))
  assert {number: drawn[12][number] for number in drawn[5]} == drawn[5]


def test_of_equal_prompts_one_is_read_and_kept_for_the_rows_that_follow(monkeypatch):
  made, params = sampler("single", MOST), ready("single")[1]
  wanted, _ = answers("single", MOST)
  read, prefill = [], made.sampler._prefill

  def counted(given, prompts):
    read.append(found := prefill(given, prompts))
    return found

  monkeypatch.setattr(made.sampler, "_prefill", counted)
  with jax.enable_x64(True):
    assert_same(made(params, None, PROMPTS, seed=3, step=5), wanted)
    assert [one for found in read for one in found.places[0]] == [*map(tuple, GROUPS)]
    rows = {0: (3, 5, 7), 2: (3, 5, 7), 3: (44,)}
    found = prefill((params, {}), rows)
    assert found.sizes == (2, LONGEST)
    assert found.read[1]["lengths"].tolist() == [3, 1]
    assert made.sampler._source(found, rows).tolist() == [0, -1, 0, 1]
    assert made.sampler._source(found, {1: (8, 8)}) is None


def test_a_hot_model_ends_answers_by_ids_that_its_tokenizer_does_not_have():
  job = make_job("single", "lm", **{"model.vocabulary_size": 300, "model.vocabulary_multiple": 8})
  made = RolloutSampler(job, prompt_tokens=1, new_tokens=11, rows=64, temperature=1e6)
  prompts = [np.array([7], np.int32)] * 64
  state = first_state(job)
  found = made(state.params, None, prompts, seed=0, step=0)
  last = found.tokens[np.arange(64), found.lengths - 1]
  assert (last >= 256).any()
  np.testing.assert_array_equal(found.ended, (last == 0) | (last >= 256))
  np.testing.assert_array_equal(found.lengths[~found.ended], 11)
  np.testing.assert_allclose(found.log_probabilities[:, 0], -np.log(300), rtol=1e-5)
  other = made(state.params, None, prompts, seed=0, step=1)
  assert (other.tokens != found.tokens).any(axis=1).all()
