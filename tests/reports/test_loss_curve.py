"""commands/closing.py: where the points of a chart are."""

import math

from commands import closing


def test_a_curve_in_plain_characters():
  losses = [(1, 4.0), (2, 3.0), (3, 2.0), (9, 1.0)]
  assert closing.chart(losses, [(5, 2.0), (9, 4.0)], columns=9, rows=4, dots=False) == [
    "4.00 *       o",
    "      *",
    "       **o*",  # the line from step 3 to step 9 is in this row up to its middle
    "1.00       ***",
    "     1  step 9",
  ]


def test_dots_are_eighths_of_a_character():
  # 4 x 4 dots: down to the right, one dot in each row.
  [line, steps] = closing.chart([(0, 4.0), (1, 3.0), (2, 2.0), (3, 1.0)], columns=2, rows=1)
  assert line == f"1.00 {chr(0x2800 + 0x01 + 0x10)}{chr(0x2800 + 0x04 + 0x80)}"
  assert steps.split() == ["0step", "3"]


def test_what_is_not_finite_is_left_out_and_one_loss_is_no_curve():
  assert closing.chart([(1, 2.0), (2, math.nan), (3, math.inf)]) == []
  assert closing.chart([]) == []
  lines = closing.chart([(1, 2.0), (2, math.nan), (3, 2.0)], columns=9, rows=2, dots=False)
  assert lines[0].startswith("2.00 *********")
