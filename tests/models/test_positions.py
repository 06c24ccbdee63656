"""Positions: rotary scaling by name at published sizes, documents in a row of tokens."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from models import positions
from models.positions import apply_rope, attention_factor, rope_table, rotary_frequencies
from models.spec import hashable
from tests.helpers.jobs import first_state, host_batch, make_job, place
from tests.models import numpy_decoder

# ------------------------------ rope ------------------------------

LENGTH = {"original_length": 4096}


def frequencies(kind, numbers, length=0, size=128, base=1e4):
  """Returns the frequencies of a kind in float32."""
  scaling = hashable((kind, numbers)) if kind else ()
  dtype = jnp.dtype("float32")
  return np.asarray(rotary_frequencies(size, base, scaling, dtype=dtype, length=length))


FACTORS = {"short_factors": (*np.linspace(1, 2, 64),), "long_factors": (*np.linspace(1, 60, 64),)}


@pytest.mark.parametrize("length", [100, 4096, 4097, 9000, 131_072])
@pytest.mark.parametrize(
  ("kind", "numbers"),
  [
    ("linear", {"factor": 4.0}),
    ("dynamic", {"factor": 2.0, **LENGTH}),
    ("yarn", {"factor": 16.0, **LENGTH}),
    ("longrope", {"factor": 32.0, **FACTORS, **LENGTH}),
    ("llama3", {"factor": 8.0, "low": 1.0, "high": 4.0, **LENGTH}),
  ],
)
def test_frequencies_are_those_of_the_published_formulas(kind, numbers, length):
  wanted_h, factor = numpy_decoder.frequencies((kind, numbers), 128, 1e4, length)
  np.testing.assert_allclose(frequencies(kind, numbers, length), wanted_h, rtol=2e-6)
  assert attention_factor(hashable((kind, numbers))) == pytest.approx(factor)


def test_llama_3_by_name_is_llama_3_by_its_four_numbers():
  named = {"factor": 8.0, "low": 1.0, "high": 4.0, "original_length": 8192.0}
  scaling, dtype = (8.0, 1.0, 4.0, 8192.0), jnp.dtype("float32")
  by_numbers = rotary_frequencies(128, 1e4, scaling, dtype=dtype)
  np.testing.assert_array_equal(frequencies("llama3", named), by_numbers)


@pytest.mark.parametrize(
  ("kind", "numbers", "wanted"),
  [
    ("linear", {"factor": 4.0}, 1.0),
    ("dynamic", {"factor": 4.0, **LENGTH}, 1.0),
    ("yarn", {"factor": 4.0, **LENGTH}, 0.1 * math.log(4) + 1),
    ("yarn", {"factor": 0.5, **LENGTH}, 1.0),
    ("yarn", {"factor": 4.0, "attention_factor": 0.7, **LENGTH}, 0.7),
    ("longrope", {"factor": 32.0, **LENGTH}, math.sqrt(1 + 5 / 12)),
    ("longrope", {"attention_factor": 1.19, **LENGTH}, 1.19),
  ],
)
def test_the_factor_of_the_attention(kind, numbers, wanted):
  assert attention_factor(hashable((kind, numbers))) == pytest.approx(wanted)


def test_the_factor_of_the_attention_multiplies_cosine_and_sine():
  positions, frequency = jnp.arange(9, dtype=jnp.int32)[None], jnp.asarray([1.0, 0.1])
  plain = np.asarray(rope_table(positions, frequency))
  np.testing.assert_allclose(rope_table(positions, frequency, 1.25), 1.25 * plain, rtol=1e-6)


def test_adjacent_pairs_are_rotated_as_halves_are_in_another_order():
  random = np.random.default_rng(5)
  x_BTNH = random.standard_normal((2, 7, 3, 10)).astype(np.float32)  # of which 8 dims are rotated
  frequency_h = rotary_frequencies(8, 100.0, dtype=jnp.dtype("float32"))
  table = rope_table(jnp.arange(7, dtype=jnp.int32)[None], frequency_h)
  found = np.asarray(apply_rope(jnp.asarray(x_BTNH), table, adjacent=True))
  angle_Th = np.arange(7)[:, None] * 100.0 ** (-np.arange(4) / 4)
  turned = (x_BTNH[..., 0:8:2] + 1j * x_BTNH[..., 1:8:2]) * np.exp(1j * angle_Th)[None, :, None]
  np.testing.assert_allclose(found[..., 0:8:2], turned.real, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(found[..., 1:8:2], turned.imag, rtol=1e-5, atol=1e-6)
  np.testing.assert_array_equal(found[..., 8:], x_BTNH[..., 8:])
  assert not np.allclose(found, apply_rope(jnp.asarray(x_BTNH), table))


# ------------------------------ token positions ------------------------------


def test_positions_restart_in_each_segment():
  segments_BT = jnp.asarray([[0, 0, 0, 1, 1, 2, 3], [0] * 7, [5, 5, 2, 2, 2, 9, 9]], jnp.int32)
  assert positions.positions(segments_BT).tolist() == [
    [0, 1, 2, 0, 1, 0, 0],
    [0, 1, 2, 3, 4, 5, 6],
    [0, 1, 0, 1, 2, 0, 1],
  ]


@pytest.mark.parametrize("separate", [True, False])
def test_a_document_is_read_as_if_it_were_alone(separate):
  job = make_job("single", "lm", **{"model.separate_documents": separate})
  params = first_state(job).params
  batch = host_batch(job)
  batch["segments"][:] = np.arange(batch["segments"].shape[1]) >= 4
  other_BT = batch["tokens"].copy()
  other_BT[:, :4] = 3  # another first document
  function = job.compile(job.program.sums, job.state.params, job.batch).function

  def losses(tokens_BT):
    # The second document alone counts.
    weights_BT = np.zeros_like(batch["weights"])
    weights_BT[:, 4:] = 1
    given = {**batch, "tokens": tokens_BT, "weights": weights_BT}
    return float(function(params, place(job, given))["loss"])

  assert (losses(batch["tokens"]) == losses(other_BT)) == separate
