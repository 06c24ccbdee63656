"""How much of a long run is training: failures of nodes, saves, restarts, steps run again.

A run is simulated step by step of its failures, which arrive at random at the rate of all nodes
together. A save blocks training while the state is copied to the host, and is there when it has
been written to storage meanwhile; after a failure the run restarts from the newest save that is
there. Saves to the memory of hosts come between: they are there at once, and lost with a share of
the failures. Rates: 419 unexpected interruptions of 16,384 GPUs in 54 days, 8 of them a node (Llama
3, arXiv:2407.21783, section 3.3.4). The interval between saves is checked against Young (1974,
doi:10.1145/361147.361115) and Daly (2006, doi:10.1016/j.future.2004.11.016).
"""

import dataclasses
import math

import numpy as np

DAY = 86_400.0
FAILURES_PER_NODE_DAY = 419 / 54 / (16_384 / 8)
RUNS = 100  # that are simulated for each interval
INTERVALS = 17  # that are tried, from a fifth to five times Young's
SEED = 0


@dataclasses.dataclass(frozen=True)
class Faults:
  """What failures and saves cost a run.

  Attributes:
    nodes: of the run: it fails with any of them.
    per_node_day: failures of a node and day.
    block_seconds: that a save keeps the run from training.
    write_seconds: after which a save is there.
    restart_seconds: from a failure to the next step: it is noticed, nodes are replaced, processes
      start, the state is read.
    memory_interval_seconds: of training between two saves to memory; inf: there are none.
    memory_block_seconds: that each of these keeps the run from training.
    memory_covers: share of the failures after which the newest of these is whole.
  """

  nodes: int
  per_node_day: float
  block_seconds: float
  write_seconds: float
  restart_seconds: float
  memory_interval_seconds: float = math.inf
  memory_block_seconds: float = 0.0
  memory_covers: float = 0.0

  @property
  def between_seconds(self) -> float:
    """Returns the mean time between failures of the run, in seconds."""
    return DAY / (self.nodes * self.per_node_day)


@dataclasses.dataclass(frozen=True)
class Goodput:
  """What a run with some interval between saves is expected to take.

  Attributes:
    interval_seconds: of training between two saves.
    share: training over all time, in the mean.
    seconds: of the whole run: the mean, and what one in ten runs stays below and above.
    failures: in the mean.
    saving: share of all time.
    again: share of all time in which steps are run again.
    restarting: share of all time.
  """

  interval_seconds: float
  share: float
  seconds: tuple[float, float, float]
  failures: float
  saving: float
  again: float
  restarting: float


def young(faults: Faults) -> float:
  """Returns the seconds between saves by Young's first-order formula."""
  return math.sqrt(2 * faults.block_seconds * faults.between_seconds)


def daly(faults: Faults) -> float:
  """Returns the seconds between saves by Daly's higher-order formula."""
  block, between = faults.block_seconds, faults.between_seconds
  if block >= 2 * between:
    return between
  part = block / (2 * between)
  return math.sqrt(2 * block * between) * (1 + math.sqrt(part) / 3 + part / 9) - block


def simulate(training_seconds: float, interval_seconds: float, faults: Faults) -> Goodput:
  """Returns the goodput of a run, from `RUNS` simulated ones.

  Args:
    training_seconds: that all steps take, each once.
    interval_seconds: of training between two saves.
    faults: what goes wrong, and costs.

  Raises:
    ValueError: hardly any save is ever reached: the run would not end.
  """
  cycle = interval_seconds + faults.block_seconds
  reached = math.exp(
    -(faults.restart_seconds + cycle + faults.write_seconds) / faults.between_seconds
  )
  if reached < 1e-3:
    raise ValueError(
      f"{faults.nodes:,} nodes with {faults.per_node_day:g} failures per node and day fail every "
      f"{faults.between_seconds:,.0f} s, before a restart ({faults.restart_seconds:,.0f} s) and a "
      f"save after {interval_seconds:,.0f} s are done: restart or save faster, or use fewer nodes"
    )
  random, between_memory = np.random.default_rng(SEED), faults.memory_interval_seconds
  slower = 1 + faults.memory_block_seconds / between_memory  # by saves to memory, spread evenly
  left = np.full(RUNS, training_seconds * slower)
  interval_seconds, between_memory = interval_seconds * slower, between_memory * slower
  cycle = interval_seconds + faults.block_seconds
  stored = left  # when the newest save in storage began
  clock, saving, restarting, failures = (np.zeros(RUNS) for _ in range(4))
  starting = np.zeros(RUNS)  # of the run's own start no failure is the reason
  while (running := left > 0).any():
    life = random.exponential(faults.between_seconds, RUNS)
    to_end = left + np.ceil(left / interval_seconds - 1) * faults.block_seconds
    ends = running & (life >= starting + to_end)
    fails = running & ~ends
    up = np.where(ends, to_end, np.maximum(life - starting, 0.0))
    there = np.floor(np.maximum(up - faults.write_seconds, 0.0) / cycle)
    begun = np.minimum(np.floor(up / cycle), np.ceil(left / interval_seconds - 1))
    clock += np.where(running, np.minimum(life, starting) + up, 0.0)
    restarting += np.where(running, np.minimum(life, starting), 0.0)
    saving += np.where(running, begun * faults.block_seconds, 0.0)
    stored = np.where(there > 0, left - there * interval_seconds, stored)
    kept = left - stored
    if faults.memory_covers:
      trained = begun * interval_seconds + np.minimum(up - begun * cycle, interval_seconds)
      covered = random.random(RUNS) < faults.memory_covers
      in_memory = np.floor(trained / between_memory) * between_memory
      kept = np.where(covered, np.maximum(kept, in_memory), kept)
    left = np.where(ends, 0.0, np.where(fails, left - kept, left))
    failures += fails
    starting = np.full(RUNS, faults.restart_seconds)
  total = clock.sum()
  saving += training_seconds * (slower - 1)
  return Goodput(
    interval_seconds / slower,
    share=RUNS * training_seconds / total,
    seconds=(clock.mean(), *np.quantile(clock, (0.1, 0.9))),
    failures=failures.mean(),
    saving=saving.sum() / total,
    again=max(0.0, 1 - (RUNS * training_seconds + saving.sum() + restarting.sum()) / total),
    restarting=restarting.sum() / total,
  )


def best(training_seconds: float, step_seconds: float, faults: Faults) -> Goodput:
  """Returns the goodput with the interval, of whole steps, that wastes the least time."""
  middle = max(young(faults), faults.write_seconds, step_seconds)
  found = []
  for factor in np.geomspace(0.2, 5.0, INTERVALS):
    steps = max(1, round(middle * factor / step_seconds))
    if steps * step_seconds >= faults.write_seconds:  # a save is written before the next begins
      found.append(steps * step_seconds)
  return max((simulate(training_seconds, one, faults) for one in found), key=lambda one: one.share)
