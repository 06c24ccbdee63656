"""Documents in a row of tokens, and that one does not see the other."""

import jax.numpy as jnp
import numpy as np
import pytest

from models import positions
from tests.helpers.jobs import first_state, host_batch, make_job, place


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
