"""Several processes hold the rows that one would hold, and make the same of every remainder."""

import functools
import json
import math
import pathlib

import numpy as np
import pytest

from processes.coordination import Group
from tests.processes import rows

SCRIPT = pathlib.Path(__file__).parent / "rows.py"


@pytest.fixture(scope="module")
def alone():
  """Returns a function that gives a part of what one process with all devices finds."""
  return functools.cache(lambda name: json.loads(json.dumps(rows.part(name, Group()))))


def found(well, count: int, name: str) -> list:
  """Returns a part of what each of several processes finds."""
  ended = well(count, name, script=SCRIPT)
  return [json.loads(out.splitlines()[-1])[name] for out in ended]


@pytest.mark.parametrize("count", [2, 4])
def test_each_device_holds_the_rows_that_it_holds_in_one_process(alone, well, count):
  holding = found(well, count, "rows")
  for layout, batches in alone("rows").items():
    for batch, devices in batches.items():
      held = [one[layout][batch] for one in holding]
      assert [len(part) for part in held] == [8 / count] * count
      assert {p: rows for part in held for p, rows in part.items()} == devices, (layout, batch)


def test_what_one_process_holds_is_the_batch(alone):
  # Against numbers that no code of ours has placed: every row once, in the order of the batch.
  held = []
  for batch in ("batch 0", "batch 1"):
    devices = alone("rows")["data"][batch]
    held += [row for place in range(8) for row in devices[str(place)]]
  padding = [[0] * 8] * (32 - rows.ROWS)
  assert held[-len(padding) :] == padding
  numbers = [row[0] // 100 for row in held[: -len(padding)]]
  drawn = np.random.Philox(np.random.SeedSequence([0, 0])).random_raw(rows.ROWS)
  assert numbers == np.argsort(drawn).tolist()
  assert held[: rows.ROWS] == [[100 * row + column for column in range(8)] for row in numbers]


def test_two_processes_make_of_any_remainder_what_one_makes(alone, well):
  """Of some; `python -m tests.faults --row=7` tries all, with two and four processes."""
  one, other = found(well, 2, "some")
  assert one == other
  for beyond, result, expected in zip(rows.SOME, one, alone("some"), strict=True):
    count = 2 * rows.BATCH + beyond
    assert len(result["losses"]) == math.ceil(rows.EPOCHS * count / rows.BATCH)
    assert result["batches"] == (3 if beyond else 2)
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert result["eval_loss"] == pytest.approx(expected["eval_loss"], rel=0, abs=1e-6)
