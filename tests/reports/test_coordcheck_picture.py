"""The picture of `coordcheck`: where its lines are."""

import itertools
import math
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from reports import coordcheck_result
from tests.helpers.jobs import make_job
from training.coordinate_check import Point, slopes

WIDTHS = (20, 40, 80)
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def jobs():
  return [make_job("single", "mlp", **{"model.model_size": width}) for width in WIDTHS]


def drawn(jobs, *changes):
  """Returns the elements of the picture of changes [steps, widths], each an activation."""
  points = []
  for number, change in enumerate(changes):
    change = np.array(change, float)[:, :, None].repeat(2, axis=2)
    points.append(Point(f"point <{number}>", True, np.ones_like(change), change))
  return ElementTree.fromstring(coordcheck_result.svg(jobs, slopes(points, WIDTHS)))


def curves(tree):
  """Returns the points of each line that has a color of a step, in pixels."""
  paths = [path.get("d") for path in tree.iter(f"{SVG}path") if "L" in path.get("d")]
  return [[tuple(map(float, p.split())) for p in re.split("[ML]", d)[1:]] for d in paths]


ZERO, FLAT, RISING = [0, 0, 0], [1, 1, 1], [1, 10, 100]


def test_a_line_is_as_steep_as_the_change_grows(jobs):
  tree = drawn(jobs, [ZERO, FLAT, RISING])
  flat, rising = curves(tree)
  assert len({y for _, y in flat}) == 1
  steps = [a - b for (_, a), (_, b) in itertools.pairwise(rising)]
  assert steps[0] == pytest.approx(steps[1], abs=0.2)
  assert steps[0] == pytest.approx(coordcheck_result.PANEL[1] / 2, abs=0.2)  # of two decades
  xs = [x for x, _ in rising]
  assert xs == sorted(xs)
  assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)  # the widths double


def test_each_activation_is_named_with_its_slope(jobs):
  texts = [one.text for one in drawn(jobs, [ZERO, FLAT], [ZERO, RISING]).iter(f"{SVG}text")]
  assert [text for text in texts if text.startswith("point")] == ["point <0>", "point <1>"]
  assert [text for text in texts if text.startswith("slope")] == ["slope +0.00", "slope +3.32"]
  assert texts[0] == "without muP (model.base_width=0): changes of activations over the width"
  assert [text for text in texts if text in ("20", "40", "80")] == ["20", "40", "80"] * 2


def test_all_is_inside_the_card(jobs):
  tree = drawn(jobs, *[[ZERO, FLAT, RISING]] * 6)
  width, height = (float(tree.get(name)) for name in ("width", "height"))
  for line in curves(tree):
    assert all(0 < x < width and 0 < y < height for x, y in line)
  for text in tree.iter(f"{SVG}text"):
    assert 0 < float(text.get("x")) < width
    assert 0 < float(text.get("y")) < height
  assert len(curves(tree)) == 12


def test_numbers_that_are_not_finite_leave_a_gap(jobs):
  tree = drawn(jobs, [ZERO, [1, math.nan, 2], [math.inf] * 3])
  [line] = curves(tree)
  assert len(line) == 2
  assert "slope +inf" in [one.text for one in tree.iter(f"{SVG}text")]
