"""A coordination service in memory, and processes that are threads: for tests of what they say."""

import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from processes.coordination import Group, LocalStore

WAIT_SECONDS = 20  # a bound for a machine that is busy; nothing here takes it


class SharedStore(LocalStore):
  """What the client of JAX's coordination service does, for several groups in one process."""

  def __init__(self, count: int):
    """Takes the number of processes that a barrier waits for."""
    super().__init__()
    self._count = count
    self._changed = threading.Condition()
    self._barriers: dict[str, tuple[int, int]] = {}  # name -> (how many wait, how often all came)

  def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
    """Sets a value; an earlier one is an error unless it may be replaced."""
    with self._changed:
      if key in self._values and not allow_overwrite:
        raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: {key}")
      self._values[key] = value

  def wait_at_barrier(self, name: str, timeout_in_ms: int) -> None:
    """Returns when all have come; a name serves again once they have."""
    with self._changed:
      waiting, often = self._barriers.get(name, (0, 0))
      if waiting + 1 == self._count:
        self._barriers[name] = (0, often + 1)
        self._changed.notify_all()
        return
      self._barriers[name] = (waiting + 1, often)
      if not self._changed.wait_for(lambda: self._barriers[name][1] > often, timeout_in_ms / 1000):
        raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: Barrier timed out. Id: {name}\nmore")


class SilentStore(SharedStore):
  """A service whose process is stopped: calls do not return before `answers` is set."""

  def __init__(self, count: int):
    """Answers until `answers` is cleared."""
    super().__init__(count)
    self.answers = threading.Event()
    self.answers.set()

  def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
    """Waits with the service."""
    self.answers.wait()
    super().key_value_set(key, value, allow_overwrite)

  def key_value_try_get(self, key: str) -> str:
    """Waits with the service."""
    self.answers.wait()
    return super().key_value_try_get(key)

  def key_value_dir_get(self, prefix: str) -> list[tuple[str, str]]:
    """Waits with the service."""
    self.answers.wait()
    return super().key_value_dir_get(prefix)


def groups_of(count: int, store: SharedStore | None = None, **settings: Any) -> list[Group]:
  """Returns the groups of the processes of one run."""
  store = store or SharedStore(count)
  return [Group(index, count, store=store, **settings) for index in range(count)]


def together(*calls: Callable[[], Any]) -> list[Any]:
  """Calls all at once, each in a thread; returns what each returned or raised."""

  def caught(call: Callable[[], Any]) -> Any:
    try:
      return call()
    except Exception as error:  # the test's to look at
      return error

  results: dict[int, Any] = {}
  threads = [
    threading.Thread(target=lambda i=i, call=call: results.update({i: caught(call)}), daemon=True)
    for i, call in enumerate(calls)
  ]
  until = time.monotonic() + WAIT_SECONDS
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(max(0, until - time.monotonic()))
  return [results.get(i, TimeoutError("has not returned")) for i in range(len(calls))]
