"""Which process is slow: by what each did not get, over steps that take all the same time."""

import random
import re
import socket
import threading
import time

import jax
import pytest

from processes import stragglers
from processes.stragglers import DeviceProbe, Pace, Window, slowest
from tests.processes.stores import groups_of

HOST = socket.gethostname()


# ---- What a process did not get ----


class DutyCycle:
  """The module `time` of a process that runs `on` seconds and is stopped for `off`, in turn."""

  def __init__(self, on: float, off: float, seconds: float):
    self._on, self._period, self._until = on, on + off, seconds
    self.now, self.closed = 0.0, None

  def monotonic(self) -> float:
    return self.now

  def sleep(self, seconds: float) -> None:
    self.now += seconds + 1e-4
    if self.now % self._period > self._on:  # not before it runs again
      self.now += self._period - self.now % self._period + 1e-4
    if self.now > self._until:
      self.closed.set()


@pytest.mark.parametrize(
  ("on", "off", "least", "most"),
  [
    (1.0, 0.0, 0.0, 0.03),
    (0.01, 0.02, 0.6, 0.7),
    (0.05, 0.1, 0.6, 0.68),
    (0.033, 0.067, 0.58, 0.7),
    (0.05, 0.05, 0.44, 0.52),
  ],
)
def test_the_sampler_sees_the_share_of_stops(monkeypatch, on, off, least, most):
  clock = DutyCycle(on, off, 6.0)
  monkeypatch.setattr(stragglers, "time", clock)
  sampler = stragglers.LostTime()
  clock.closed = sampler._closed
  sampler._run()
  stopped, cpu_wait = sampler.lost()
  assert least <= stopped / clock.now <= most
  assert cpu_wait == 0  # the thread was never started


def test_a_stop_that_has_just_ended_counts_before_the_sampler_wakes(monkeypatch):
  clock = DutyCycle(1.0, 0.0, 6.0)
  monkeypatch.setattr(stragglers, "time", clock)
  sampler = stragglers.LostTime()
  clock.now += 2.0
  assert sampler.lost() == (pytest.approx(2.0 - sampler.PERIOD_SECONDS), 0)


class LateClock:
  """The module `time` of a process in which every sleep takes 0.1 s longer than it should."""

  def __init__(self):
    self.now, self.sleeps, self.sleepers = 0.0, 0, set()
    self.enough = threading.Event()

  def monotonic(self) -> float:
    return self.now

  def sleep(self, seconds: float) -> None:
    time.sleep(1e-4)
    self.now += seconds + 0.1
    self.sleeps += 1
    self.sleepers.add(threading.get_ident())
    if self.sleeps >= 20:
      self.enough.set()


def test_the_sampler_counts_in_a_thread_until_it_is_closed(monkeypatch):
  clock = LateClock()
  monkeypatch.setattr(stragglers, "time", clock)
  with stragglers.LostTime() as sampler:
    assert clock.enough.wait(60), "the thread does not run"
    assert sampler._thread.is_alive()
  assert not sampler._thread.is_alive()
  assert len(clock.sleepers) == 1
  assert clock.sleepers != {threading.get_ident()}
  stopped, cpu_wait = sampler.lost()
  assert stopped + cpu_wait == pytest.approx(0.1 * clock.sleeps)


def test_waiting_for_a_cpu_is_distinguished(monkeypatch):
  sampler = stragglers.LostTime()
  sampler._late = 5.0
  monkeypatch.setattr(sampler, "_cpu_wait", lambda: 3.0)
  stopped, cpu_wait = sampler.lost()
  assert stopped == pytest.approx(2.0, abs=1)
  assert cpu_wait == 3.0


# ---- The comparison ----

FAST = Window(0.1, 0.0)


@pytest.mark.parametrize(
  ("slow", "ratio", "why"),
  [
    (Window(0.7, 0.0), 3.0, "70 % of the time it is stopped"),
    (Window(0.1, 0.6), 3.0, "60 % of the time it waits for its input"),
    (Window(0.1, 0.0, 0.75), 4.0, "75 % of the time it waits for a processor"),
    (Window(0.1, 0.0, 0.0, 3.5), 3.5, "its devices compute slowly"),
    (Window(1.0, 0.3), 45.0, "100 % of the time it is stopped"),
  ],
)
@pytest.mark.parametrize("count", [2, 5])
def test_the_slowest_is_compared_with_the_median_of_the_others(slow, ratio, why, count):
  windows = {index: [FAST, FAST] for index in range(count)}
  windows[1] = [slow, slow]
  found = slowest(windows)
  assert (found.index, found.why) == (1, why)
  assert (found.ratio, found.at_least) == (pytest.approx(ratio), pytest.approx(ratio))


def test_a_hiccup_is_at_least_nothing():
  windows = {index: [FAST, FAST] for index in range(3)}
  windows[2] = [Window(0.95, 0.0), FAST]
  found = slowest(windows)
  assert found.index == 2
  assert found.at_least == pytest.approx(1.0)


# ---- A run ----


class Run:
  """Processes in turn, each with a clock and counters of its own making."""

  def __init__(self, count: int, **settings):
    self.seconds, self.done = 0.0, 0
    self.lost, self.waited, self.cpu_wait = ([0.0] * count for _ in range(3))
    self.probe = [1.0] * count
    probes = settings.pop("probes", False)
    self.paces = [
      Pace(
        group,
        slow_ratio=settings.get("slow_ratio", 2.0),
        lost=lambda i=i: (self.lost[i], self.cpu_wait[i]),
        probe=(lambda i=i: self.probe[i]) if probes else None,
        clock=lambda: self.seconds,
      )
      for i, group in enumerate(groups_of(count))
    ]

  def steps(
    self, count, seconds, stopped=None, input_wait=None, cpu_wait=None
  ) -> list[tuple[int, str]]:
    """Makes steps; returns what process 0 has said, with the step, and checks that others do not.

    Args:
      count: of steps.
      seconds: of each.
      stopped: index -> share of the time; 0.1 for the others.
      input_wait: index -> share.
      cpu_wait: index -> share.
    """
    said = []
    for _ in range(count):
      self.done += 1
      self.seconds += seconds
      for i, one in enumerate(self.paces):
        self.lost[i] += (stopped or {}).get(i, 0.1) * seconds
        self.waited[i] += (input_wait or {}).get(i, 0.0) * seconds
        self.cpu_wait[i] += (cpu_wait or {}).get(i, 0.0) * seconds
        text = one.after_step(self.done, self.waited[i])
        assert i == 0 or text == ""
        if text:
          said.append((self.done, text))
    return said


@pytest.mark.parametrize(("before", "whom"), [(20, 0), (21, 3), (22, 0), (23, 3)])
def test_a_process_three_times_slower_is_named_within_ten_steps_and_once(before, whom):
  run = Run(4)
  assert run.steps(before, 0.05) == []
  [(step, text)] = run.steps(40, 0.15, {whom: 0.7})
  assert step - before <= 10
  found = re.fullmatch(
    rf"WARNING: process {whom} \({HOST}\) is ([\d.]+) times slower than the median of the others "
    r"over the last [6-9] steps: \d\d % of the time it is stopped",
    text,
  )
  assert found is not None, text
  assert 2 <= float(found[1]) <= 3.1
  assert run.paces[0].numbers() == {"slowest_process": whom, "slowest_ratio": pytest.approx(3.0)}
  assert run.paces[1].numbers() == {}
  assert [text for _, text in run.steps(40, 0.05)] == [
    f"process {whom} is no longer slower than the others"
  ]


def test_a_slow_input_is_named():
  run = Run(2)
  run.steps(20, 0.05)
  [(_, text)] = run.steps(12, 0.15, input_wait={1: 0.6})
  assert "process 1 " in text
  assert re.search(r"over the last \d steps: [56]\d % of the time it waits for its input$", text)


def test_a_process_without_a_processor_is_named_after_a_while():
  run = Run(2)
  run.steps(100, 0.1, cpu_wait={0: 0.1, 1: 0.1})
  [(step, text)] = run.steps(600, 0.3, cpu_wait={0: 0.1, 1: 0.7})
  assert 20 < step - 100 < 300
  assert re.search(r"process 1 .* [45]\d % of the time it waits for a processor$", text)


def test_waiting_for_processors_that_varies_is_no_alarm():
  run, chance = Run(4), random.Random(1)
  for _ in range(200):
    cpu_wait = {i: chance.choice((0.1, 0.3, 0.5, 0.8)) for i in range(4)}
    assert run.steps(3, chance.uniform(0.1, 0.4), cpu_wait=cpu_wait) == []


def test_slow_devices_are_named():
  run = Run(3, probes=True)
  run.steps(20, 0.05)
  run.probe[2] = 3.0
  [(_, text)] = run.steps(12, 0.15)
  assert "process 2 " in text
  assert text.endswith("over the last 8 steps: its devices compute slowly")


def test_steps_that_are_short_are_looked_at_for_longer():
  run = Run(2)
  run.steps(200, 0.01)
  [(_, text)] = run.steps(200, 0.03, {1: 0.7})
  assert "over the last 28 steps" in text


def test_hiccups_and_common_slowness_are_no_alarm():
  run, chance = Run(4), random.Random(0)
  for _ in range(120):
    everyone = chance.uniform(0, 0.4)
    stopped = {i: min(0.95, everyone + chance.uniform(0, 0.15)) for i in range(4)}
    assert run.steps(4, chance.uniform(0.02, 0.4), stopped) == []
    if chance.random() < 0.1:  # one stands still for seconds, once
      assert run.steps(1, 3.0, {chance.randrange(4): 0.95}) == []
      assert run.steps(20, 0.1) == []


def test_after_a_rollback_it_starts_again():
  run = Run(2)
  run.steps(20, 0.15)
  run.done = 5
  assert run.steps(4, 0.15) == []
  [(step, _)] = run.steps(30, 0.15, {1: 0.7})
  assert step <= 9 + 10


# ---- The probe


def test_the_probe_runs_on_every_device_without_a_collective_and_longer_for_more_work():
  probe = DeviceProbe(size=16)
  assert {shard.device for shard in probe._matrices.addressable_shards} == {*jax.local_devices()}
  text = probe._matmuls.as_text()
  assert "bf16[1,16,16]" in text
  assert not any(name in text for name in ("all-reduce", "all-gather", "collective-permute"))
  assert DeviceProbe(size=256)() > 2 * probe() > 0
