"""The curve of a run: what is read, and what the SVG says."""

import json
import xml.etree.ElementTree as ElementTree

import pytest

from benchmarks import loss_curve

SPACE = "{http://www.w3.org/2000/svg}"


def texts(svg):
  return [one.text for one in ElementTree.fromstring(svg).iter(f"{SPACE}text")]


def test_a_curve_holds_every_finite_loss(tmp_path):
  lines = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": "nan"}, {"step": 3, "loss": 1.0}]
  lines += [{"step": 0, "goodput": 0.0}, {"step": 3, "eval_loss": 2.0}]
  (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
  drawn = loss_curve.draw(loss_curve.read(tmp_path), "a < b")
  assert drawn == loss_curve.draw(loss_curve.read(tmp_path), "a < b")
  assert "a < b" in texts(drawn)
  assert "training loss: 1.00 after 3 steps" in texts(drawn)


def test_a_final_evaluation_of_the_whole_split_is_apart():
  few = {"eval_examples": 10, "eval_share": 0.5, "eval_loss_stderr": 0.25}
  lines = [{"step": step, "loss": 3.0} for step in (1, 8)]
  lines += [{"step": step, "eval_loss": 2.0, **few} for step in (4, 6)]
  lines.append({"step": 8, "eval_loss": 2.5, "eval_examples": 20, "eval_share": 1.0})
  assert texts(loss_curve.draw(lines, ""))[-2:] == [
    "evaluation loss (10 of 20 examples): 2.00 ± 0.25 after 6 steps",
    "evaluation loss (the whole split): 2.50 after 8 steps",
  ]


def test_a_run_without_losses_is_refused(tmp_path):
  (tmp_path / "metrics.jsonl").write_text('{"step": 0, "goodput": 0.0}\n')
  with pytest.raises(ValueError, match="no loss"):
    loss_curve.read(tmp_path)
