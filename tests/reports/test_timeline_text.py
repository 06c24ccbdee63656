"""The timeline of a layer as text, beside what is known of the layer that is drawn."""

import dataclasses

import pytest

from planning.timeline import Bar, Gap, Layer, Timeline
from reports import plan_report
from reports.plan_report import TIMELINE_LABEL, TIMELINE_WIDTH

# A layer of WIDTH ms, so that a cell is a millisecond.
MS = 1e-3
LAYER = Layer(
  "forward",
  "models/transformer.py:291, Transformer.blocks",
  1,
  0,
  32,
  TIMELINE_WIDTH * MS,
  (
    Bar(0, 10 * MS, "matmul"),
    Bar(10 * MS, 14 * MS, "HBM"),
    Bar(24 * MS, 44 * MS, "loop"),
    Bar(44.4 * MS, TIMELINE_WIDTH * MS, "matmul"),
  ),
  {
    "fsdp over ICI": (Bar(5 * MS, 24 * MS, "all-gather"), Bar(30 * MS, 30.2 * MS, "all-gather")),
    "from host": (Bar(44 * MS, 44.4 * MS, "copy"),),
  },
  (Bar(14 * MS, 24 * MS, "all-gather"), Bar(44 * MS, 44.4 * MS, "copy")),
  {"MLP": 40 * MS, "Attention": 20 * MS, "rms_norm": 0.5 * MS},
)
LINE = "models/layers.py:334, MLP.__call__, through partitioning/parallel/matmuls.py:122, product"
GAP = Gap(0.32, 32, "all-gather over fsdp of bf16[4096,14336]", LINE, "in the forward pass")


def rows(timeline):
  """Returns the lines by what stands before the drawing, and all of them."""
  lines = [*plan_report.lines(timeline)]
  return {line[:TIMELINE_LABEL].strip(): line[TIMELINE_LABEL:] for line in lines}, lines


def test_each_row_is_drawn_where_it_is_in_time():
  drawn, lines = rows(Timeline((LAYER,), (GAP,), ()))
  assert lines[0] == "a layer, forward: 76 ms, of which it waits 10.4 ms; 32 times a step"
  # Of the 44th millisecond more is computed than waited for.
  expected = "█" * 10 + "▒" * 4 + "·" * 10 + "▓" * 20 + "█" * (TIMELINE_WIDTH - 44)
  assert drawn["compute"] == expected
  assert drawn["fsdp over ICI"] == " " * 5 + "▄" * 19 + " " * 6 + "▁"
  assert drawn["from host"] == " " * 44 + "▁"
  assert drawn["waiting, ms"] == " " * 18 + "10"  # the other wait is too short to have a number
  assert lines[-6] == "  compute is in MLP 66 %, Attention 33 %"
  assert lines[-4:] == [
    "most expensive gap: 320 ms of a step (32 x 10 ms), to wait for",
    "  the all-gather over fsdp of bf16[4096,14336], in the forward pass",
    "  models/layers.py:334, MLP.__call__,",
    "  through partitioning/parallel/matmuls.py:122, product",
  ]


def test_lines_fit_the_terminal_whatever_is_in_them():
  long = {"data+fsdp+context+tensor over ICI": LAYER.transfers["from host"]}
  layers = [LAYER, dataclasses.replace(LAYER, transfers=long)]
  missing = ("no loop over 126 layers in the backward pass",)
  _, lines = rows(Timeline(tuple(layers), (GAP,), missing))
  assert max(map(len, lines)) <= 100
  assert "timeline of a layer: no loop over 126 layers in the backward pass" in lines


@pytest.mark.parametrize(
  ("line", "outside", "text"),
  [
    ("models/m.py:7, f", 0, "loop at models/m.py:7, f"),
    ("models/m.py:7, f", 1, "loop at models/m.py:7, f; 1 layer outside of it"),
    ("", 2, "2 layers outside of it"),
    ("", 0, ""),
  ],
)
def test_the_line_of_the_loop_and_what_is_outside(line, outside, text):
  assert plan_report.where(dataclasses.replace(LAYER, line=line, outside=outside)) == text
