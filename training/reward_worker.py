"""A worker of `training.rewards`: runs as a script, and imports nothing of ours.

Each call of a reward is a process of its own, a fork of this one: what it does to its globals, its
memory or itself ends with it, and the value depends on (prompt, answer, row) alone. Of a call that
has ended, or has to, everything it has started is killed: its session, and what left that, which
the kernel hands to this process (PR_SET_CHILD_SUBREAPER).

The first line of standard input is a JSON object with `rewards` (a list of [file, function]) and
the limits; it is answered with `{"wrong": [...]}`, what cannot be loaded. Each later line is
[number of the reward, prompt, answer, row], and is answered with `{"value": x}`, or with `{"what":
the kind of failure, "detail": all of it}`.
"""

import contextlib
import ctypes
import importlib.util
import inspect
import json
import math
import numbers
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
MOST_PROCESSES = 32  # that a call may have at a time
_MOST_BYTES = 2**16  # of an answer
_LOOK_SECONDS = 0.05  # between two counts of a call's processes
_KILL_SECONDS = 10.0  # after which processes that cannot be killed end this one

Reward = Callable[[str, str, dict[str, Any]], float]


def main() -> None:
  """Answers the lines of standard input, to its end."""
  del sys.path[0]  # of this script
  given, out = os.fdopen(os.dup(0), "rb"), os.dup(1)
  null = os.open(os.devnull, os.O_RDWR)
  for number in (0, 1, 2):
    os.dup2(null, number)
  ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
  first = json.loads(given.readline())
  os.environ["REWARD_SECONDS"] = str(first["seconds"])
  rewards, wrong = [], []
  for path, name in first["rewards"]:
    try:
      rewards.append(loaded(path, name))
    except BaseException as error:  # also SystemExit
      wrong.append(_place(error, path) + _one_line(error))
  _send(out, {"wrong": wrong})
  for line in iter(given.readline, b""):
    number, *arguments = json.loads(line)
    call = Call(rewards[number], arguments, first["seconds"], first["memory_mib"] * 2**20)
    found = call.result(given.fileno())
    call.kill()
    _send(out, found)


def loaded(path: str, name: str) -> Reward:
  """Returns a function of a file, which may import modules beside it.

  Raises:
    ValueError: the file has no such function, or it does not take (prompt, answer, row).
    BaseException: what the file raises.
  """
  if (folder := os.path.dirname(path)) not in sys.path:
    sys.path.append(folder)
  spec = importlib.util.spec_from_file_location(os.path.basename(path).removesuffix(".py"), path)
  module = importlib.util.module_from_spec(spec)
  sys.modules[spec.name] = module
  spec.loader.exec_module(module)
  function = getattr(module, name, None)
  if not callable(function):
    raise ValueError(f"it has no function {name}(prompt, answer, row)")
  try:
    inspect.signature(function).bind("", "", {})
  except TypeError as error:
    raise ValueError(f"{name} has to take (prompt, answer, row): {error}") from None
  return function


class Call:
  """A call of a reward, which runs in a process of its own."""

  def __init__(self, reward: Reward, arguments: list[Any], seconds: float, memory_bytes: int):
    """Starts it, with a limit of seconds, and of memory for each of its processes."""
    self._seconds, self._memory = seconds, memory_bytes
    self._until = time.monotonic() + seconds
    self._answers, written = os.pipe()
    self._id = os.fork()
    if self._id == 0:
      try:
        self._enter(written)
        answer = json.dumps(self._answer(reward, arguments)).encode()
        while answer:
          answer = answer[os.write(written, answer) :]
        os.write(written, b"\n")
      finally:
        os._exit(os.EX_OK)
    os.close(written)

  def _enter(self, written: int) -> None:
    """Sets the limits of the new process, and closes the files of the old one but `written`."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # should this worker be killed
    os.setsid()
    os.closerange(3, written)
    os.closerange(written + 1, os.sysconf("SC_OPEN_MAX"))
    with open("/proc/self/statm") as file:
      pages = int(file.read().split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + self._memory
    seconds = math.ceil(self._seconds) + 1  # of computing, should this worker be gone
    for limit, value in (
      (resource.RLIMIT_AS, most),
      (resource.RLIMIT_FSIZE, self._memory),
      (resource.RLIMIT_CPU, seconds),
      (resource.RLIMIT_CORE, 0),
    ):
      resource.setrlimit(limit, (value, value))

  def _answer(self, reward: Reward, arguments: list[Any]) -> dict[str, Any]:
    try:
      value = reward(*arguments)
      if not isinstance(value, numbers.Real):
        return _failure(f"returned {type(value).__name__}, not a number", repr(value)[:200])
      if not math.isfinite(value):
        return _failure(f"returned {float(value)}")
      return {"value": float(value)}
    except MemoryError:
      return _failure(f"needed more than {self._memory / 2**20:,.0f} MiB")
    except BaseException as error:  # also SystemExit
      place = _place(error, inspect.getfile(reward))
      text = "".join(traceback.format_exception(error)[-3:])
      return _failure(f"{type(error).__name__}{f' at {place}'.rstrip(': ')}", text[-2000:])

  def result(self, given: int) -> dict[str, Any]:
    """Returns its answer, or its failure; ends this process where there is no more to be given.

    Args:
      given: number of the file of this worker's questions.
    """
    watched, answer = select.poll(), b""
    watched.register(self._answers, select.POLLIN)
    watched.register(given, select.POLLHUP)
    while (left := self._until - time.monotonic()) > 0:
      events = dict(watched.poll(1000 * min(left, _LOOK_SECONDS)))
      if events.get(given, 0) & select.POLLHUP:  # the run has ended, or was killed
        self.kill()
        sys.exit()
      if self._answers not in events:
        if sum(1 for _ in self._processes()) > MOST_PROCESSES:
          return _failure(f"had more than {MOST_PROCESSES} processes")
        continue
      piece = os.read(self._answers, _MOST_BYTES)
      answer += piece
      if answer.endswith(b"\n") or not piece or len(answer) > _MOST_BYTES:
        return self._read(answer)
    return self._late()

  def _late(self) -> dict[str, str]:
    return _failure(f"took longer than {self._seconds:g} s")

  def _read(self, answer: bytes) -> dict[str, Any]:
    if not answer:
      while not (ended := os.waitpid(self._id, os.WNOHANG))[0]:
        if time.monotonic() > self._until:
          return self._late()
        time.sleep(0.001)
      code = os.waitstatus_to_exitcode(ended[1])
      return _failure(
        f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
      )
    try:
      found = json.loads(answer)
      assert {*found} in ({"value"}, {"what", "detail"})
      return found
    except (ValueError, AssertionError):  # of a call that has found the file
      return _failure("wrote something else than a number")

  def _processes(self) -> Iterator[int]:
    """Yields what the call has started, as far as it is in its session or this process's child."""
    for name in os.listdir("/proc"):
      with contextlib.suppress(OSError, ValueError):  # it has just ended, or is no process
        with open(f"/proc/{int(name)}/stat") as file:
          _, parent, _, session = file.read().rpartition(")")[2].split()[:4]
        if int(session) == self._id or int(parent) == os.getpid():
          yield int(name)

  def kill(self) -> None:
    """Kills all that the call has started, and waits for it."""
    os.close(self._answers)
    until = time.monotonic() + _KILL_SECONDS
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self._id, signal.SIGKILL)  # at once, so that none of them can start another
    with contextlib.suppress(ChildProcessError):
      os.waitpid(self._id, 0)
    with contextlib.suppress(ChildProcessError):
      while time.monotonic() < until:
        while os.waitpid(-1, os.WNOHANG)[0]:
          pass
        for number in self._processes():
          with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
        time.sleep(0.001)
      sys.exit("a reward's processes cannot be killed")


def _failure(what: str, detail: str = "") -> dict[str, str]:
  return {"what": what, "detail": detail}


def _one_line(error: BaseException) -> str:
  return " ".join(f"{type(error).__name__}: {error}".split())


def _place(error: BaseException, path: str) -> str:
  """Returns `FILE:LINE: ` of the innermost frame in a file."""
  if isinstance(error, SyntaxError) and error.filename:
    return f"{os.path.basename(error.filename)}:{error.lineno}: "
  lines = [x.lineno for x in traceback.extract_tb(error.__traceback__) if x.filename == path]
  return f"{os.path.basename(path)}{f':{lines[-1]}' if lines else ''}: "


def _send(out: int, answer: dict[str, Any]) -> None:
  line = json.dumps(answer).encode() + b"\n"
  while line:
    line = line[os.write(out, line) :]


if __name__ == "__main__":
  main()
