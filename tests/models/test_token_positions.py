"""Documents in a row of tokens, and that one does not see the other."""

import jax.numpy as jnp
import numpy as np
import pytest

from input_pipeline import prepare
from models import token_positions
from tests.helpers.jobs import host_batch, make_job, place

END = token_positions.END


def test_segments_and_positions():
  tokens_BT = jnp.asarray([[5, 6, END, 7, END, END, 8], [1, 2, 3, 4, 5, 6, END]], jnp.int32)
  segments_BT = token_positions.segments(tokens_BT)
  assert segments_BT.tolist() == [[0, 0, 0, 1, 1, 2, 3], [0] * 7]
  assert token_positions.positions(segments_BT).tolist() == [
    [0, 1, 2, 0, 1, 0, 0],
    [0, 1, 2, 3, 4, 5, 6],
  ]


@pytest.mark.parametrize("separate", [True, False])
def test_a_document_is_read_as_if_it_stood_alone(separate):
  job = make_job("single", "lm", **{"model.separate_documents": separate})
  params = job.initial_state().params
  batch = host_batch(job)
  tokens_BT = np.maximum(batch["tokens"], 1)
  tokens_BT[:, 4] = END
  other_BT = tokens_BT.copy()
  other_BT[:, :4] = 3  # another first document
  function = job.compile(job.program.sums, job.state.params, job.batch).function

  def losses(tokens_BT):
    # The second document alone counts.
    weights_BT = np.zeros_like(batch["weights"])
    weights_BT[:, 5:] = 1
    given = {**batch, "tokens": tokens_BT, "weights": weights_BT}
    return float(function(params, place(job, given))["loss"])

  assert (losses(tokens_BT) == losses(other_BT)) == separate


def test_the_token_that_ends_a_document_is_the_byte_that_preparation_writes():
  assert bytes([token_positions.END]) == prepare.END_OF_DOCUMENT
