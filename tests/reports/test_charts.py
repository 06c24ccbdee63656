"""Charts: their lines are the numbers, no spike is lost, and nothing in them is from outside."""

import json
import re

import numpy as np
import pytest

from reports import charts
from reports.charts import Chart, Line, Mark


def path(svg, gid):
  """Returns the points of a line, in the drawing's coordinates."""
  group = svg[svg.index(f'<g id="{gid}">') :]
  found = re.search(r'<path d="([^"]*)"', group)[1]
  return np.array(re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", found), float)


@pytest.mark.parametrize("logarithmic", [False, True])
def test_the_script_is_told_the_points_and_where_their_axes_are(logarithmic):
  """What charts.js computes from its data and the attributes is what matplotlib has drawn."""
  points = [(1, 4.0), (2, 0.01), (5, 3.0), (9, 2.5)]
  lines = [Line("<a>", points, 2, dotted=True), Line("b", [(9, 1.0)], 10, joined=False)]
  chart = Chart("loss", lines, [Mark("bad", 5, "b")], logarithmic=logarithmic)
  text = str(charts.data(chart))
  assert "<" not in text
  data = json.loads(text)
  assert data["marks"] == [[5, "b"]]
  assert [(one["label"], one["color"], one["joined"]) for one in data["lines"]] == [
    ("<a>", 2, True),
    ("b", 2, False),
  ]
  svg = charts.svg(chart, name="n")
  where = {key: re.search(rf'data-{key}="([^"]*)"', svg)[1] for key in ("box", "range", "log")}
  left, top, width, height = map(float, where["box"].split())
  x0, x1, y0, y1 = map(float, where["range"].split())
  assert where["log"] == str(int(logarithmic))
  of = np.log if logarithmic else np.asarray
  x, y = np.array(data["lines"][0]["points"]).T
  places = left + (x - x0) / (x1 - x0) * width, top + (of(y1) - of(y)) / (of(y1) - of(y0)) * height
  np.testing.assert_allclose(path(svg, "n-line0"), np.transpose(places), atol=2e-3)


def test_thinning_keeps_ends_and_extremes():
  rng = np.random.default_rng(0)
  values = rng.normal(size=100_000)
  values[[12_345, 67_890]] = 50, -50
  kept = charts.thinned([*enumerate(values)])
  assert len(kept) <= charts.POINTS
  assert [x for x, _ in kept] == sorted({x for x, _ in kept})
  assert kept[0] == (0, values[0])
  assert kept[-1] == (99_999, values[-1])
  assert {(12_345, 50), (67_890, -50)} <= {*kept}
  assert charts.thinned(kept) is kept


def test_titles_are_escaped_and_ids_are_of_the_chart():
  marks = [Mark("restart", 2, "<start>"), Mark("checkpoint", 1, "c"), Mark("bad", 1, "b")]
  chart = Chart('"x" & y', [Line("a<b", [(1, 1.0), (2, 2.0)], dotted=True)], marks)
  svg = charts.svg(chart, name="one")
  assert 'aria-label="&#34;x&#34; &amp; y"' in svg
  for title in ("a&lt;b", "&lt;start&gt;", "c", "b"):
    assert svg.count(f"<title>{title}</title>") == 1
  ids = re.findall(r'\bid="([^"]*)"', svg)
  assert all(one.startswith("one-") for one in ids)
  assert {*re.findall(r"(?<!&)#([\w-]+)", svg)} <= {*ids}  # and no color but the page's
  assert "http" not in svg
  assert "<style" not in svg


@pytest.mark.parametrize(
  ("points", "settings", "labels"),
  [
    ([(1, 1e-5), (2, 1e-3), (3, 1e-1)], {"logarithmic": True}, {"0.001", "0.1"}),
    ([(1, 0.4), (2, 0.5)], {"percent": True, "from_zero": True}, {"0 %", "40 %"}),
    ([(1, 0.0), (2, 1e-6)], {"percent": True, "from_zero": True}, {"0 %", "1 %"}),
    ([(10, 0.0)], {"from_zero": True}, {"0"}),
    ([(5, 20_000.0), (6, 40_000.0)], {}, {"20k", "40k"}),
    ([(1, 0.001), (200, 0.001)], {}, {"0.00095", "0.001", "0.00105"}),  # which fit the margin
    ([(1_000_000, 1.0), (3_000_000, 2.0)], {}, {"1M", "2M", "3M"}),
  ],
)
def test_axes_have_readable_numbers(points, settings, labels):
  svg = charts.svg(Chart("x", [Line("a", points)], **settings), name="n")
  assert labels <= {*re.findall(r">([^<>]+)</text>", svg)}
