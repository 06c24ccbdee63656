"""The harness itself: what it tells, keeps and writes, and that it finds what differs."""

import dataclasses
import json
import os
import pathlib

import numpy as np
import pytest
import tensorstore as ts

from tests.docs.pages import section
from tests.faults import __main__ as command
from tests.faults import plan, report, rows_kills, same
from tests.faults.opening import Opening
from tests.faults.plan import ROWS, Row, Trial
from tests.faults.trying import Attempt, Pace, Undisturbed, tried

# ------------------------------ the plan ------------------------------


def test_the_rows_of_the_plan_are_in_order_and_each_is_tried():
  numbers = [row.number for row in ROWS]
  assert numbers == sorted({*numbers})
  assert {*range(1, 21)} <= {*numbers}
  assert all(callable(row.function()) for row in ROWS)


def test_a_row_that_would_take_longer_than_an_hour_runs_with_fewer_trials():
  row = dataclasses.replace(ROWS[0], trials=70, usual=None)
  assert row.default(seconds=10) == 70
  assert row.default(seconds=100) == 36
  assert row.default(seconds=10_000) == 1
  assert dataclasses.replace(row, trials=10, usual=19).default(seconds=10) == 19


# ------------------------------ a row ------------------------------


def even_ones_pass(attempt: Attempt) -> None:
  """Fails where the number is odd."""
  attempt.does = f"{attempt.chance.random()}"
  attempt.seen.append("seen on the way")
  (attempt.folder / "run.out").write_text(f"printed by trial {attempt.number}\n")
  if attempt.number == 3:
    raise OSError("gone")
  assert attempt.number % 2 == 0, "it is odd"


def row_4(trials: int, folder: pathlib.Path, seed: int = 0):
  """A row as the plan's, of which every other trial fails."""
  before = folder / "undisturbed.out"
  before.parent.mkdir(parents=True, exist_ok=True)
  before.write_text("printed long before\n")
  os.utime(before, (1, 1))
  return tried(4, range(seed, seed + trials), folder, even_ones_pass)


def row_5(trials: int, folder: pathlib.Path) -> list[Trial]:
  """A row that gives its trials at the end, and whose trials have no numbers."""
  return [Trial(f"one of {trials}", True, "", 0.5)]


def row_6(trials: int, folder: pathlib.Path) -> list[Trial]:
  """A row that cannot even begin, or that does nothing where one trial is asked for."""
  if trials == 1:
    return []
  raise RuntimeError("no disk")


def test_trials_are_distinguished_and_can_be_repeated(tmp_path):
  trials = list(row_4(4, tmp_path / "a"))
  assert [trial.passed for trial in trials] == [True, False, True, False]
  assert len({trial.name for trial in trials}) == 4
  [again] = row_4(1, tmp_path / "b", seed=2)
  assert again.name == trials[2].name


def test_a_trial_that_fails_says_where_and_keeps_its_folder(tmp_path):
  _, odd, _, gone = row_4(4, tmp_path)
  assert 'assert attempt.number % 2 == 0, "it is odd" | it is odd; seen on the way' in odd.note
  assert "OSError: gone" in gone.note
  assert sorted(path.name for path in tmp_path.glob("trial-*")) == ["trial-1", "trial-3"]


# ------------------------------ moments ------------------------------


class Ended:
  """A run that has ended: by these codes, and as a look sees it before its signal is sent."""

  def __init__(self, codes: list[int], *, looks_alive: bool, printed: str = ""):
    self.codes, self._looks_alive, self._printed = codes, looks_alive, printed

  def __enter__(self):
    return self

  def __exit__(self, *exception) -> None:
    pass

  def __getattr__(self, name: str):
    return lambda *arguments, **options: None

  def sleep(self, seconds: float) -> bool:
    return self._looks_alive

  def said(self, text: str) -> bool:
    return False

  def text(self) -> str:
    return self._printed

  def signal(self, index: int, number: int) -> None:
    raise ProcessLookupError(3, "No such process")


@pytest.fixture
def one_killed(monkeypatch, tmp_path):
  """Returns a function that kills a process of an `Ended`, and the paces that moments come from."""
  clean = Undisturbed(tmp_path)
  clean._paces[2] = Pace(same.Record([], {}), first_step=100.0, end=200.0)

  def kill(**of_run) -> bool:
    monkeypatch.setattr(rows_kills, "Run", lambda *arguments, **options: Ended(**of_run))
    attempt = Attempt(1, 0, tmp_path / "trial")
    return rows_kills._one_killed(attempt, clean, attempt.workdir, 2, 1, late=True)

  return kill, clean


def test_a_process_that_ends_just_before_its_signal_is_no_failure(one_killed):
  kill, clean = one_killed
  assert not kill(codes=[0], looks_alive=True)
  assert clean.of(2).end == 200


def test_moments_follow_runs_that_end_sooner(one_killed):
  kill, clean = one_killed
  assert not kill(codes=[0], looks_alive=False)
  assert clean.of(2).end < 1
  assert clean.of(2).first_step == pytest.approx(clean.of(2).end / 2)
  clean.ended(2, 300.0, [0, 0])
  assert clean.of(2).end < 1, "never later"


@pytest.mark.parametrize("looks_alive", [True, False])
def test_a_run_that_fails_by_itself_is_no_run_that_has_ended_too_soon(one_killed, looks_alive):
  kill, clean = one_killed
  with pytest.raises(AssertionError, match=r"\[1\]"):
    kill(codes=[1], looks_alive=looks_alive)
  assert clean.of(2).end == 200


def test_nor_is_one_that_was_started_again(one_killed):
  kill, _ = one_killed
  with pytest.raises(AssertionError, match="failed by itself"):
    kill(codes=[0], looks_alive=False, printed="launch: restart 1 of 2\n")


# ------------------------------ the command ------------------------------


@pytest.fixture
def rows(monkeypatch):
  """Makes the plan one of the rows above; returns their numbers."""
  functions = {4: row_4, 5: row_5, 6: row_6}
  of_plan = [dataclasses.replace(ROWS[number - 1], trials=2, usual=None) for number in functions]
  monkeypatch.setattr(command, "ROWS", of_plan)
  monkeypatch.setattr(report, "ROWS", of_plan)
  monkeypatch.setattr(Row, "function", lambda row: functions[row.number])
  return list(functions)


@pytest.fixture
def files(monkeypatch, tmp_path):
  """Lets results be written elsewhere; returns the JSON file and the page."""
  monkeypatch.setattr(report, "RESULTS", tmp_path / "results.json")
  monkeypatch.setattr(report, "PAGE", tmp_path / "page.md")
  report.PAGE.write_text("# A page\n\n## Faults that were tried on real runs\n")
  return report.RESULTS, report.PAGE


def run(tmp_path, *arguments: str) -> int:
  return command.main([f"--folder={tmp_path / 'runs'}", *arguments])


def test_the_exit_code_shows_whether_all_passed(rows, files, tmp_path, capsys):
  assert run(tmp_path, "--row=5") == 0
  assert run(tmp_path, "--row=4", "--trials=1") == 0
  assert run(tmp_path, "--row=4", "--trials=2") == 1
  said = capsys.readouterr().out
  assert "printed by trial 1" in said
  assert "printed long before" not in said
  assert (tmp_path / "runs" / "row-4" / "trial-1").is_dir()
  assert not files[0].exists(), "nothing is written without --write"


def test_a_row_that_cannot_begin_or_does_nothing_has_failed(rows, files, tmp_path, capsys):
  assert run(tmp_path, "--row=6") == 1
  assert "RuntimeError: no disk" in capsys.readouterr().out
  assert run(tmp_path / "again", "--row=6", "--trials=1") == 1
  assert "the row has made no trial" in capsys.readouterr().out


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--row=99"], "invalid choice: 99"),
    (["--trials=0"], "--trials=0: at least 1"),
    (["--row=5", "--seed=3"], "--seed=3: the trials of row 5 have no number to begin with"),
    (["--rows=5"], "unrecognized arguments"),
  ],
)
def test_bad_usage_is_refused(rows, tmp_path, capsys, arguments, message):
  with pytest.raises(SystemExit, match="2"):
    run(tmp_path, *arguments)
  assert message in capsys.readouterr().err


# ------------------------------ the report ------------------------------


def test_results_of_rows_that_were_run_before_stay(rows, files, tmp_path):
  run(tmp_path, "--row=5", "--trials=3", "--write")
  page = files[1].read_text()
  assert "| 2 | not run |" in page
  run(tmp_path, "--row=4", "--seed=1", "--trials=2", "--write")
  results, page = json.loads(files[0].read_text()), files[1].read_text()
  assert set(results) == {"4", "5"}
  assert (results["4"]["done"], results["4"]["passed"], results["4"]["seed"]) == (2, 1, 1)
  lines = {line.split(" | ")[0]: line for line in page.splitlines() if line.startswith("| ")}
  assert "| 2 | 2 | **1** |" in lines["| 4"]
  assert "| 2 | 1 | 1 | 0.0 |" in lines["| 5"]
  assert "| 2 | not run |" in lines["| 6"]
  assert "\n### What failed\n\n- Row 4, seed 1: " in page
  assert report.machine() in page


def test_the_page_is_what_the_results_say():
  heading = report.INTRODUCTION.partition("\n")[0]
  assert section(report.PAGE.read_text(), heading) == report.page(report.read())


def test_what_a_row_took_is_what_it_will_take():
  row = ROWS[0]
  known = report.result([Trial("", True, "", 10.0), Trial("", True, "", 20.0)], 0)
  assert report.seconds_each(row, {}) == row.seconds
  assert report.seconds_each(row, {1: known}) == 15.0


# ------------------------------ what is the same ------------------------------


def checkpoint(folder: pathlib.Path, **arrays: np.ndarray) -> pathlib.Path:
  """Writes arrays as a checkpoint has them."""
  state = {"driver": "ocdbt", "base": f"file://{folder / 'state'}"}
  for name, array in arrays.items():
    spec = {"driver": "zarr", "kvstore": state, "path": name}
    spec["metadata"] = {"shape": list(array.shape), "dtype": array.dtype.str}
    ts.open(spec, create=True).result().write(array).result()
  return folder


def test_digests_tell_a_bit_a_shape_and_a_dtype(tmp_path):
  array = np.arange(6, dtype=np.float32)
  bit = array.copy()
  bit.view(np.uint32)[4] ^= 1
  variants = [array, bit, array.reshape(2, 3), array.view(np.int32)]
  found = [
    same.digests(checkpoint(tmp_path / str(index), weights=variant))["weights"]
    for index, variant in enumerate(variants)
  ]
  assert len(set(found)) == len(variants)
  assert same.digests(checkpoint(tmp_path / "again", weights=array)) == {"weights": found[0]}


def test_differences_are_found():
  lines = [(1, "loss 3"), (2, "loss 2")]
  whole = same.Record(lines, {10: {"params.w": "a", "step": "b"}})
  assert same.difference(whole, whole) == ""
  more = same.Record(lines, {**whole.arrays, 12: {"params.w": "c"}})
  assert same.difference(more, whole) == "", "a stop saves more"
  found = {
    "(2, 'loss 9') instead of": same.Record([lines[0], (2, "loss 9")], whole.arrays),
    "1 lines instead of 2": same.Record(lines[:1], whole.arrays),
    "3 lines instead of 2": same.Record([*lines, (2, "loss 2")], whole.arrays),
    "no checkpoint of step 10": same.Record(lines, {}),
    "step 10: params.w has other bits": same.Record(lines, {10: {"params.w": "x", "step": "b"}}),
    "step 10: step has other bits": same.Record(lines, {10: {"params.w": "a"}}),
  }
  for text, record in found.items():
    assert text in same.difference(record, whole)


def test_opening_a_file_is_noticed(tmp_path):
  (tmp_path / "inner").mkdir()
  file = tmp_path / "inner" / "file"
  file.write_text("text")
  with Opening([tmp_path]) as opening:
    assert not opening.seen()
    file.read_text()
    assert opening.seen()
    assert not opening.seen()


def test_seconds_of_the_plan_are_positive():
  assert all(row.seconds > 0 and row.trials > 0 for row in plan.ROWS)
