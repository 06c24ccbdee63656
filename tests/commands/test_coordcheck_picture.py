"""The picture of `coordcheck`: how steep its lines are, and what it says."""

import itertools
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from commands import coordcheck
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
  return ElementTree.fromstring(coordcheck.svg(jobs, slopes(points, WIDTHS)))


def lines(tree):
  """Returns the points of each line of a step, in pixels."""
  paths = [one.get("d", "") for one in tree.iter(f"{SVG}path") if "1.8" in one.get("style", "")]
  return [[tuple(map(float, p.split())) for p in re.split("[ML]", d)[1:]] for d in paths]


def texts(tree):
  return [one.text.strip() for one in tree.iter(f"{SVG}text")]


ZERO, FLAT, RISING = [0, 0, 0], [1, 1, 1], [1, 10, 100]


def test_a_line_is_as_steep_as_the_change_grows(jobs):
  flat, rising = lines(drawn(jobs, [ZERO, FLAT, RISING]))
  assert len({y for _, y in flat}) == 1
  steps = [a - b for (_, a), (_, b) in itertools.pairwise(rising)]
  assert steps[0] == pytest.approx(steps[1], abs=0.2)
  assert steps[0] > 0
  xs = [x for x, _ in rising]
  assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)  # the widths double


def test_each_activation_is_named_with_its_slope(jobs):
  found = texts(drawn(jobs, [ZERO, FLAT], [ZERO, RISING]))
  assert [text for text in found if text.startswith("point")] == ["point <0>", "point <1>"]
  assert [text for text in found if text.startswith("slope")] == ["slope +0.00", "slope +3.32"]
  assert "without muP (model.base_width=0): changes of activations over the width" in found
  assert [text for text in found if text in ("20", "40", "80")] == ["20", "40", "80"] * 2
