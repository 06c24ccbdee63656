"""The benchmark of attention's block sizes, in small."""

import pytest
from absl import flags
from absl.testing import flagsaver

from benchmarks import tune


@pytest.fixture
def _small():
  flags.FLAGS.mark_as_parsed()
  with flagsaver.flagsaver(length=128, rows=1, heads=2, head_size=8, times=1):
    yield


@pytest.mark.usefixtures("_small")
def test_each_size_is_timed_and_the_row_printed(capsys):
  assert tune.main([]) == 0
  printed = capsys.readouterr().out
  times = [line.split() for line in printed.splitlines() if line.startswith("blockwise")]
  assert [int(size) for _, size, *_ in times] == [64, 128]
  best = min(times, key=lambda row: float(row[2]))[1]
  assert f"'cpu': Tiles(({best}, {best})" in printed


@pytest.mark.usefixtures("_small")
def test_a_device_that_no_size_fits_is_refused(monkeypatch, capsys):
  monkeypatch.setattr(tune, "compiled", lambda attend, arrays: None)
  assert tune.main([]) == 1
  printed = capsys.readouterr()
  assert "blockwise, 64 tokens: does not fit cpu" in printed.out
  assert "no block size fits cpu; make --length smaller" in printed.err
