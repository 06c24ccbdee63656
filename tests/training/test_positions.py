"""Runs whose batch size changes when they are resumed: no row is repeated, none is lost."""

import json
import math

import numpy as np
import pytest

from input_pipeline.batches import TrainingBatches
from tests.training import runs
from tests.training.runs import rollbacks, source, train
from training import bad_steps, older_configs
from training.bad_steps import BadSteps

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


@pytest.mark.long
def test_rows_over_batch_sizes_rollbacks_and_epochs(tmp_path, taken):
  rows = source({3: math.inf, 17: math.inf})  # a row in 24-31 of the first epoch, one in 136-143
  keys = {"training.max_rollbacks": 9, "checkpoint.every_steps": 5, **runs.ROLL_BACK}
  steps = {10: 8, 20: 16, 34: 4}
  for done, batch in steps.items():
    train(
      tmp_path,
      rows,
      prepared=runs.job(
        "single", **keys, **{"training.steps": done, "data.global_batch_size": batch}
      ),
      accept=ACCEPT if done > 10 else (),
    )
  made = rollbacks(tmp_path)
  skipped = [tuple(pair) for line in made for pair in line["skipped_rows"]]
  assert skipped[:2] == [(24, 32), (136, 152)]  # of 8 rows, then of 16
  assert [(line["rolled_back"], line["step"]) for line in made][:2] == [(4, 0), (14, 10)]
  spoiled = ~np.isfinite(rows.read(np.arange(len(rows)))["inputs"]).all(axis=1)
  bad = np.flatnonzero(spoiled[order(len(rows))])
  assert all(any(a <= row < b for a, b in skipped) for row in bad if row < 300)
  left = [row for row in range(600) if not any(a <= row < b for a, b in skipped)]
  expected, batch_of = order(len(rows))[left].tolist(), dict.fromkeys(range(10), 8)
  batch_of |= dict.fromkeys(range(10, 20), 16) | dict.fromkeys(range(20, 34), 4)
  for step, batch in batch_of.items():
    assert taken[step] == expected[:batch], step
    expected = expected[batch:]
  assert sum(batch_of.values()) > len(rows), "the second epoch has begun"


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
  # Given as a batch of the new size, the same number names other rows.
  by_batch = {**bigger, "data.skip_rows": (), "data.skip_batches": (11,)}
  with pytest.raises(ValueError, match=r"the rows 92-99 differently; name rows from 120 on"):
    train(tmp_path, rows, prepared=runs.job("single", **by_batch))


# ------------------------------ checkpoints of older versions ------------------------------

OLD_RECORD = {
  "versions": {"code": "older"},
  "bad_steps": {
    "skipped": [3, 21],
    "rollbacks": [{"bad_step": 4, "why": "loss is nan", "step": 0, "skipped": [3]}],
    "losses": [1.5, 0.1 + 0.2],
  },
}


def old_batch(step, skipped):
  """Returns the batch of a step as the versions that counted batches defined it."""
  left = [index for index in range(100) if index not in skipped]
  return left[step]


def test_records_that_named_batches_give_the_same_rows():
  old = {"data": {"global_batch_size": 8, "skip_batches": [21], "name": "x"}, "seed": 0}
  training = {"loss": "classification", "parameter_dtype": "float32"}
  old = {**old, "data": {**old["data"], "kind": "image"}, "training": training}
  old = {**old, "optimizer": {"name": "adamw", "schedule": "cosine"}, "model": {"name": "mlp"}}
  record = bad_steps.upgraded(json.loads(json.dumps(OLD_RECORD)), old)
  assert record["versions"] == OLD_RECORD["versions"]
  assert bad_steps.upgraded(record, old) == record
  config = runs.job("single", **{"data.skip_batches": (21,)}).config
  assert config.data.skip_rows == ((168, 176),)
  bad_steps.require_same_past(config, record, 30)
  found = BadSteps(config, record, 30)
  assert found.rollbacks[0].skipped_rows == ((24, 32),)
  assert found.record()["bad_steps"]["losses"] == OLD_RECORD["bad_steps"]["losses"]
  for step in range(50):
    batch = old_batch(step, (3, 21))
    assert found.position.rows(step) == ((8 * batch, 8 * batch + 8),)
  # With another batch size it goes on where the old one was: at row 8 * 32, two were skipped.
  bigger = runs.job("single", **{"data.skip_rows": ((168, 176),), "data.global_batch_size": 16})
  assert BadSteps(bigger.config, record, 30).position.rows(30) == ((256, 272),)
  upgraded = older_configs.upgraded(old)
  assert upgraded["data"]["skip_rows"] == [(168, 176)]
  assert upgraded["data"]["skip_batches"] == ()
  assert upgraded["task"] == "classification"
  assert "kind" not in upgraded["data"]
  assert "loss" not in upgraded["training"]
  assert older_configs.upgraded(upgraded) == upgraded


def test_an_older_decoder_had_as_many_positions_as_tokens_in_a_row():
  data = {"global_batch_size": 8, "sequence_length": 24}
  training, optimizer = {"parameter_dtype": "float32"}, {"schedule": "cosine"}
  old = {"model": {"name": "transformer", "head_size": 16}, "data": data, "training": training}
  old = {**old, "optimizer": optimizer}
  assert older_configs.upgraded(old)["model"]["max_positions"] == 24


def test_records_from_before_there_were_rollbacks_begin_at_the_first_row():
  record = bad_steps.upgraded({"versions": {}}, {"data": {"global_batch_size": 8}})
  found = BadSteps(runs.job("single").config, record, 7)
  assert found.position.rows(7) == ((56, 64),)
  assert found.rollbacks == ()
