"""Runs whose batch size changes when they are resumed: no row is repeated, none is lost."""

import math

import numpy as np
import pytest

from input_pipeline.batches import TrainingBatches
from tests.training import runs
from tests.training.runs import rollbacks, source, train

ACCEPT = ["data.global_batch_size"]


@pytest.fixture
def taken(monkeypatch):
  """Returns a dict that gets the rows of each step of runs: step (from 0) -> row numbers."""
  found, undisturbed = {}, TrainingBatches.batch

  def batch(self, step, shardings, position=None):
    found[step] = self.row_ids(step, position).tolist()  # what comes again replaces what was undone
    return undisturbed(self, step, shardings, position)

  monkeypatch.setattr(TrainingBatches, "batch", batch)
  return found


def order(rows, epochs=3):
  """Returns the numbers of rows in the order of the epochs, by NumPy alone."""
  seeds = [np.random.SeedSequence([0, epoch]) for epoch in range(epochs)]
  return np.concatenate([np.argsort(np.random.Philox(seed).random_raw(rows)) for seed in seeds])


def test_going_back_to_a_checkpoint_of_another_batch_size(tmp_path, taken):
  keys = {"checkpoint.every_steps": 5, **runs.ROLL_BACK, "training.bad_step_skips": 3}
  rows = source({11: math.inf})  # a row in 88-95: in the first batch of 16, rows 80-95
  train(tmp_path, rows, prepared=runs.job("single", **keys, **{"training.steps": 10}))
  bigger = {"training.steps": 16, "data.global_batch_size": 16}
  train(tmp_path, rows, prepared=runs.job("single", **keys, **bigger), accept=ACCEPT)
  [made] = rollbacks(tmp_path)
  # Steps 9, 10 and 11 are skipped: two of 8 rows and one of 16. From step 5 on, all are of 16.
  assert (made["rolled_back"], made["step"], made["skipped_rows"]) == (11, 5, [[64, 96]])
  ids = order(len(rows))
  assert [taken[step] for step in (4, 5, 6)] == [
    ids[32:40].tolist(),
    ids[40:56].tolist(),
    [*ids[56:64], *ids[96:104]],
  ]


def test_what_is_skipped_by_rows_stays_the_same_rows(tmp_path, taken):
  keys = {"data.skip_rows": ((92, 100),)}  # passed by the second batch size
  rows = source()
  train(tmp_path, rows, prepared=runs.job("single", **keys, **{"training.steps": 10}))
  bigger = {"training.steps": 12, "data.global_batch_size": 16, **keys}
  train(tmp_path, rows, prepared=runs.job("single", **bigger), accept=ACCEPT)
  ids = order(len(rows))
  assert taken[10] == [*ids[80:92], *ids[100:104]]
  assert taken[11] == ids[104:120].tolist()
  for changed in ((), ((92, 99),), ((0, 8), (92, 100))):
    with pytest.raises(ValueError, match=r"passed the rows up to 119, and treated the rows"):
      train(tmp_path, rows, prepared=runs.job("single", **{**bigger, "data.skip_rows": changed}))
  later = {**bigger, "data.skip_rows": ((92, 100), (200, 208))}
  with pytest.raises(ValueError, match=r"--accept-changes=data\.skip_rows"):
    train(tmp_path, rows, prepared=runs.job("single", **later))
  # Given as a batch of the new size, the same number names other rows.
  by_batch = {**bigger, "data.skip_rows": (), "data.skip_batches": (11,)}
  with pytest.raises(ValueError, match=r"the rows 92-99 differently; name rows from 120 on"):
    train(tmp_path, rows, prepared=runs.job("single", **by_batch))
