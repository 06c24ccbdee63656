"""Rewards of answers, by functions of a user's Python files and by verifiers that are built in.

They run in worker processes (`training.reward_worker`), each call in a process of its own with
limits of time and memory: nothing that a reward does ends the run. A reward that fails (it raises,
ends its process, takes too long, returns no finite number) makes its answer a failed one, whose
value is NaN: it is no zero, which would be a judgement. Failures are counted by what went wrong.
"""

import ast
import collections
import concurrent.futures
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import queue
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from runtime.suggest import closest

VERIFIERS = ("number", "exact", "pattern", "tests")
FUNCTION = "reward"  # of a file, where none is named
START_SECONDS = 120.0  # that importing the files may take
GRACE_SECONDS = 15.0  # that a worker may take beyond the time of a call
_HERE = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Reward:
  """A reward.

  Attributes:
    name: as it is written: a verifier's, `FILE.py` or `FILE.py:FUNCTION`.
    path: of the file.
    function: in it.
    weight: of its values in the sum.
  """

  name: str
  path: pathlib.Path
  function: str
  weight: float


def parse(text: str) -> list[Reward]:
  """Returns the rewards of a text such as `number,style.py*0.2,style.py:length*-0.01`.

  Raises:
    ValueError: with all that is wrong, also that a file is missing or is no Python.
  """
  found, wrong = [], []
  for part in filter(None, map(str.strip, text.split(","))):
    try:
      found.append(_parsed(part))
    except ValueError as error:
      wrong.append(f"{part!r}: {error}")
  names = [one.name for one in found]
  wrong += [
    f"{name!r}: it is named twice" for name in dict.fromkeys(names) if names.count(name) > 1
  ]
  if not text.strip(" ,"):
    wrong.append(f"no reward is named; take a file, or one of {', '.join(VERIFIERS)}")
  if wrong:
    raise ValueError("\n".join(wrong))
  return found


def _parsed(part: str) -> Reward:
  name, star, number = (x.strip() for x in part.partition("*"))
  try:
    weight = float(number) if star else 1.0
  except ValueError:
    weight = math.nan
  if not math.isfinite(weight) or not weight:
    raise ValueError(f"the weight {number!r} is not a number other than 0")
  if name in VERIFIERS:
    return Reward(name, _HERE / "verifiers.py", name, weight)
  file, _, function = name.partition(".py")
  if file == name:
    near = f"; did you mean {near}?" if (near := closest(name, VERIFIERS)) else ""
    raise ValueError(f"it is no FILE.py, nor one of {', '.join(VERIFIERS)}{near}")
  path, function = pathlib.Path(f"{file}.py").resolve(), function.lstrip(":") or FUNCTION
  try:
    ast.parse(path.read_bytes())
  except OSError as error:
    raise ValueError(f"{path} cannot be read ({error.strerror})") from None
  except (SyntaxError, ValueError) as error:
    raise ValueError(f"{path}:{getattr(error, 'lineno', 1)} is no Python: {error}") from None
  return Reward(name, path, function, weight)


@dataclasses.dataclass(frozen=True)
class Scores:
  """The rewards of answers.

  Attributes:
    values: float64 [groups, answers], the weighted sums; NaN of answers of which a reward failed.
    parts: name -> float64 [groups, answers], the values of each reward, NaN where it failed.
    failures: `NAME: what went wrong` -> how often.
    first: the first failure as a text: prompt, answer and all that is known of the error; "".
  """

  values: np.ndarray
  parts: dict[str, np.ndarray]
  failures: dict[str, int]
  first: str

  @property
  def failed(self) -> np.ndarray:
    """Returns which answers failed, bool [groups, answers]."""
    return np.isnan(self.values)

  def metrics(self) -> dict[str, float]:
    """Returns the means over what has not failed, and how many answers have; a mean may be NaN."""
    means = {"reward": self.values, **{f"reward/{name}": x for name, x in self.parts.items()}}
    found = {name: float(np.nanmean(x)) for name, x in means.items() if not np.isnan(x).all()}
    return {**found, "reward_failed": float(self.failed.sum())}

  def text(self) -> str:
    """Returns a sentence on the failures; "" where there are none."""
    if not self.failures:
      return ""
    listed = "; ".join(f"{count:,} x {what}" for what, count in self.failures.items())
    return (
      f"the rewards of {self.failed.sum():,} of {self.values.size:,} answers failed, which are "
      f"left out of their groups: {listed}"
    )


class Rewards:
  """Worker processes that compute rewards; ended by `close`, or as a context."""

  def __init__(self, text: str, *, seconds: float, memory_mib: int, processes: int = 0):
    """Starts one worker, and so executes the files; the others start with the first answers.

    Args:
      text: as `parse` takes it.
      seconds: that a call may take.
      memory_mib: that each process of a call may take beyond what the files take.
      processes: most workers; 0: one per core.

    Raises:
      ValueError: as `parse`; or a file cannot be executed, or has not the function.
    """
    self.rewards = parse(text)
    given = {"rewards": [[str(one.path), one.function] for one in self.rewards]}
    self._first = {**given, "seconds": seconds, "memory_mib": memory_mib}
    self._most = processes or len(os.sched_getaffinity(0))
    self._idle: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()
    self._pool = concurrent.futures.ThreadPoolExecutor(self._most, "rewards")
    self._idle.put(_Worker(self._first))
    for _ in range(self._most - 1):
      self._idle.put(None)

  def score(
    self,
    prompts: Sequence[str],
    answers: Sequence[Sequence[str]],
    rows: Sequence[Mapping[str, Any]],
  ) -> Scores:
    """Returns the rewards, in the order of the answers, whichever worker computes which.

    Args:
      prompts: of each group.
      answers: of each group, as many for each.
      rows: the records of the prompts; what JSON has.
    """
    calls = [
      (number, prompt, answer, dict(row))
      for number in range(len(self.rewards))
      for prompt, of_group, row in zip(prompts, answers, rows, strict=True)
      for answer in of_group
    ]
    found = list(self._pool.map(self._call, calls))
    values = np.array([one.get("value", math.nan) for one in found], np.float64)
    values = values.reshape(len(self.rewards), len(prompts), -1)
    failures, first = collections.Counter(), ""
    for (number, prompt, answer, _), one in zip(calls, found, strict=True):
      if "what" in one:
        what = f"{self.rewards[number].name}: {one['what']}"
        failures[what] += 1
        first = first or f"{what}\n{one['detail']}\nprompt: {prompt}\nanswer: {answer}"
    weights = np.array([one.weight for one in self.rewards])
    return Scores(
      np.einsum("w,wga->ga", weights, values),
      {one.name: x for one, x in zip(self.rewards, values, strict=True)},
      dict(sorted(failures.items())),
      first,
    )

  def _call(self, call: tuple) -> dict[str, Any]:
    worker = self._idle.get()
    try:
      worker = worker or _Worker(self._first)
      return worker.call(call, self._first["seconds"] + GRACE_SECONDS)
    except (OSError, ValueError) as error:  # killed from inside a call, or by the system
      if worker is not None:
        worker.close()
        worker = None
      return {"what": "its worker process was lost, and is started again", "detail": str(error)}
    finally:
      self._idle.put(worker)

  def close(self) -> None:
    """Ends the workers."""
    self._pool.shutdown()
    for _ in range(self._most):
      if (worker := self._idle.get()) is not None:
        worker.close()

  def __enter__(self) -> "Rewards":
    return self

  def __exit__(self, *_: object) -> None:
    self.close()


class _Worker:
  """A worker process; its methods raise OSError or ValueError where it has ended."""

  def __init__(self, first: Mapping[str, Any]):
    """Starts it; raises ValueError with what cannot be loaded."""
    self._process = subprocess.Popen(
      [sys.executable, str(_HERE / "reward_worker.py")],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      env={**os.environ, "PYTHONHASHSEED": "0", "JAX_PLATFORMS": "cpu"},
      start_new_session=True,  # Ctrl-C is the run's
    )
    try:
      wrong = self.call(first, START_SECONDS)["wrong"]
    except (OSError, ValueError) as error:
      self.close()
      raise ValueError(f"the rewards cannot be loaded: {error}") from error
    if wrong:
      self.close()
      raise ValueError("\n".join(["the rewards cannot be loaded:", *wrong]))

  def call(self, question: Any, seconds: float) -> dict[str, Any]:
    """Returns the answer to a question."""
    self._process.stdin.write(json.dumps(question).encode() + b"\n")
    self._process.stdin.flush()
    line, watched = b"", select.poll()
    watched.register(self._process.stdout, select.POLLIN)
    while not line.endswith(b"\n"):
      if not watched.poll(1000 * seconds):
        raise OSError(f"it has not answered for {seconds:g} s")
      if not (piece := os.read(self._process.stdout.fileno(), 2**16)):
        raise OSError("it has ended")
      line += piece
    return json.loads(line)

  def close(self) -> None:
    """Ends it, and what it is computing."""
    with contextlib.suppress(OSError):
      self._process.stdin.close()
    try:
      self._process.wait(timeout=1)
    except subprocess.TimeoutExpired:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(self._process.pid, signal.SIGKILL)
      self._process.wait()
    self._process.stdout.close()
