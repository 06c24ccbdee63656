"""Straggler detection: finds the slow process, although a step takes the same time on all.

Steps are synchronous: a process at a third of the speed makes every step of every process take
three times as long, and Python cannot see the time that each spends in a collective. What can be
measured is the time in which a process did not run (suspended, waiting for input or for a CPU), and
the speed of its accelerators.
"""

import dataclasses
import math
import socket
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from processes.coordination import Group

# The shortest window, in steps and in seconds. Two are compared, so that a single hiccup is
# ignored.
WINDOW_STEPS, WINDOW_SECONDS = 3, 0.4
DELAY_SECONDS = 20.0
# The share of the ratio that each single window must have.
_WINDOW_SHARE = 0.75
_LEAST_SHARE = 0.02


class LostTime:
  """A thread that sleeps, and sums up how late it wakes; a context manager.

  A process that was suspended, or whose machine was, wakes late by the time in which it did not
  run. Sleeps of 5 ms detect nearly all suspensions of 10 ms and more, at less than 1 % of a core;
  sleeps of 25 ms missed half of them. Linux reports how much of it was spent waiting for a CPU.
  """

  PERIOD_SECONDS = 0.005

  def __init__(self):
    """Starts nothing yet."""
    self._late, self._woke = 0.0, time.monotonic()
    self._closed = threading.Event()
    self._thread = threading.Thread(target=self._run, name="pace", daemon=True)

  def __enter__(self) -> "LostTime":
    """Starts the thread."""
    self._woke = time.monotonic()
    self._thread.start()
    return self

  def __exit__(self, *exception) -> None:
    """Ends it."""
    self._closed.set()
    self._thread.join()

  def lost(self) -> tuple[float, float]:
    """Returns the seconds in which it was suspended, and in which it waited for a CPU."""
    late, woke = self._late, self._woke
    late += max(0.0, time.monotonic() - woke - self.PERIOD_SECONDS)  # a stop that has just ended
    cpu_wait = min(late, self._cpu_wait())
    return late - cpu_wait, cpu_wait

  def _cpu_wait(self) -> float:
    try:
      with open(f"/proc/self/task/{self._thread.native_id}/schedstat") as file:
        return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError):  # not on this system
      return 0.0

  def _run(self) -> None:
    while not self._closed.is_set():
      time.sleep(self.PERIOD_SECONDS)
      now = time.monotonic()
      self._late += max(0.0, now - self._woke - self.PERIOD_SECONDS)
      self._woke = now


@dataclasses.dataclass(frozen=True)
class Window:
  """The time that one process lost during a few steps.

  Attributes:
    stopped: share of the time in which it was stopped.
    input_wait: share in which it waited for its input.
    cpu_wait: share, of the time in which it was not stopped, in which it waited for a processor;
      averaged over `DELAY_SECONDS`, since on a busy machine it varies much between windows.
    probe: seconds that a fixed computation took on its accelerators; 1 without accelerators.
  """

  stopped: float
  input_wait: float
  cpu_wait: float = 0.0
  probe: float = 1.0

  @property
  def speed(self) -> float:
    """Returns its relative speed; only the ratio of two is meaningful."""
    undisturbed = max(_LEAST_SHARE, 1 - self.stopped - self.input_wait)
    return undisturbed * max(_LEAST_SHARE, 1 - self.cpu_wait) / self.probe


@dataclasses.dataclass(frozen=True)
class Verdict:
  """The slowest process.

  Attributes:
    index: of the process.
    ratio: how many times slower than the median of the others it is.
    at_least: the smallest ratio of a window.
    why: its largest loss of time.
  """

  index: int
  ratio: float
  at_least: float
  why: str


def slowest(windows: Mapping[int, Sequence[Window]]) -> Verdict:
  """Compares all processes, at least two of them, by the same number of windows each."""

  def ratio(index: int, speed: Callable[[Sequence[Window]], float]) -> float:
    others = [speed(windows[other]) for other in windows if other != index]
    return statistics.median(others) / speed(windows[index])

  def mean(of: Sequence[Window]) -> float:
    return statistics.fmean(window.speed for window in of)

  ratios = {index: ratio(index, mean) for index in windows}
  index = max(ratios, key=lambda index: ratios[index])
  own = windows[index]
  at_least = min(ratio(index, lambda of, n=n: of[n].speed) for n in range(len(own)))
  return Verdict(index, ratios[index], at_least, _why(own))


def _why(own: Sequence[Window]) -> str:
  shares = {
    name: statistics.fmean(getattr(window, name) for window in own)
    for name in ("stopped", "input_wait", "cpu_wait")
  }
  name = max(shares, key=lambda name: shares[name])
  if shares[name] < 0.3:
    return "its devices compute slowly"
  what = {
    "stopped": "it is stopped",
    "input_wait": "it waits for its input",
    "cpu_wait": "it waits for a processor",
  }
  return f"{100 * shares[name]:.0f} % of the time {what[name]}"


class Pace:
  """Compares the processes every few steps; a context manager; the same calls are made by all."""

  def __init__(
    self,
    group: Group,
    *,
    slow_ratio: float,
    probe: Callable[[], float] | None = None,
    lost: Callable[[], tuple[float, float]] | None = None,
    window_seconds: float = WINDOW_SECONDS,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Starts with the next step.

    Args:
      group: the processes, at least two.
      slow_ratio: a process this many times slower than the median of the others is slow.
      probe: returns the seconds of a fixed computation on the devices of this process.
      lost: returns the seconds in which this process was suspended, and in which it waited for a
        CPU; by default a `LostTime`.
      window_seconds: the shortest window.
      clock: a monotonic one.
    """
    self._group, self._ratio = group, slow_ratio
    self._sampler = LostTime() if lost is None else None
    self._lost, self._probe = lost or (self._sampler and self._sampler.lost), probe
    self._window_seconds, self._clock = window_seconds, clock
    self._marks: tuple[float, ...] | None = None
    self._cpu_wait = 0.0
    self._windows: list[tuple[int, Window]] = []
    self._look_at: int | None = None  # the step after which all have published their windows
    self._named: int | None = None
    self._verdict: Verdict | None = None

  def __enter__(self) -> "Pace":
    """Starts to count."""
    if self._sampler:
      self._sampler.__enter__()
    return self

  def __exit__(self, *exception) -> None:
    """Ends it."""
    if self._sampler:
      self._sampler.__exit__()

  def after_step(self, step: int, input_wait_seconds: float) -> str:
    """Measures, and compares if a window is complete; returns news on process 0, or "".

    Args:
      step: the steps done.
      input_wait_seconds: how long this process has waited for its batches so far.
    """
    news = self._look() if step == self._look_at else ""
    if self._marks is None or step <= self._marks[0]:  # the first, or a run that was rolled back
      self._marks, self._windows = self._mark(step, input_wait_seconds), []
    steps, seconds = step - self._marks[0], self._clock() - self._marks[1]
    if steps < WINDOW_STEPS or seconds < self._window_seconds:
      return news
    mark = self._mark(step, input_wait_seconds)
    _, seconds, stopped, cpu_wait, waited = (a - b for a, b in zip(mark, self._marks, strict=True))
    self._cpu_wait = self._over_longer(cpu_wait / max(seconds - stopped, 1e-3), seconds)
    probe = self._probe() if self._probe else 1.0
    window = Window(min(1.0, stopped / seconds), min(1.0, waited / seconds), self._cpu_wait, probe)
    self._windows = [*self._windows[-1:], (steps, window)]
    # The probe's time does not count for any step.
    self._marks = self._mark(step, input_wait_seconds)
    if len(self._windows) == 2:
      self._show()
      self._look_at = step + 1
    return news

  def numbers(self) -> dict[str, float]:
    """Returns, on process 0, the newest comparison for `metrics.jsonl`."""
    if self._verdict is None:
      return {}
    return {"slowest_process": self._verdict.index, "slowest_ratio": self._verdict.ratio}

  def _mark(self, step: int, input_wait_seconds: float) -> tuple[float, ...]:
    return (step, self._clock(), *self._lost(), input_wait_seconds)

  def _over_longer(self, cpu_wait: float, seconds: float) -> float:
    """Returns the exponential moving average of a share."""
    weight = 1 - math.exp(-seconds / DELAY_SECONDS)
    return self._cpu_wait + weight * (min(1.0, cpu_wait) - self._cpu_wait)

  def _show(self) -> None:
    windows = [dataclasses.astuple(window) for _, window in self._windows]
    self._group.put(f"pace/{self._group.index}", {"windows": windows, "host": socket.gethostname()})

  def _look(self) -> str:
    """Compares all processes, and returns what has changed since the last comparison."""
    self._look_at = None
    if not self._group.first:
      return ""
    shown = self._group.list("pace")
    if len(shown) < self._group.count:
      return ""
    windows = {int(i): [Window(*window) for window in one["windows"]] for i, one in shown.items()}
    self._verdict = found = slowest(windows)
    steps = sum(steps for steps, _ in self._windows)
    slow = found.ratio >= self._ratio and found.at_least >= _WINDOW_SHARE * self._ratio
    if slow and found.index != self._named:
      self._named = found.index
      return (
        f"WARNING: process {found.index} ({shown[str(found.index)]['host']}) is {found.ratio:.1f} "
        f"times slower than the median of the others over the last {steps} steps: {found.why}"
      )
    if self._named is not None and found.ratio < _WINDOW_SHARE * self._ratio:
      before, self._named = self._named, None
      return f"process {before} is no longer slower than the others"
    return ""


# ------------------------------ a probe of accelerators ------------------------------

SIZE, MATMULS = 2048, 32  # matrices of 8 MiB; about a millisecond on an accelerator of 2023
_PROBES = 3
# A probe leaves the accelerators idle for milliseconds: not more often than that.
_PROBE_SECONDS = 1.0


def straggler_detection(group: Group, slow_ratio: float, *, simulated: bool) -> Pace:
  """Returns the straggler detection of a run, with a probe where devices are accelerators.

  Simulated devices share their processors with everything else on the machine: a probe of them
  varies by a factor of 50 on a busy machine, while the CPU time that a process lost does not.

  Args:
    group: the processes of the run.
    slow_ratio: `processes.slow_ratio`.
    simulated: whether the devices are simulated.
  """
  if simulated:
    return Pace(group, slow_ratio=slow_ratio)
  return Pace(group, slow_ratio=slow_ratio, probe=DeviceProbe(), window_seconds=_PROBE_SECONDS)


class DeviceProbe:
  """A fixed computation on every accelerator of this process at once, without a collective.

  It probes their speed, independent of the train step.
  """

  def __init__(self, *, size: int = SIZE):
    """Compiles it; matrices of `size` x `size` in bfloat16 are multiplied."""
    devices = jax.local_devices()
    sharding = NamedSharding(Mesh(np.asarray(devices), ("device",)), PartitionSpec("device"))
    ones = np.full((len(devices), size, size), 1 / size, jnp.bfloat16)
    self._matrices = jax.device_put(ones, sharding)

    def matmuls(matrices_DNN: jax.Array) -> jax.Array:
      return jax.lax.fori_loop(0, MATMULS, lambda _, product: product @ matrices_DNN, matrices_DNN)

    self._matmuls = jax.jit(matmuls, out_shardings=sharding).lower(self._matrices).compile()

  def __call__(self) -> float:
    """Returns the seconds that the slowest device took, in the best of three tries.

    It waits for work in flight; the devices are idle for a moment afterwards.
    """
    jax.block_until_ready(self._matmuls(self._matrices))
    return min(self._once() for _ in range(_PROBES))

  def _once(self) -> float:
    began = time.monotonic()
    jax.block_until_ready(self._matmuls(self._matrices))
    return time.monotonic() - began
