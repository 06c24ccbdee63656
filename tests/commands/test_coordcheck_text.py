"""The result of `coordcheck` as text."""

import numpy as np
import pytest

from commands import coordcheck
from tests.helpers.jobs import make_job
from training.coordinate_check import Point, slopes

WIDTHS = (20, 40)


@pytest.fixture(scope="module")
def jobs():
  keys = {"model.heads": 4, "model.kv_heads": 2, "model.head_size": 6, "model.base_width": 10}
  return [make_job("single", "lm", **{"model.model_size": w, **keys}) for w in WIDTHS]


def found(*factors):
  """Returns slopes of activations whose change grows by a factor from one width to the next."""
  points = []
  for number, factor in enumerate(factors):
    sizes = np.full((4, 2, 3), 0.25)  # three steps, two widths, three seeds
    changes = np.array([1.0, factor])[None, :, None] * np.full((4, 1, 3), 0.5)
    points.append(Point(f"point {number}", number < len(factors) - 1, sizes, changes))
  return slopes(points, WIDTHS)


def test_the_widths_and_what_was_trained_stand_first(jobs):
  lines = coordcheck.text(jobs, found(1, 1)).splitlines()
  assert lines[1] == ("muP, base width 10; 3 steps of adamw at 0.008 from 3 initializations")
  assert lines[2:4] == [
    "width 20: feed-forward 56, 4 heads of 6",
    "width 40: feed-forward 56, 4 heads of 6",
  ]
  for title in ("size at initialization", "change after 3 steps"):
    [header] = [line.split() for line in lines if line.strip().startswith(title)]
    assert header[-3:] == ["20", "40", "slope"]


def test_all_flat(jobs):
  text = coordcheck.text(jobs, found(1.1, 1, 0.5))
  assert text.splitlines()[-1] == (
    "flat: 3 activations, no slope beyond 0.3; the largest is +0.14 (point 0, change after 3 steps)"
  )
  rows = [line.split() for line in text.splitlines() if line.strip().startswith("point 0")]
  assert [row[2:] for row in rows] == [["0.25", "0.25", "+0.00"], ["0.5", "0.55", "+0.14"]]
  assert "not flat" not in text


def test_what_is_not_flat_is_marked_and_named(jobs):
  text = coordcheck.text(jobs, found(2, 0.5, 4))
  marked = [line.split()[:2] for line in text.splitlines() if line.endswith("  not flat")]
  assert marked == [["point", "0"], ["point", "1"], ["point", "2"]]
  assert text.endswith(
    "not flat: 3 of 6 slopes are beyond 0.3, so a learning rate of one width is not that of "
    "another:\n"
    "  point 0, change after 3 steps: as width ** 1.00\n"
    "  point 1, change after 3 steps: as width ** -1.00\n"
    "  point 2, change after 3 steps: as width ** 2.00"
  )


def test_without_mup(jobs):
  with jobs[0].config.unlocked():
    jobs[0].config.model.base_width = 0
  found = coordcheck.parametrization(jobs[0].config.model)
  assert found == "without muP (model.base_width=0)"
