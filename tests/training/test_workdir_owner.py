"""Files of a workdir that another run has taken over: nothing more is written to them."""

import json

import pytest
from etils import epath

from processes.workdir_lease import LostError, acquire, claims_to
from runtime import files
from tests.helpers.jobs import make_job
from tests.training.metrics.test_append_log import scalars
from training import restore, workdir_files
from training.metrics.log_lines import LogFile, MetricsWriter


class Watch:
  """As much of a watchdog as a start needs; alone."""

  def __init__(self):
    self.stop = ""
    self.group = workdir_files.groups.current()

  def at(self, *arguments):
    """Takes no note."""


def take(workdir):
  """Returns the ownership of the next run; after its lease, should there be an owner."""
  now = [0.0]

  def sleep(seconds):
    now[0] += seconds

  settings = {"wait_seconds": 0.0, "ending_seconds": 0.0, "clock": lambda: now[0], "sleep": sleep}
  return acquire(claims_to(workdir), "run", lease_seconds=1.0, **settings)


def owned(job, workdir):
  """Returns the context in which a run owns a folder."""
  folder = epath.Path(workdir)
  room = restore.RunCheckpoints(job, folder).require_room
  return workdir_files.owned(folder, job.config.processes, Watch(), room)


def test_a_line_of_a_run_that_is_replaced_while_it_writes_goes_into_a_file_that_is_gone(tmp_path):
  first, path = take(tmp_path), epath.Path(tmp_path / "lines")
  lines = LogFile(path, first.require)
  lines.append(b"one\n")

  def stopped_here():
    first.require()
    fresh = LogFile(path, take(tmp_path).require)
    fresh.replace([fresh.read()])
    fresh.append(b"two of the second run\n")

  lines._require = stopped_here
  lines.append(b"two of the first run\n")
  assert path.read_bytes() == b"one\ntwo of the second run\n"
  lines._require = first.require
  with pytest.raises(LostError):
    lines.append(b"three\n")
  with pytest.raises(LostError):
    files.replace(path, "anew\n", require=first.require)
  assert path.read_bytes() == b"one\ntwo of the second run\n"
  assert {child.name for child in tmp_path.iterdir()} == {"lines", "owner"}


def test_metrics_and_events_of_a_run_that_was_replaced_are_not_written(tmp_path):
  first, folder = take(tmp_path), epath.Path(tmp_path)
  stale = MetricsWriter(folder, step=0, tensorboard=True, owner=first)
  stale.write(1, {"loss": 1.0})
  second = take(tmp_path)
  assert second.replaced
  [events] = tmp_path.glob("events.*")
  before = events.stat().st_ino
  with MetricsWriter(folder, step=0, tensorboard=True, owner=second) as fresh:
    assert events.stat().st_ino != before  # what the first has in memory goes elsewhere
    fresh.write(1, {"loss": 2.0})
    for change in (
      lambda: stale.write(2, {"loss": 1.0}),
      lambda: stale.write_times(1, {"goodput": 1.0}),
      lambda: stale.roll_back(0, 1, {"rolled_back": 1}),
      lambda: stale._show(3, {"loss": 1.0}),
    ):
      with pytest.raises(LostError):
        change()
    fresh.write(2, {"loss": 2.0})
  stale.close()
  lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
  assert lines == [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 2.0}]
  assert {step for step, _ in scalars(tmp_path)} == {1, 2}


def test_what_is_refused_after_the_workdir_was_taken_leaves_it_as_it_was(tmp_path):
  job, workdir = make_job("single", "mlp"), tmp_path / "new" / "run"

  def refused():
    with owned(job, workdir) as owner:
      assert (workdir / "owner" / "000001.json").exists()
      assert owner.number == 1
      raise ValueError("another batch size")

  with pytest.raises(ValueError, match="another batch size"):
    refused()
  assert list(tmp_path.iterdir()) == []


def test_a_claim_is_withdrawn_where_another_process_dies_before_all_know_of_it(
  tmp_path, monkeypatch
):
  job, workdir = make_job("single", "mlp"), tmp_path / "run"

  def dies(self, point, **more):
    assert (workdir / "owner" / "000001.json").exists()
    raise RuntimeError("CANCELLED")

  monkeypatch.setattr(workdir_files.groups.Group, "wait", dies)
  with pytest.raises(RuntimeError, match="CANCELLED"), owned(job, workdir):
    raise AssertionError("it is not the owner yet")
  assert list(tmp_path.iterdir()) == []
