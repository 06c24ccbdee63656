"""Sampling: how the next token is drawn, and texts as the full forward pass would give them."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from inference import request as requests
from inference.request import Request, check, text_spec
from inference.sampler import Sampler, draw_token, filter_logits
from models import MODELS, transformer
from partitioning import rules
from partitioning.rules import named_leaves
from runtime import collectives
from tests.helpers.jobs import first_state, make_job

# ------------------------------ the next token ------------------------------


def numpy_filter(logits, temperature, top_k, top_p):
  """Returns one row's filtered logits, token by token from the likeliest down."""
  scaled = (logits - logits.max()) / np.float32(temperature)
  order = np.argsort(-scaled, kind="stable")[: top_k or None]
  weights = np.exp(scaled[order].astype(np.float64))
  kept, reached = [], 0.0
  for token, weight in zip(order, weights / weights.sum(), strict=True):
    if kept and reached >= top_p and top_p < 1:
      break
    kept.append(token)
    reached += weight
  return np.where(np.isin(np.arange(len(logits)), kept), scaled, -np.inf)


def filtered(logits, temperature, top_k, top_p):
  """Calls the function under test."""
  settings = np.float32(temperature), np.int32(top_k), np.float32(top_p)
  names = ("temperature", "top_k", "top_p")
  return np.asarray(compiled_filter(logits, **dict(zip(names, settings, strict=True))))


compiled_filter = jax.jit(filter_logits)
LOGITS_BV = np.random.default_rng(3).normal(size=(5, 37), scale=2).astype(np.float32)
UNLIKELY_BV = np.tile(np.float32([80, 0, -80]), (5, 13))[:, :37]  # of 0 in float32


@pytest.mark.parametrize(
  ("logits_BV", "temperature", "top_k", "top_p"),
  [
    *((LOGITS_BV, 0.3, 0, p) for p in (1e-6, 0.9, 1.0)),
    *((LOGITS_BV, 1.0, k, p) for k, p in ((1, 1.0), (4, 0.35), (4, 0.9), (37, 0.9))),
    *((LOGITS_BV, 2.5, k, p) for k, p in ((4, 1.0), (37, 0.35))),
    (UNLIKELY_BV, 1.0, 0, 1.0),
  ],
)
def test_filters_as_numpy_does(logits_BV, temperature, top_k, top_p):
  found = filtered(logits_BV, temperature, top_k, top_p)
  wanted = np.stack([numpy_filter(row, temperature, top_k, top_p) for row in logits_BV])
  np.testing.assert_array_equal(np.isfinite(found), np.isfinite(wanted))
  np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_tokens_as_likely_as_the_last_one_kept_stay():
  logits_BV = np.array([[1.0, 3.0, 2.0, 2.0, 0.0]], np.float32)
  assert np.isfinite(filtered(logits_BV, 1.0, 2, 1.0)).tolist() == [
    [False, True, True, True, False]
  ]


def settings(rows, **changed):
  """Returns settings as a sampler passes them."""
  values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 0, **changed}
  dtypes = {"temperature": "float32", "top_k": "int32", "top_p": "float32", "seed": "uint32"}
  arrays = {name: jnp.asarray(value, dtypes[name]) for name, value in values.items()}
  return {**arrays, "numbers": jnp.arange(rows, dtype=jnp.int32)}


def drawn(logits_V, rows=8_000, position=5, **changed):
  """Returns what `rows` rows of the same logits draw."""
  logits_BV = jnp.tile(jnp.asarray(logits_V, jnp.float32)[None], (rows, 1))
  positions_B = jnp.full((rows,), position, jnp.int32)
  return np.asarray(jax.jit(draw_token)(logits_BV, positions_B, settings(rows, **changed)))


@pytest.mark.parametrize(
  "changed", [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.7}, {"temperature": 3.0}]
)
def test_each_token_is_drawn_as_often_as_it_should(changed):
  logits_V = np.array([0.5, -1.0, 1.5, 0.0, -3.0, 1.0], np.float32)
  values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, **changed}
  weights = np.exp(numpy_filter(logits_V, **values))
  wanted = weights / weights.sum()
  rows = 8_000
  found = np.bincount(drawn(logits_V, rows, **changed), minlength=6) / rows
  assert np.all(np.abs(found - wanted) <= 5 * np.sqrt(wanted * (1 - wanted) / rows))


def test_a_temperature_of_0_takes_the_likeliest_and_a_tiny_one_does_too():
  logits_V = [0.1, -1.0, 1.5, 1.49]
  for temperature in (0.0, 1e-45, 1e-38, 1e-6):
    assert set(drawn(logits_V, 50, temperature=temperature)) == {2}, temperature


def test_draws_differ_by_seed_by_row_and_by_position():
  logits_V, rows = np.zeros(64), 100
  first = drawn(logits_V, rows)
  assert len(set(first)) > 30
  assert np.mean(first == drawn(logits_V, rows)) == 1
  assert np.mean(first == drawn(logits_V, rows, seed=1)) < 0.2
  assert np.mean(first == drawn(logits_V, rows, position=6)) < 0.2
  np.testing.assert_array_equal(first[:7], drawn(logits_V, 7))  # whoever else is there


# ------------------------------ whole texts ------------------------------

# Tokens below the small model's vocabulary of 61; an empty prompt starts a document.
PROMPTS = (bytes([3, 5, 7]), b"", bytes([9, 60, 9, 1, 2]), bytes([44]))
NEW = 7  # with the longest prompt, data.sequence_length = 12
GREEDY = Request(PROMPTS, max_new_tokens=NEW, temperature=0.0)


@functools.cache
def sampler(strategy):
  """Returns (sampler for PROMPTS, parameters), made once."""
  job = make_job(strategy, "lm", **{"training.matmul_precision": "highest"})
  return Sampler(job, GREEDY), first_state(job).params


def decoded_without_cache(made, params):
  """Returns greedy tokens by the whole forward pass of all so far, once for each token."""
  job, rows = made.job, made.rows
  prompts = made.spec.encoded(PROMPTS)
  lengths = np.array([*map(len, prompts)])
  tokens_BT = np.zeros((rows, lengths.max() + NEW), np.int32)
  for row, tokens in enumerate(prompts):
    tokens_BT[row, : len(tokens)] = tokens
  forward = job.compile(
    lambda params, tokens_BT: nnx.merge(job.program.graphdef, params)(tokens_BT),
    *(job.state.params, tokens_BT),
    in_shardings=(job.state_shardings.params, None),
  ).function
  drawn = np.zeros((len(PROMPTS), NEW), np.int32)
  for step in range(NEW):
    logits_BTV = np.asarray(forward(params, tokens_BT))
    for row in range(len(PROMPTS)):
      place = lengths[row] + step
      drawn[row, step] = tokens_BT[row, place] = logits_BTV[row, place - 1].argmax()
  return [bytes(row.tolist()).partition(b"\0")[0] for row in drawn]


def test_what_a_run_could_not_sample_at_its_end_is_refused_before_it_starts(monkeypatch):
  job = make_job("single", "lm", **{"evaluation.sample_tokens": 5})
  off = r"(?s)evaluation\.sample_tokens=5 \(0 turns it off\): .*"
  with pytest.raises(ValueError, match=f"{off}has byte 100"):
    requests.first_words(job.config, None)  # the vocabulary is smaller than "def "
  job.config.evaluation.sample_tokens = 0
  requests.first_words(job.config, None)
  job.config.evaluation.sample_tokens = 5
  monkeypatch.setitem(MODELS, "transformer", types.SimpleNamespace())
  with pytest.raises(ValueError, match=f"{off}has no next token to draw"):
    requests.first_words(job.config, None)


class Biased(transformer.Transformer):
  """A decoder whose logits have a bias that is a variable and no parameter."""

  def __init__(self, spec, *, rngs):
    super().__init__(spec, rngs=rngs)
    self.bias = nnx.BatchStat(jnp.zeros(spec.vocabulary_size, jnp.float32))

  def extend(self, tokens_BT, counts_B, cache):
    logits_BV, cache = super().extend(tokens_BT, counts_B, cache)
    size = self.bias[...].size
    return logits_BV.at[:, :size].add(self.bias[...].astype(logits_BV.dtype)), cache


def test_variables_that_are_no_parameters_are_used(monkeypatch):
  names = ("SPEC", "CACHE", "empty_cache")
  members = {name: getattr(transformer, name) for name in names}
  monkeypatch.setitem(MODELS, "transformer", types.SimpleNamespace(**members, build=Biased))
  job = make_job("single", "lm", **{"model.layers": 1})
  state, request = job.initial_state(), dataclasses.replace(GREEDY, max_new_tokens=2)
  made, [bias] = Sampler(job, request), jax.tree.leaves(state.variables)
  for token in (17, 23):
    variables = {"bias": jax.device_put(bias.at[token].set(1e4), bias.sharding)}
    assert made(state.params, request, variables=variables) == [bytes([token] * 2)] * len(PROMPTS)


# ---- The cache ----


def test_greedy_decoding_is_that_without_a_cache():
  """Of one device; what is drawn on meshes is compared with one device below."""
  made, params = sampler("single")
  found = made(params, GREEDY)
  assert found == decoded_without_cache(made, params)
  assert len({*found}) == len(PROMPTS)
  assert sum(map(len, found)) > 3 * NEW, "rows that end at once would prove little"


# Of 4 key/value heads and 4 prompts.
SHARDS = {
  "dp4_tp2": (2, 1, 12, 2, 6),
  "tp8": (2, 4, 12, 4, 6),  # tensor=8 does not divide 4 heads: they stay whole
}


def filled(made, params, settings):
  """Returns what two prompts in rows of different parts give."""
  prompts = {0: (1,) * 3, 1: (1,) * 5}
  known = made._prefill((params, {}), prompts)
  source_B = made._put(made._source(known, prompts))
  drawn_B1 = made._put(np.ones((made.rows, 1), np.int32))
  inputs = *known.read, source_B, drawn_B1, made.empty_cache(), settings
  return made._run_compiled(made._fill, known.sizes, inputs, made._drawn, donate_argnums=4)


@pytest.mark.parametrize("strategy", SHARDS)
def test_the_cache_is_sharded_like_the_model(strategy):
  made, params = sampler(strategy)
  job = made.job
  counts_B = jnp.ones(made.rows, jnp.int32)
  settings = made._put(made._settings(GREEDY))
  drawn_B1, _, cache = filled(made, params, settings)
  for _ in range(2):  # after prefill and after decode
    rules.check_placed(cache, made.placements, job.mesh, "cache/")
    for name in ("keys", "values"):
      shard = cache[name].addressable_shards[0].data
      assert shard.shape == SHARDS[strategy]
      assert shard.nbytes == rules.bytes_per_device(
        made.placements[f"cache/{name}"], job.devices.sizes
      )
    before = cache
    drawn_B1, _, cache = made.decode(params, drawn_B1, counts_B, cache, settings, {})
  assert all(leaf.is_deleted() for leaf in named_leaves(before).values()), "donated"
  assert bool(made.placements["cache/keys"].notes) == (strategy == "tp8")


def test_decoding_moves_no_cache_between_devices():
  made, params = sampler("dp4_tp2")
  filled(made, params, made._put(made._settings(GREEDY)))
  of_prompts, fill = made._programs.values()
  assert not [
    one
    for one in collectives.collectives(of_prompts.as_text(), made.job.mesh)
    if "data" in one.axes
  ]
  for compiled in (fill, made.decode):
    found = collectives.collectives(compiled.as_text(), made.job.mesh)
    over_data = [c for c in found if "data" in c.axes]
    # The tokens drawn, and their log-probabilities.
    assert {(c.kind, c.axes) for c in over_data} == {("all-gather", ("data",))}
    assert sum(c.bytes for c in over_data) == 2 * 4 * made.rows


def test_prefill_and_decode_are_traced_and_compiled_once_each(monkeypatch):
  traces, compiles = [], []
  extend = transformer.Transformer.extend

  def counted(self, tokens_BT, *rest):
    traces.append(tokens_BT.shape)
    return extend(self, tokens_BT, *rest)

  def listen(event, seconds, **_):
    if event.endswith("backend_compile_duration"):
      compiles.append(seconds)

  jax.monitoring.register_event_duration_secs_listener(listen)
  monkeypatch.setattr(transformer.Transformer, "extend", counted)
  job = make_job("dp4_tp2", "lm", **{"model.layers": 1})
  params = first_state(job).params
  compiles.clear()
  made = Sampler(job, GREEDY)
  for changed in ({}, {"temperature": 0.7}, {"seed": 4, "temperature": 1.0, "top_k": 5}):
    made(params, Request(**{**vars(GREEDY), **changed}))
  made(params, Request(PROMPTS[:2], max_new_tokens=3))
  assert traces == [(4, 1), (4, 5)]
  assert len(compiles) == 4  # also those of an empty cache, and of filling rows


def test_in_bfloat16(monkeypatch):
  # Traced only: a type that does not fit shows there, since promotion is strict.
  monkeypatch.setattr(Sampler, "_compile", lambda self: (None, None))
  compute = "bfloat16"
  made = Sampler(make_job("dp4_tp2", "lm", **{"training.compute_dtype": compute}), GREEDY)
  params, settings = made.job.state.params, made._settings(GREEDY)
  tokens_BT = np.zeros((made.rows, made._widths[0]), np.int32)
  with made.job.tracing(made.activations):
    counts_B, cache = tokens_BT[:, 0], jax.eval_shape(made._empty_cache)
    read = jax.eval_shape(made._read_prompts, params, tokens_BT, counts_B, {})
    given = *read, counts_B, tokens_BT[:, :1], cache, settings
    filled = jax.eval_shape(made._fill, *given)
    after = jax.eval_shape(made._read, params, filled[0], counts_B, filled[2], settings, {})
  assert after == filled
  drawn_B1, log_probabilities_B, cache = after
  assert drawn_B1.dtype == cache["lengths"].dtype == jnp.int32
  assert log_probabilities_B.dtype == "float32"
  assert cache["keys"].dtype == cache["values"].dtype == compute
  assert made.placements["cache/keys"].dtype == compute


# ---- The draws ----


WARM = {"temperature": 1.3, "top_k": 40, "top_p": 0.95, "seed": 11}


def test_a_row_depends_on_no_other_row_nor_on_padding_nor_on_the_mesh():
  made, params = sampler("dp4_tp2")
  wanted = made(params, Request(PROMPTS, max_new_tokens=NEW, **WARM))
  assert wanted != made(params, GREEDY)
  assert wanted[:2] == made(params, Request(PROMPTS[:2], max_new_tokens=NEW, **WARM))
  other = (PROMPTS[0], bytes([33] * 5), PROMPTS[2])
  found = made(params, Request(other, max_new_tokens=NEW, **WARM))
  assert (found[0], found[2]) == (wanted[0], wanted[2])
  assert found[1] != wanted[1]
  shorter = Request(PROMPTS[:1], max_new_tokens=NEW, **WARM)
  assert Sampler(made.job, shorter)(params, shorter) == wanted[:1]
  for strategy in ("single", "tp8"):
    made, params = sampler(strategy)
    assert made(params, Request(PROMPTS, max_new_tokens=NEW, **WARM)) == wanted


def test_padding_of_the_vocabulary_and_what_is_no_byte_are_never_drawn():
  made, params = sampler("dp4_tp2")
  hot = Request(PROMPTS, max_new_tokens=NEW, temperature=1e6)  # all tokens equally likely
  found = [
    text for seed in range(8) for text in made(params, Request(**{**vars(hot), "seed": seed}))
  ]
  assert 50 < max(map(max, found)) < 61  # of 72
  assert (
    text_spec(
      make_job(
        "single", "lm", **{"model.vocabulary_size": 300, "model.vocabulary_multiple": 8}
      ).config
    ).drawable
    == 256
  )


# ---- The text ----


def test_text_appears_as_it_is_drawn_and_rows_end_apart():
  made, params = sampler("dp4_tp2")
  whole = made(params, GREEDY)
  stop = whole[0][2:4]
  written = []
  found = made(
    params, Request(**{**vars(GREEDY), "stop": (stop,)}), lambda *said: written.append(said)
  )
  assert found[0] == whole[0][:4]
  for row, text in enumerate(found):
    assert whole[row].startswith(text)
    assert "".join(part for number, part in written if number == row) == text.decode()
  assert [number for number, _ in written[:4]] == [0, 1, 2, 3], "row by row, a token each"
  assert len(written) == sum(map(len, found))


def test_nothing_is_computed_once_all_rows_have_ended(monkeypatch):
  made, params = sampler("dp4_tp2")
  steps, decode = [], made.decode
  monkeypatch.setattr(made, "decode", lambda *given: steps.append(1) or decode(*given))
  made(params, Request(PROMPTS, max_new_tokens=3))
  assert len(steps) == 2  # the first token comes of the prefill
  first = made(params, GREEDY)[0][:1]
  steps.clear()
  made(params, Request(PROMPTS[:1], max_new_tokens=NEW, temperature=0.0, stop=(first,)))
  assert not steps


@pytest.mark.parametrize("simulated", [True, False])
def test_a_step_is_dispatched_before_the_last_is_read_where_devices_are_real(
  monkeypatch, simulated
):
  made, params = sampler("dp4_tp2")
  wanted, steps, decode = made(params, GREEDY), [], made.decode
  devices = dataclasses.replace(made.job.devices, simulated=simulated)
  monkeypatch.setattr(made, "job", dataclasses.replace(made.job, devices=devices))
  monkeypatch.setattr(made, "decode", lambda *given: steps.append(1) or decode(*given))
  ahead = []
  assert made(params, GREEDY, lambda *_: ahead.append(len(steps))) == wanted
  assert ahead[0] == (0 if simulated else 1)
  assert len(steps) == NEW - simulated  # also one whose rows have ended, unread until then


# ---- What is refused ----


@functools.cache
def spec_of(recipe="lm"):
  return text_spec(make_job("single", recipe).config)


def refusal(recipe="lm", /, **changed):
  """Returns the message about a request that differs from one that is good."""
  with pytest.raises(ValueError) as error:  # noqa: PT011
    check(spec_of(recipe), Request(**{"prompts": (b"",), "max_new_tokens": 4, **changed}))
  return str(error.value)


@pytest.mark.parametrize(
  ("changed", "said"),
  [
    ({"temperature": -0.5}, "temperature=-0.5: 0 (the likeliest token) or more"),
    ({"temperature": float("nan")}, "temperature=nan: 0"),
    ({"top_k": 62}, "top_k=62: 0 (off) to 61,"),
    ({"top_p": 0.0}, "top_p=0.0: above 0 and at most 1"),
    ({"seed": -1}, "seed=-1: 0 or more and below 2**32"),
    ({"max_new_tokens": 0}, "max_new_tokens=0: at least 1"),
    ({"stop": ("",)}, "stop: an empty text"),
    ({"prompts": ()}, "no prompt"),
    (
      {"prompts": ("", "\x03é")},
      "prompt 2 has byte 195 at position 1; the model has only tokens below ",
    ),
    (
      {"prompts": (b"\1", b"\2" * 9)},
      "prompt 2 is 9 tokens (bytes) long, with max_new_tokens=4 together 13; the limit is "
      "data.sequence_length=12, the positions that the model was trained on; shorten the prompt to "
      "8, set max_new_tokens=3, or raise data.sequence_length for this command",
    ),
  ],
)
def test_what_cannot_be_sampled_is_refused_with_its_numbers(changed, said):
  message = refusal(**changed)
  assert said in message
  # All that is wrong comes in one message.
  both = "top_p=2.0" if "top_p" not in changed else "temperature=-1.0"
  key, _, value = both.partition("=")
  assert both in refusal(**changed, **{key: float(value)})
  check(spec_of(), Request((b"\1" * 8,), max_new_tokens=4, top_k=61))  # it fits exactly


def test_a_model_without_tokens_is_refused():
  assert "model.name='mlp' has no next token to draw; sample takes a transformer" in refusal("mlp")


def test_learned_positions_end_where_they_were_learned():
  learned = {"model.positions": "learned", "model.max_positions": 15}
  spec = text_spec(make_job("single", "lm", **learned).config)
  assert (spec.fitting((b"\1" * 8, b"\2")), spec.fitting((b"\1",), most=5)) == (4, 5)
  with pytest.raises(ValueError, match=r"_tokens=4, or raise data\.sequence_length up to "):
    check(spec, Request((b"\1" * 8,), max_new_tokens=5))
  whole = dataclasses.replace(spec, sequence_length=15)
  with pytest.raises(ValueError, match=r"set max_new_tokens=7 \(its positions are learned, model"):
    check(whole, Request((b"\1" * 8,), max_new_tokens=8))
