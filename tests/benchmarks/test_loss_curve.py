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
  svg = ElementTree.fromstring(loss_curve.draw(loss_curve.read(tmp_path), "a < b"))
  paths = [path.get("d") for path in svg.iter("{http://www.w3.org/2000/svg}path")]
  assert paths[-1].count("L") == 1
  assert len([*svg.iter("{http://www.w3.org/2000/svg}circle")]) == 1
  assert svg[0].text == "a < b"


def test_a_final_evaluation_of_the_whole_split_is_a_diamond():
  few = {"eval_examples": 10, "eval_share": 0.5, "eval_loss_stderr": 0.25}
  lines = [{"step": step, "loss": 3.0} for step in (1, 8)]
  lines += [{"step": step, "eval_loss": 2.0, **few} for step in (4, 6)]
  lines.append({"step": 8, "eval_loss": 2.5, "eval_examples": 20, "eval_share": 1.0})
  svg = ElementTree.fromstring(loss_curve.draw(lines, ""))
  assert len([*svg.iter("{http://www.w3.org/2000/svg}circle")]) == 2
  last = [*svg.iter("{http://www.w3.org/2000/svg}path")][-1]
  assert last.get("d").endswith("z")
  said = [one.text for one in svg.iter("{http://www.w3.org/2000/svg}text")]
  assert said[-2:] == [
    "evaluation loss ● (10 of 20 examples): 2.00 ± 0.25 after 6 steps",
    "evaluation loss ◆ (the whole split): 2.50 after 8 steps",
  ]


def test_a_run_without_losses_is_refused(tmp_path):
  (tmp_path / "metrics.jsonl").write_text('{"step": 0, "goodput": 0.0}\n')
  with pytest.raises(ValueError, match="no loss"):
    loss_curve.read(tmp_path)
