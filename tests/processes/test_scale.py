"""What the processes read of one another: in all not N * N entries, for N processes."""

import functools

import pytest

from processes import heartbeat
from processes.coordination import NotTogetherError
from processes.heartbeat import Exchange
from processes.preflight import DifferenceError, agree
from tests.processes.stores import SharedStore, groups_of, together

FEW, MANY = 20, 60


class CountingStore(SharedStore):
  """Counts the entries that are read."""

  read = 0

  def key_value_try_get(self, key: str) -> str:
    """Counts one."""
    self.read += 1
    return super().key_value_try_get(key)

  def key_value_dir_get(self, prefix: str) -> list[tuple[str, str]]:
    """Counts all below the folder, and one for the call."""
    found = super().key_value_dir_get(prefix)
    self.read += 1 + len(found)
    return found


def read_by(count: int, act) -> int:
  """Returns how many entries are read where each of so many processes acts."""
  store = CountingStore(count)
  results = together(*[functools.partial(act, group) for group in groups_of(count, store)])
  assert not any(isinstance(result, TimeoutError) for result in results), results
  return store.read


def grows_with_their_number(act) -> None:
  """Checks that three times the processes read three times as much, and not nine times."""
  few, many = read_by(FEW, act), read_by(MANY, act)
  assert many <= 1.3 * few * MANY / FEW, (few, many)


def test_the_preflight():
  facts = {f"key{n}": n for n in range(50)}
  grows_with_their_number(lambda group: agree(group, "run", facts, timeout_seconds=20))


def test_the_preflight_of_processes_that_all_differ():
  def act(group):
    with pytest.raises(DifferenceError):
      agree(group, "run", {"index": group.index}, timeout_seconds=20)

  grows_with_their_number(act)


def test_a_stop_that_all_know_of():
  grows_with_their_number(lambda group: group.all_true("step", False, timeout_seconds=20))


def waiting(count: int, store: SharedStore | None = None) -> list[Exchange]:
  """Returns the exchanges of processes that have all waited for long; no threads."""
  return [
    Exchange(group, lambda index=group.index: (9 if index != 3 else 7, "a", 5.0), lambda *_: None)
    for group in groups_of(count, store)
  ]


def test_looking_for_who_is_behind():
  def read(count):
    store = CountingStore(count)
    for one in waiting(count, store):
      one._post()
    return store.read

  assert read(MANY) <= 1.3 * read(FEW) * MANY / FEW


def test_those_that_do_not_look_hear_it_of_process_0():
  exchanges = waiting(heartbeat.WATCHERS + 2)
  last = exchanges[-1]
  assert last.behind() == f"processes 0 to {heartbeat.WATCHERS - 1} look for who is behind"
  for one in [*exchanges, exchanges[0], last]:
    one._post()
  assert last.behind() == exchanges[0].behind()
  assert last.behind().startswith("behind: process 3 (")
  assert last.silence() == 0


def test_of_a_stop_of_all_a_few_notices_are_enough():
  store = SharedStore(MANY)
  exchanges = waiting(MANY, store)
  for one in exchanges:
    one.tell("stop", "SIGTERM")
  for _ in range(3):
    for one in exchanges:
      one._send()
      one._hear()
  assert len(store.key_value_dir_get("notice/")) == heartbeat.WATCHERS


def test_a_stop_of_the_last_one_only_is_forwarded():
  store = SharedStore(MANY)
  last = waiting(MANY, store)[-1]
  last.tell("stop", "SIGTERM")
  for _ in range(2):
    last._send()
    last._hear()
  assert [key for key, _ in store.key_value_dir_get("notice/")] == [f"notice/stop-{MANY - 1}"]


def test_thousands_ask_less_often():
  one = waiting(4)[-1]
  assert (one._period, one._posts_each, one._silent) == (0.25, 1.0, 2.0)
  [group] = groups_of(4096)[-1:]
  one = Exchange(group, lambda: (0, "", 0.0), lambda *_: None)
  assert 4096 / one._period <= 4000 + 100, "calls in a second that process 0 answers"
  assert one._silent >= 2 * one._posts_each


def test_who_differs_only_by_the_word_of_process_0_is_not_refused():
  store = SharedStore(2)
  first, second = groups_of(2, store)
  first.wait = lambda *_, **__: None
  second.wait = lambda *_, **__: None
  first.put("digests/run/0", {"digest": "a"})
  first.put("verdicts/run", {"text": "the processes differ", "examples": [0, 0]})
  with pytest.raises(NotTogetherError, match="what this process does not see"):
    agree(second, "run", {}, timeout_seconds=1)
