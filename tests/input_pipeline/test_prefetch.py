"""The thread that makes batches ahead."""

import threading
import time

import pytest

from input_pipeline.batches import Prefetcher


def test_batches_come_in_order():
  with Prefetcher(lambda step: step * 10, start=3, stop=9, depth=2) as prefetcher:
    assert [prefetcher.get(step) for step in range(3, 9)] == [30, 40, 50, 60, 70, 80]


def test_no_more_than_depth_ahead():
  made = []
  with Prefetcher(made.append, start=0, stop=100, depth=3) as prefetcher:
    prefetcher.get(0)
    time.sleep(0.1)
    assert made == [0, 1, 2, 3]


def test_steps_out_of_order_are_refused():
  with Prefetcher(lambda step: step, start=0, stop=2) as prefetcher:
    with pytest.raises(ValueError, match=r"step 1 was asked for, but the next one is 0 of 0..1"):
      prefetcher.get(1)
    prefetcher.get(0)
    prefetcher.get(1)
    with pytest.raises(ValueError, match="step 2 was asked for"):
      prefetcher.get(2)


def test_an_error_is_raised_at_its_step():
  def make(step):
    if step == 2:
      raise OSError("disk gone")
    return step

  with Prefetcher(make, start=0, stop=10, depth=4) as prefetcher:
    assert [prefetcher.get(0), prefetcher.get(1)] == [0, 1]
    for _ in range(2):  # and stays, rather than leaving the caller to wait for ever
      with pytest.raises(OSError, match="disk gone"):
        prefetcher.get(2)


def test_waiting_is_counted():
  def slow(step):
    time.sleep(0.1)
    return step

  with Prefetcher(slow, start=0, stop=2, depth=1) as prefetcher:
    prefetcher.get(0)
    assert 0.05 < prefetcher.wait_seconds < 1
    time.sleep(0.3)
    before = prefetcher.wait_seconds
    prefetcher.get(1)
    assert prefetcher.wait_seconds - before < 0.05


@pytest.mark.parametrize("depth", [1, 5])
def test_closing_ends_the_thread(depth):
  prefetcher = Prefetcher(lambda step: step, start=0, stop=10**9, depth=depth)
  prefetcher.get(0)
  begin = time.perf_counter()
  prefetcher.close()
  prefetcher.close()
  assert time.perf_counter() - begin < 1
  assert "prefetch" not in {thread.name for thread in threading.enumerate()}
  with pytest.raises(RuntimeError, match="closed"):
    prefetcher.get(1)


def test_closing_does_not_wait_for_a_read_that_hangs():
  release = threading.Event()
  prefetcher = Prefetcher(lambda step: release.wait(60), start=0, stop=1)
  begin = time.perf_counter()
  prefetcher.close(timeout_seconds=0.1)
  assert time.perf_counter() - begin < 1
  release.set()


def test_depth():
  with pytest.raises(ValueError, match="depth=0"):
    Prefetcher(lambda step: step, start=0, stop=1, depth=0)
