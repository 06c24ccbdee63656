"""The frame itself: what it tells, keeps and writes, and that it finds what differs."""

import dataclasses
import functools
import json
import os

import numpy as np
import pytest
import tensorstore as ts

from tests.docs.pages import section
from tests.faults import __main__ as command
from tests.faults import frame, report, rows_kills, same
from tests.faults.frame import Attempt, Pace, Trial, tried
from tests.faults.opening import Opening

ROWS = frame.rows()

# ------------------------------ a row ------------------------------


def test_the_rows_of_the_plan_are_in_order_and_a_long_one_has_fewer_trials():
  assert [row.number for row in ROWS] == [*range(1, 41)]
  assert all(row.seconds > 0 and row.trials > 0 for row in ROWS)
  row = dataclasses.replace(ROWS[0], trials=70, usual=None)
  assert [row.default(seconds) for seconds in (10, 100, 10_000)] == [70, 36, 1]
  assert dataclasses.replace(row, trials=10, usual=19).default(seconds=10) == 19
  known = report.result([Trial("", True, "", 10.0), Trial("", True, "", 20.0)], 0)
  assert report.seconds_each(row, {}) == row.seconds
  assert report.seconds_each(row, {1: known}) == 15.0


def even_ones_pass(attempt: Attempt) -> None:
  """Fails where the number is odd."""
  attempt.does = f"{attempt.chance.random()}"
  attempt.seen.append("seen on the way")
  before = attempt.once(printed_long_before)
  (attempt.folder / "run.out").write_text(f"printed by trial {attempt.number}\n")
  assert attempt.once(printed_long_before) is before
  if attempt.number == 3:
    raise OSError("gone")
  assert attempt.number % 2 == 0, "it is odd"


def printed_long_before(folder) -> list:
  """Makes what the trials share."""
  before = folder / "undisturbed.out"
  before.write_text("printed long before\n")
  os.utime(before, (1, 1))
  return []


def at_the_end(trials: int, folder) -> list[Trial]:
  """A row that gives its trials at the end, and whose trials have no numbers."""
  return [Trial(f"one of {trials}", True, "", 0.5)]


def cannot_begin(trials: int, folder) -> list[Trial]:
  """A row that cannot even begin, or that does nothing where one trial is asked for."""
  if trials == 1:
    return []
  raise RuntimeError("no disk")


def test_trials_are_distinguished_and_one_that_fails_says_where_and_keeps_its_folder(tmp_path):
  trials = [*tried(even_ones_pass, 4, 4, tmp_path / "a")]
  _, odd, _, gone = trials
  assert [trial.passed for trial in trials] == [True, False, True, False]
  assert len({trial.name for trial in trials}) == 4
  [again] = tried(even_ones_pass, 4, 1, tmp_path / "b", seed=2)
  assert again.name == trials[2].name
  assert 'assert attempt.number % 2 == 0, "it is odd" | it is odd; seen on the way' in odd.note
  assert "OSError: gone" in gone.note
  assert sorted(path.name for path in tmp_path.glob("a/trial-*")) == ["trial-1", "trial-3"]


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
  """Returns a function that kills a process of an `Ended`, and the pace that moments come from."""
  clean = Pace(tmp_path, same.Record([], {}), first_step=100.0, end=200.0)

  def kill(**of_run) -> bool:
    monkeypatch.setattr(rows_kills, "Run", lambda *arguments, **options: Ended(**of_run))
    attempt = Attempt(1, 0, tmp_path / "trial")
    return rows_kills.kill_one(attempt, clean, attempt.workdir, 2, 1, late=True)

  return kill, clean


def test_a_process_that_ends_just_before_its_signal_is_no_failure(one_killed):
  kill, clean = one_killed
  assert not kill(codes=[0], looks_alive=True)
  assert clean.end == 200


def test_moments_follow_runs_that_end_sooner(one_killed):
  kill, clean = one_killed
  assert not kill(codes=[0], looks_alive=False)
  assert clean.end < 1
  assert clean.first_step == pytest.approx(clean.end / 2)
  clean.saw_end(300.0, [0, 0])
  assert clean.end < 1, "never later"


@pytest.mark.parametrize(
  ("run", "message"),
  [
    ({"codes": [1], "looks_alive": True}, r"\[1\]"),
    ({"codes": [1], "looks_alive": False}, r"\[1\]"),
    ({"codes": [0], "looks_alive": False, "printed": "launch: restart 1 of 2\n"}, "by itself"),
  ],
)
def test_a_run_that_fails_by_itself_is_no_run_that_has_ended_too_soon(one_killed, run, message):
  kill, clean = one_killed
  with pytest.raises(AssertionError, match=message):
    kill(**run)
  assert clean.end == 200


# ------------------------------ the command, and the report ------------------------------


@pytest.fixture
def run(monkeypatch, tmp_path):
  """Returns the command, for a plan of the three rows above and other files to write to."""
  made = {4: functools.partial(tried, even_ones_pass, 4), 5: at_the_end, 6: cannot_begin}
  rows = [dataclasses.replace(ROWS[n - 1], trials=2, usual=None, make=made[n]) for n in made]
  monkeypatch.setattr(frame, "rows", lambda: rows)
  monkeypatch.setattr(report, "rows", lambda: rows)
  monkeypatch.setattr(report, "RESULTS", tmp_path / "results.json")
  monkeypatch.setattr(report, "PAGE", tmp_path / "page.md")
  report.PAGE.write_text("# A page\n\n## Faults that were tried on real runs\n")
  runs = iter(range(99))
  return lambda *arguments: command.main([f"--folder={tmp_path / str(next(runs))}", *arguments])


def test_the_exit_code_shows_whether_all_passed(run, tmp_path, capsys):
  assert run("--row=5") == 0
  assert run("--row=4", "--trials=1") == 0
  assert run("--row=4", "--trials=2") == 1
  said = capsys.readouterr().out
  assert "printed by trial 1" in said
  assert "printed long before" not in said
  assert (tmp_path / "2" / "row-4" / "trial-1").is_dir()
  assert not report.RESULTS.exists(), "nothing is written without --write"
  assert run("--row=6") == 1
  assert "RuntimeError: no disk" in capsys.readouterr().out
  assert run("--row=6", "--trials=1") == 1
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
def test_bad_usage_is_refused(run, capsys, arguments, message):
  with pytest.raises(SystemExit, match="2"):
    run(*arguments)
  assert message in capsys.readouterr().err


def test_results_of_rows_that_were_run_before_stay(run):
  run("--row=5", "--trials=3", "--write")
  assert "| 2 | not run |" in report.PAGE.read_text()
  run("--row=4", "--seed=1", "--trials=2", "--write")
  results, page = json.loads(report.RESULTS.read_text()), report.PAGE.read_text()
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


# ------------------------------ what is the same ------------------------------


def test_digests_tell_a_bit_a_shape_and_a_dtype(tmp_path):
  array = np.arange(6, dtype=np.float32)
  bit = array.copy()
  bit.view(np.uint32)[4] ^= 1
  found = []
  for index, one in enumerate([array, bit, array.reshape(2, 3), array.view(np.int32), array]):
    state = {"driver": "ocdbt", "base": f"file://{tmp_path / str(index) / 'state'}"}
    spec = {"driver": "zarr", "kvstore": state, "path": "weights"}
    spec["metadata"] = {"shape": list(one.shape), "dtype": one.dtype.str}
    ts.open(spec, create=True).result().write(one).result()
    found.append(same.digests(tmp_path / str(index))["weights"])
  assert len({*found}) == 4
  assert found[4] == found[0]


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
