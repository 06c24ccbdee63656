"""The curve of a run: what is read, the axes, and that the SVG holds the points."""

import json
import xml.etree.ElementTree as ElementTree

import pytest

from benchmarks import charts, loss_curve


def test_axes_begin_and_end_at_round_numbers():
  assert charts.ticks(0, 200) == [0, 50, 100, 150, 200]
  assert charts.ticks(1.59, 6.2) == [1, 2, 3, 4, 5, 6, 7]
  assert charts.ticks(2, 2) == [2, 3]


def test_a_curve_holds_every_finite_loss(tmp_path):
  lines = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": "nan"}, {"step": 3, "loss": 1.0}]
  lines += [{"step": 0, "goodput": 0.0}, {"step": 3, "eval_loss": 2.0}]
  (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
  losses = loss_curve.read(tmp_path)
  assert losses == {"loss": [(1, 3.0), (3, 1.0)], "eval_loss": [(3, 2.0)]}
  svg = ElementTree.fromstring(loss_curve.draw(losses, "a < b"))
  paths = [path.get("d") for path in svg.iter("{http://www.w3.org/2000/svg}path")]
  assert paths[-1].count("L") == 1
  assert len([*svg.iter("{http://www.w3.org/2000/svg}circle")]) == 1
  assert svg[0].text == "a < b"


def test_a_run_without_losses_is_refused(tmp_path):
  (tmp_path / "metrics.jsonl").write_text('{"step": 0, "goodput": 0.0}\n')
  with pytest.raises(ValueError, match="no loss"):
    loss_curve.read(tmp_path)
