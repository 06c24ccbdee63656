"""The decoder read in pieces gives the logits of the decoder read at once."""

import jax
import numpy as np
import pytest
from flax import nnx

from models import model_spec, transformer
from tests.helpers.jobs import first_state, make_job

ROWS, LENGTH = 8, 12


def read_in_pieces(job, pieces):
  """Returns a function of (params, tokens, counts per piece) that gives each piece's logits.

  A row of a piece holds `count` tokens and behind them others that belong to no text.
  """

  def logits(params, tokens_BT, counts):
    model = nnx.merge(job.program.graphdef, params)
    cache = transformer.empty_cache(model_spec(job.config), ROWS, LENGTH + max(pieces))
    starts_B, found = jax.numpy.zeros(ROWS, "int32"), []
    for width, counts_B in zip(pieces, counts, strict=True):
      columns_BT = starts_B[:, None] + jax.numpy.arange(width, dtype="int32")[None]
      piece_BT = jax.numpy.take_along_axis(tokens_BT, columns_BT, axis=1)
      real_BT = jax.numpy.arange(width, dtype="int32")[None] < counts_B[:, None]
      logits_BV, cache = model.extend(
        jax.numpy.where(real_BT, piece_BT, 60 - piece_BT), counts_B, cache
      )
      found.append(logits_BV)
      starts_B = starts_B + counts_B
    return found

  return logits


@pytest.mark.parametrize("strategy", ["dp2_fsdp2_tp2", "tp8"])
def test_reading_in_pieces_gives_the_logits_of_reading_at_once(strategy):
  job = make_job(strategy, "lm", **{"training.matmul_precision": "highest"})
  assert_pieces_give_what_the_whole_gives(job, 1e-5)


EXPERTS = {
  "model.experts": 8,
  "model.experts_per_token": 3,
  "model.layers": 5,
  "model.dense_layers": 1,
  "model.sparse_every": 2,
  "model.router_correction": True,
  "training.parameter_dtype": "float64",
  "training.matmul_precision": "highest",
}


@pytest.mark.parametrize(
  "mesh",
  [
    {"mesh.expert": 2, "mesh.tensor": 2, "model.layers": 3},
    pytest.param({"mesh.fsdp": 2, "mesh.expert": 2, "mesh.tensor": 2}, marks=pytest.mark.long),
    pytest.param({"mesh.expert": 8, "model.sparse_every": 1}, marks=pytest.mark.long),
  ],
  ids=str,
)
def test_sparse_layers_between_dense_ones_are_read_in_pieces(mesh):
  with jax.enable_x64(True):
    job = make_job("single", "lm", **{**EXPERTS, **mesh})
    assert_pieces_give_what_the_whole_gives(job, 1e-12)


def assert_pieces_give_what_the_whole_gives(job, bound):
  """Compares logits; `bound` is of their relative L2 difference."""
  pieces = (5, 1, 3)
  random = np.random.default_rng(1)
  tokens_BT = random.integers(0, 61, (ROWS, LENGTH), np.int32)
  counts = [random.integers(1, width + 1, ROWS, np.int32) for width in pieces]
  assert len(set(counts[0])) > 2, "rows must differ in length"
  params = first_state(job).params

  def both(params, tokens_BT, counts):
    whole = nnx.merge(job.program.graphdef, params)(tokens_BT)
    return whole, read_in_pieces(job, pieces)(params, tokens_BT, counts)

  compiled = job.compile(
    both,
    job.state.params,
    tokens_BT,
    counts,
    in_shardings=(job.state_shardings.params, None, None),
  ).function
  whole_BTV, found = jax.device_get(compiled(params, tokens_BT, counts))
  ends_B = np.zeros(ROWS, int)
  for counts_B, logits_BV in zip(counts, found, strict=True):
    ends_B += counts_B
    wanted = whole_BTV[np.arange(ROWS), ends_B - 1][:, :61]
    assert np.linalg.norm(logits_BV[:, :61] - wanted) <= bound * np.linalg.norm(wanted)
    assert np.all(logits_BV[:, 61:] == np.finfo(whole_BTV.dtype).min)  # the vocabulary's padding
