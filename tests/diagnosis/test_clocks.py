"""Clocks of processes, of which one goes otherwise."""

import concurrent.futures
import time

import pytest

from diagnosis import clocks
from diagnosis.finding import OK, WARNING, WRONG
from processes.coordination import Group
from tests.processes.stores import SharedStore


@pytest.mark.parametrize(
  ("ahead", "status", "said"),
  [
    (0.0, OK, "clocks of 3 processes: 0."),
    (30.0, WARNING, "process 1's clock is 30 s ahead of process "),
    (-4000.0, WRONG, " s ahead of process 1's"),
  ],
)
def test_clocks_that_differ(ahead, status, said):
  store = SharedStore(3)
  groups = [Group(index, 3, store=store, key=b"k") for index in range(3)]

  def read(group):
    away = ahead if group.index == 1 else 0.0
    return list(clocks.check(group, timeout_seconds=20, clock=lambda: time.time() + away))

  with concurrent.futures.ThreadPoolExecutor(3) as pool:
    found = list(pool.map(read, groups))
  for [one] in found:
    assert one.status == status
    assert said in one.what


def test_one_process_has_one_clock():
  assert list(clocks.check(Group(), timeout_seconds=1)) == []
