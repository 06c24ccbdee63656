"""Rows 15, 16 and 19: what raises no error: flipped bits, slowness, torn caches, leftovers."""

import contextlib
import hashlib
import os
import pathlib
import random
import re
import signal
import time

import numpy as np

from tests.faults import memory, moments, same
from tests.faults.frame import Attempt, row
from tests.faults.harness import QUICK, Run, saved, story

CLEAN_STEPS = 2000
LEAST_STEPS = 10  # within which each is to be noticed


def done(run: Run) -> int:
  """Returns the last step that process 0 has printed; 0 before the first."""
  return int(next(iter(re.findall(r"^step (\d+)/", run.text(), re.MULTILINE)[::-1]), 0))


# ------------------------------ a flipped bit ------------------------------

# processes, devices: as many copies of each array as there are devices.
REPLICAS = ((2, 4), (2, 2), (4, 4))
LEAVES = ("embed.table", "layers.mlp.up.kernel", "layers.mlp.down.kernel", "unembed.kernel")
SAVE_EVERY = 20
CHECK, DIFFER = "training.replica_check_every_steps", "copies of the state differ"
DRAWS = 5  # of an address: what stands there may be used for the time of a step only
REST_SECONDS = 2  # without a step, longer than one takes
# An exponent's highest bit makes of 0.1 a number with 37 zeros: the loss is not finite.
HUGE = 30
FLIP_STEPS = 120
FLIP = (
  *QUICK,
  f"--config.checkpoint.every_steps={SAVE_EVERY}",
  "--config.checkpoint.keep=1",
  f"--config.checkpoint.keep_every_steps={SAVE_EVERY}",
  "--config.evaluation.every_steps=0",
  # Parameters stay nearly where they are, so that they are found by what was saved of them.
  "--config.optimizer.learning_rate=1e-6",
  "--config.optimizer.schedule=constant",
  "--config.optimizer.warmup_steps=0",
  "--config.processes.heartbeat_seconds=300",  # it waits while its memory is searched
)


def mesh(devices: int) -> tuple[str, str]:
  """Returns the flags of a mesh on which every device holds every parameter whole."""
  return (f"--config.mesh.data={devices}", "--config.mesh.tensor=1")


@row(
  15,
  fault="a bit of a parameter flipped on one replica; 2,000 clean steps",
  passes="caught at the next check (within 10 steps); no false alarm",
  trials=20,
  seconds=45,
  usual=21,
  note="With 2 and 4 replicas, on 2 and 4 processes, in the memory of a process: any bit of a "
  "word. A flip that makes the loss infinite is found as a bad step, which names no process. The "
  "last trial is the clean one, with a check after every step.",
)
def flipped_bit(attempt: Attempt) -> None:
  """Flips a bit of a parameter in the memory of one process; the last trial leaves all alone."""
  if attempt.number % 21 == 20:
    flags = ("--config.mesh.data=2", "--config.mesh.tensor=2")
    _clean(attempt, DIFFER, *flags, f"--config.{CHECK}=1")
    return
  count, devices = REPLICAS[attempt.number % len(REPLICAS)]
  chance, flags = attempt.chance, (*FLIP, *mesh(devices))
  whom, leaf, bit = chance.randrange(count), chance.choice(LEAVES), chance.randrange(32)
  attempt.does = f"bit {bit} of {leaf}, {devices} copies, process {whom} of {count}"
  settings = {"count": count, "steps": FLIP_STEPS, "flags": flags}
  with Run(attempt.workdir, slow=whom, **settings) as run:
    run.wait_for(f"step {SAVE_EVERY + 1 + chance.randrange(FLIP_STEPS // 2)}/")
    flip(attempt, run, whom, leaf, bit, named=devices > 2)
  attempt.ends_as(attempt.clean(count, flags, steps=FLIP_STEPS), **settings)


def flip(attempt: Attempt, run: Run, whom: int, leaf: str, bit: int, *, named: bool) -> None:
  """Flips a bit in a process, and checks that it is noticed in time and is in no checkpoint.

  Args:
    attempt: a trial.
    run: under way, with a checkpoint; the reading of one of its processes can be stopped.
    whom: index of the process.
    leaf: name of a parameter that every device holds whole.
    bit: 0 to 31.
    named: whether there are so many copies that the device must be named.
  """
  resting = Resting(run, whom, leaf)
  element = attempt.chance.randrange(resting.array.size)
  tries = (resting.flip(element, bit, attempt.chance) for _ in range(DRAWS))
  flipped = next((step for step in tries if step is not None), None)
  assert flipped is not None, f"no copy is found in process {whom}"
  run.stalled.unlink(missing_ok=True)
  codes, text = run.end(), run.text()
  assert codes == [1] * run.count, codes
  noticed = re.search(rf"step (\d+): ({DIFFER}|.*training stops)", text)
  assert noticed, "it is not said"
  attempt.seen.append(f"flipped after step {flipped}, noticed after step {noticed[1]}")
  assert 0 < int(noticed[1]) - flipped <= LEAST_STEPS
  assert max(saved(attempt.workdir)) <= flipped
  if bit == HUGE and "training stops" in noticed[2]:
    attempt.seen.append("by its numbers")
    return
  assert re.search(rf"^  {leaf.replace('.', '/')} \[", text, re.MULTILINE), "the array is not named"
  if named:
    assert re.search(rf"device \d+ \(process {whom}\) differs from the other", text), (
      "nor its device"
    )
  else:
    assert "the copies on devices " in text


class Resting:
  """A run whose processes all wait for a batch, between two steps, and an array in their memory.

  Attributes:
    array: as it was saved last.
  """

  def __init__(self, run: Run, whom: int, leaf: str, part: tuple[slice, ...] = ()):
    """Stops the reading of a process, and finds the array, or a part, in it and in another one."""
    self._run, pids = run, run.pids()
    self._pid, self._other = pids[whom], pids[whom - 1]
    self._rest()
    folder = run.workdir / "checkpoints" / str(saved(run.workdir)[-1])
    self.array = np.ascontiguousarray(memory.saved_array(folder, f"params.{leaf}")[part])
    self._places = {pid: memory.copies(pid, self.array) for pid in (self._pid, self._other)}

  def flip(self, element: int, bit: int, chance: random.Random) -> int | None:
    """Flips a bit of one copy that a device uses; returns the steps done, None if it was none."""
    before = self._contents()
    self._steps()
    used = [
      place
      for place, content in self._contents().items()
      if content != before[place] and memory.near(content, self.array)
    ]
    if not used:
      return None
    address = chance.choice(used) + 4 * element
    memory.flip(self._pid, address, bit)
    flipped = done(self._run)
    self._steps()
    # What a step keeps for itself alone is written anew in the next.
    with contextlib.suppress(OSError):  # it has ended
      elsewhere = [memory.read(self._other, p + 4 * element, 4) for p in self._places[self._other]]
      now, one = memory.read(self._pid, address, 4), self.array.reshape(-1)[element : element + 1]
      if now in elsewhere or (not elsewhere and memory.near(now, one)):
        return None
    return flipped

  def _contents(self) -> dict[int, bytes]:
    size = self.array.nbytes
    return {place: memory.read(self._pid, place, size) for place in self._places[self._pid]}

  def _steps(self) -> None:
    """Lets it make a step or a few, unless it ends."""
    before = done(self._run)
    self._run.stalled.unlink(missing_ok=True)
    while done(self._run) == before and not self._run.poll():
      time.sleep(0.01)
    self._rest()

  def _rest(self) -> None:
    """Stops the reading, and waits until the batches are used up that had been read ahead."""
    self._run.stall()
    step, since = done(self._run), time.monotonic()
    while time.monotonic() - since < REST_SECONDS and not self._run.poll():
      time.sleep(0.05)
      if done(self._run) != step:
        step, since = done(self._run), time.monotonic()


# Parameters of which each of two processes holds a half -> the dim that is sharded.
HALVES = {"layers.mlp.up.kernel": 1, "layers.mlp.down.kernel": 2}


@row(
  40,
  fault="training.check_memory, fsdp=2: a bit of a parameter flipped between two steps, in the "
  "only process that holds it",
  passes="found by the next update: exit 1 on both, the array and its device named, nothing saved; "
  "Same after a restart",
  trials=10,
  seconds=45,
  note="The largest element, and bits that change it by an eighth or more: a copy that the run no "
  "longer uses is known by its value.",
)
def flipped_in_the_only_copy(attempt: Attempt) -> None:
  """Flips a bit of a shard in the memory of the process that holds it."""
  chance, flags = attempt.chance, (*FLIP, *same.SPLIT, "--config.training.check_memory=True")
  whom, bit = chance.randrange(2), chance.randrange(20, 30)
  leaf, dim = chance.choice([*HALVES.items()])
  attempt.does = f"bit {bit} of {leaf}, process {whom} of 2"
  settings = {"steps": FLIP_STEPS, "flags": flags}
  with Run(attempt.workdir, slow=whom, **settings) as run:
    run.wait_for(f"step {SAVE_EVERY + 1 + chance.randrange(FLIP_STEPS // 2)}/")
    half = slice(16 * whom, 16 * (whom + 1))
    resting = Resting(run, whom, leaf, (slice(None),) * dim + (half,))
    element = int(np.abs(resting.array).argmax())
    tries = (resting.flip(element, bit, chance) for _ in range(DRAWS))
    flipped = next((step for step in tries if step is not None), None)
    assert flipped is not None, f"no copy is found in process {whom}"
    run.stalled.unlink(missing_ok=True)
    codes, text = run.end(), run.text()
  attempt.seen.append(f"flipped after step {flipped}")
  assert codes == [1, 1], codes
  wanted = (
    f"step {flipped}: bits of its state have changed in memory before step {flipped + 1} took"
  )
  assert wanted in text, text
  assert re.search(rf"^  {leaf.replace('.', '/')}: device \d+", text, re.MULTILINE), text
  assert max(saved(attempt.workdir)) <= flipped
  attempt.ends_as(attempt.clean(2, flags, steps=FLIP_STEPS), **settings)


def _clean(attempt: Attempt, never: str, *flags: str) -> None:
  """Makes many steps that nothing disturbs, and checks that something is not said."""
  attempt.does = f"{CLEAN_STEPS} clean steps"
  more = ("--config.metrics.every_steps=10", "--config.checkpoint.every_steps=500")
  began = time.monotonic()
  with Run(attempt.workdir, steps=CLEAN_STEPS, flags=(*QUICK, *more, *flags)) as run:
    while not run.poll():
      assert never not in run.text(), "a false alarm"
      time.sleep(1)
    run.ends(0)
    assert never not in run.text(), "a false alarm"
  assert story(attempt.workdir)[-1][0] == CLEAN_STEPS
  attempt.seen.append(f"{(time.monotonic() - began) / CLEAN_STEPS * 1000:.0f} ms a step")


# ------------------------------ a slow process ------------------------------

SLOW_STEPS = 150
# Milliseconds in which it runs, and in which it is stopped: a third of the time is left to it.
CYCLES = ((10, 20), (20, 40), (50, 100), (33, 67))


@row(
  16,
  fault="a process three times slower; 2,000 clean steps",
  passes="named within 10 steps; no false alarm",
  trials=20,
  seconds=35,
  usual=21,
  note="SIGSTOP and SIGCONT in turns of 30 to 150 ms leave a third of the time to one process. "
  "The last trial is the clean one.",
)
def slow_process(attempt: Attempt) -> None:
  """Stops a process for two thirds of the time, in short turns; the last trial leaves all alone."""
  number = attempt.number
  if number % 21 == 20:
    _clean(attempt, "times slower than")
    return
  count, slow = (4, number % 4) if number % 5 == 4 else (2, number % 2)
  on, off = CYCLES[number % len(CYCLES)]
  attempt.does = f"{count} processes, process {slow} runs {on} ms and is stopped {off} ms"
  flags = (*same.KEPT, *QUICK)
  with Run(attempt.workdir, count=count, steps=SLOW_STEPS, flags=flags) as run:
    run.wait_for(f"step {attempt.chance.randint(20, 50)}/")
    slow_down(attempt, run, slow, on, off)
    run.ends(0)
  same.check(attempt.workdir, attempt.clean(count, flags, steps=SLOW_STEPS).record)


def slow_down(
  attempt: Attempt, run: Run, slow: int, on: int, off: int, most_steps: int = LEAST_STEPS
) -> None:
  """Makes a process slow until it is named, and checks that this is soon, and nobody else is.

  Args:
    attempt: a trial.
    run: under way.
    slow: index of the process.
    on: milliseconds in which it runs.
    off: milliseconds in which it is stopped, in turn.
    most_steps: within which it must be named.
  """
  before, pid = done(run), run.pids()[slow]
  said = re.compile(r"WARNING: process (\d+) \(.*\) is ([\d.]+) times slower .* last (\d+) steps")
  assert not said.search(run.text()), "a false alarm"
  with contextlib.suppress(ProcessLookupError):
    while not run.poll() and not said.search(run.text()):
      for number, milliseconds in ((signal.SIGSTOP, off), (signal.SIGCONT, on)):
        os.kill(pid, number)
        time.sleep(milliseconds / 1000)
  found = said.search(run.text())
  assert found, "it is not named"
  named_after = int(re.findall(r"^step (\d+)/", run.text()[: found.start()], re.MULTILINE)[-1])
  attempt.seen.append(f"{found[2]} times slower, named after {named_after - before} steps")
  assert int(found[1]) == slow, f"process {found[1]} is named"
  assert named_after - before <= most_steps


# ------------------------------ the cache, and what is left ------------------------------

CACHE_STEPS = 3
DAMAGES = {
  "cut in half": lambda content: content[: len(content) // 2],
  "a byte short": lambda content: content[:-1],
  "empty": lambda content: b"",
  "garbage": lambda content: os.urandom(len(content)),
}


@row(
  19,
  fault="a truncated compilation cache entry; shared memory after row 1",
  passes="repaired; nothing leaked",
  trials=10,
  seconds=25,
  note="Even trials damage the largest entry. Odd ones kill a run that has just prepared its "
  "data, and inspect /dev/shm and the folder for temporary files.",
)
def cache_and_leftovers(attempt: Attempt) -> None:
  """Damages an entry of the compilation cache (even trials), or looks for leftovers of kills."""
  if attempt.number % 2:
    _leftovers(attempt)
  else:
    _cache(attempt)


def _cache(attempt: Attempt) -> None:
  """Damages a stored program: the next start replaces it, and all make the same steps.

  Entries of JAX's own cache are damaged in tests/runtime/test_compilation_cache.py: those of a run
  this small compile too quickly to be kept.
  """
  kind = list(DAMAGES)[attempt.number // 2 % len(DAMAGES)]
  attempt.does = f"the largest entry of the cache {kind}"
  cache = attempt.folder / "cache"
  flags = (*QUICK, f"--config.compilation_cache_dir={cache}")
  stories = []
  for name in ("first", "second", "third"):
    with Run(attempt.folder / name, steps=CACHE_STEPS, flags=flags) as run:
      run.ends(0)
      assert "Error reading persistent" not in run.text()
    stories.append(story(attempt.folder / name))
    entry = max(cache.glob("executables/*.executable"), key=lambda path: path.stat().st_size)
    content = entry.read_bytes()
    whole = hashlib.sha256(content[64:]).hexdigest().encode() == content[:64]
    assert whole, "it is not replaced"
    if name == "first":
      entry.write_bytes(DAMAGES[kind](content))
      attempt.seen.append(f"{len(content)} bytes")
  assert stories[0] == stories[1] == stories[2] != []


def _leftovers(attempt: Attempt) -> None:
  """Kills all processes of a run that has prepared its data, and looks at what is left of it."""
  moment = moments.RUNNING[attempt.number // 2 % len(moments.RUNNING)]
  attempt.does = f"leftovers of a kill {moments.title(moment)}"
  temporary, data = attempt.folder / "temporary", attempt.folder / "data"
  temporary.mkdir()
  shared = pathlib.Path("/dev/shm")
  before = {path.name for path in shared.iterdir()}
  environment = {"TMPDIR": str(temporary), "TFDS_DATA_DIR": str(data)}
  flags = moments.flags(moment, QUICK)
  with Run(attempt.workdir, flags=flags, environment=environment) as run:
    moment(run, attempt)
    for pid in run.pids():
      os.kill(pid, signal.SIGKILL)
    run.ends(-signal.SIGKILL)
  left = [path.name for path in temporary.iterdir()]
  left += [f"/dev/shm/{path.name}" for path in shared.iterdir() if path.name not in before]
  assert left == [], ", ".join(left)
