"""A record that is malformed is refused by key, though its digests match."""

import copy
import dataclasses
import json

import pytest
from etils import epath

from tests.training import runs
from training import bad_steps, restore, run_record
from training.checkpointing import integrity


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """Returns the workdir of a run that went back once, and the record of its last checkpoint."""
  workdir = tmp_path_factory.mktemp("run")
  keys = {"training.bad_step_deviations": 1e6, "checkpoint.keep_best": "eval_loss"}
  runs.train(workdir, runs.source({7: float("nan")}), **runs.ROLL_BACK, **keys)
  path = workdir / "checkpoints" / str(runs.STEPS) / "record" / "metadata"
  return workdir, json.loads(path.read_text())


def test_what_a_run_writes_is_well_formed(run):
  workdir, record = run
  run_record.require_record(record, workdir)
  assert set(record) <= set(run_record.RECORD_FORM)  # each key has a form
  [made] = record["bad_steps"]["rollbacks"]
  assert set(made) == {field.name for field in dataclasses.fields(bad_steps.Rollback)}
  assert record["bad_steps"]["losses"]


# Path to the key -> (what is put there, what is said).
MALFORMED = {
  "versions": (["x"], 'versions: an object is expected, and ["x"] is there'),
  "versions/jax": (1, "versions.jax: a text is expected, and 1 is there"),
  "data/rows": (None, "data.rows: a text is expected, and null is there"),
  "accepted_changes": ({}, "accepted_changes: a list is expected, and {} is there"),
  "bad_steps": (7, "bad_steps: an object is expected, and 7 is there"),
  "bad_steps/skipped_rows/0": (7, "bad_steps.skipped_rows[0]: a list of 2 is expected, and 7"),
  "bad_steps/rollbacks/0/skipped_rows": ([["a", 1]], "skipped_rows[0][0]: an integer is expected"),
  "position": (0, "position: a list is expected, and 0 is there"),
  "position/0": ({"step": 0}, "position[0]: the keys step, row, batch are expected, and step"),
  "position/0/batch": (0, "position[0].batch: a whole number of at least 1"),
  "metrics_over/examples": ("x", 'metrics_over.examples: an integer is expected, and "x" is'),
  "bad_steps/losses/0": ("nan", 'bad_steps.losses[0]: a number is expected, and "nan" is there'),
  "bad_steps/rollbacks/0": (
    {"step": True},
    "bad_steps.rollbacks[0]: the keys bad_step, why, step, skipped_rows are expected",
  ),
  "bad_steps/rollbacks/0/step": (
    True,
    "bad_steps.rollbacks[0].step: an integer is expected, and true is there",
  ),
  "lines/steps": (-1, "lines.steps: an integer is expected, and -1 is there"),
  "base": ({"folder": "x"}, "base: the keys folder, step, dtype, digest are expected, and folder"),
  "metrics": ({"eval_loss": "x" * 99}, 'metrics.eval_loss: a number is expected, and "xxx'),
}


@pytest.mark.parametrize("path", MALFORMED)
def test_a_malformed_key_is_named_with_what_is_expected_and_what_is_there(path, run):
  value, said = MALFORMED[path]
  record = changed(run[1], path, value)
  with pytest.raises(ValueError, match="though its digests match") as refusal:
    run_record.require_record(record, epath.Path("runs/x/checkpoints/19"))
  text = str(refusal.value)
  assert text.startswith("runs/x/checkpoints/19: its record is malformed, though its digests")
  assert said in text
  assert len(text.splitlines()) == 1


def changed(record, path, value):
  """Returns a record with another value at a path."""
  record = copy.deepcopy(record)
  *parents, last = [int(part) if part.isdecimal() else part for part in path.split("/")]
  inner = record
  for part in parents:
    inner = inner[part]
  inner[last] = value
  return record


def test_keys_of_other_versions_are_passed_over(run):
  run_record.require_record({**run[1], "of_a_later_version": 1}, epath.Path("x"))
  run_record.require_record({}, epath.Path("x"))


def test_a_run_does_not_begin_with_one(run):
  workdir, record = run
  step = epath.Path(workdir / "checkpoints" / str(runs.STEPS))
  record = changed(record, "bad_steps/skipped_rows", "none")
  (step / "record" / "metadata").write_text(json.dumps(record))
  (step / "digests").unlink()
  integrity.write_digests(step, integrity.compute_digests(step, integrity.file_sizes(step)))
  prepared, rows = runs.job(), runs.source()
  with pytest.raises(
    ValueError, match=r"bad_steps\.skipped_rows: a list is expected, and \"none\""
  ):
    restore.RunCheckpoints(prepared, epath.Path(workdir)).check_resume(rows)
