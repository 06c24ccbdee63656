"""What a search has found, in order, with its Pareto front, hours and cost."""

import dataclasses

import pytest

from planning.search_results import COMPILER, Estimate, Found, Tried

FIVE = [
  Estimate({}, mesh={"fsdp": 8}, bytes=50, seconds=2.0, tokens=100),
  Estimate({"a": 1}, mesh={"data": 8}, bytes=90, seconds=1.0, tokens=100),
  Estimate({"b": 1}, mesh={"tensor": 8}, bytes=60, seconds=3.0, tokens=100),
  Estimate({"c": 1}, mesh={"data": 8}, bytes=101, seconds=0.5, tokens=100),
  Estimate({"d": 1}, mesh={"data": 8}, bytes=40, seconds=4.0, tokens=100),
]


def found(**more) -> Found:
  values = {
    **{"topology": "h100:8", "note": "", "chip": "h100", "chips": 8, "devices": 8, "limit": 100},
    **{"compiled": False, "budget": 7200.0, "unit": "tokens", "given": "{}", "refused": {}},
  }
  return Found(**{**values, "estimates": FIVE, **more})


def test_by_formula_the_fastest_come_first():
  rows = found().rows
  assert [row.seconds for row in rows] == [1.0, 2.0, 3.0, 4.0]
  assert [row.front for row in rows] == [True, True, False, True]
  assert [row.given for row in rows] == [False, True, False, False]
  assert found().best.estimate is FIVE[1]


def test_the_config_as_given_is_listed_where_it_does_not_fit():
  rows = found(given='{"c": 1}').rows
  assert [(row.seconds, row.given) for row in rows][-1] == (None, True)


def test_what_was_compiled_replaces_the_formulas():
  tried = [Tried(FIVE[0], 55, 1.5), Tried(FIVE[1], 120, None), Tried(FIVE[4], 0, None, "why")]
  one = found(tried=tried, source=COMPILER)
  assert [row.bytes for row in one.rows] == [55, 0, 120]
  assert one.best.seconds == 1.5
  assert one.as_given is not None
  assert not found(tried=tried[1:], source=COMPILER).fits


def test_hours_and_cost():
  """7,200 tokens at 100 a second take 72 seconds, of 8 chips."""
  one = found(price=5.0)
  assert one.rate(one.best) == pytest.approx(100 / 8)
  assert one.hours(one.best) == pytest.approx(0.02)
  assert one.cost(one.best) == pytest.approx(0.02 * 8 * 5)
  assert found().cost(one.best) is None


def test_json():
  one = dataclasses.replace(found(), refused={"why": 3}, nearest=[({"mesh.fsdp": 8}, "h100:16", 9)])
  values = one.as_json()
  assert values["fits"]
  assert values["refused"] == 3
  assert [row["pareto"] for row in values["settings"]] == [True, True, False, True]
  assert values["settings"][0]["overrides"] == "--config.a=1"
  assert [row["fits"] for row in values["by_formula"]] == [True, True, True, False, True]
  assert values["nearest"] == [
    {
      "overrides": "--config.mesh.fsdp=8",
      "topology": "h100:16",
      "peak_bytes_per_device": 9,
    }
  ]
