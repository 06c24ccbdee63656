"""The bar of a device's memory: its parts add up, against the limit or enlarged."""

import pytest

from reports import html


@pytest.mark.parametrize(
  ("limit", "peak", "scale", "expected"),
  [
    (None, None, 300.0, "300 Bytes"),
    (1000.0, None, 1000.0, "300 Bytes of 1000 Bytes (30 %)"),
    (200.0, None, 300.0, "300 Bytes of 200 Bytes (150 %)"),
    (10_000.0, None, 300.0, "300 Bytes of 9.8 KiB (3 %); the bar is enlarged"),
    (1000.0, 500.0, 1000.0, "500 Bytes of 1000 Bytes (50 %)"),
    (10_000.0, 500.0, 500.0, "500 Bytes of 9.8 KiB (5 %); the bar is enlarged"),
  ],
)
def test_parts_and_lines_have_one_scale(limit, peak, scale, expected):
  bar = html.memory_bar({"a": 100.0, "b": 200.0, "c": 0.0}, limit, peak)
  assert bar["text"] == expected
  shares = [10_000 / scale, 20_000 / scale, 0]
  assert [one["percent"] for one in bar["parts"]] == pytest.approx(shares)
  enlarged = limit is None or limit > 5000
  assert bar["limit"] == (None if enlarged else pytest.approx(100 * limit / scale))
  assert bar["peak"] == (None if peak is None else pytest.approx(100 * peak / scale))
