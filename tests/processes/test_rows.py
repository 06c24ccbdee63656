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


@pytest.fixture(scope="module", params=[2, 4])
def holding(request, well):
  """Returns which rows each of several processes holds."""
  return found(well, request.param, "rows")


@pytest.fixture(scope="module")
def remaining(well):
  """Returns what each of two processes makes of data sets of every remainder."""
  return found(well, 2, "remainders")


@pytest.mark.parametrize("layout", rows.LAYOUTS)
def test_each_device_holds_the_rows_that_it_holds_in_one_process(alone, holding, layout):
  for batch, devices in alone("rows")[layout].items():
    held = [one[layout][batch] for one in holding]
    assert [len(part) for part in held] == [8 / len(holding)] * len(holding)
    assert {place: rows for part in held for place, rows in part.items()} == devices, batch


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


@pytest.mark.long
def test_all_take_the_same_steps_whatever_remains(remaining):
  for one in remaining:
    for remainder, result in enumerate(one):
      count = 2 * rows.BATCH + remainder
      assert len(result["losses"]) == math.ceil(rows.EPOCHS * count / rows.BATCH)
      assert result["batches"] == (3 if remainder else 2)


def test_losses_are_those_of_one_process_whatever_remains(alone, remaining):
  for one in remaining:
    for result, expected in zip(one, alone("remainders"), strict=True):
      assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)
      assert result["eval_loss"] == pytest.approx(expected["eval_loss"], rel=0, abs=1e-6)


def test_all_processes_see_the_same_numbers(remaining):
  assert len(remaining[0]) == rows.BATCH
  assert all(one == remaining[0] for one in remaining)
