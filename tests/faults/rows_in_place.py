"""Rows 37 to 39: recovery in place from memory, a full memory, and fewer replicas for a while."""

import collections
import contextlib
import math
import os
import pathlib
import re
import signal

from tests.faults import same
from tests.faults.frame import Attempt, Pace, row
from tests.faults.harness import CLASSIFIER, Run, lines_of, story
from tests.faults.hosts import Hosts
from tests.faults.rows_kills import kill_all, resumed
from tests.faults.rows_memory import REPLICATED, SHARDED, STORED_EVERY, flags_of, memory_of

STEPS = 90
GOES_ON = "resumes from the checkpoint of step"
PLACE = {"launcher": True, "steps": STEPS, "common": CLASSIFIER}


def count_of(attempt: Attempt) -> int:
  """Returns how many processes a trial has."""
  return 4 if attempt.number % 3 == 2 else 2


def clean_of(attempt: Attempt, flags: tuple[str, ...]) -> Pace:
  """Returns a run that nothing disturbs: nothing is in memory, and all replicas are there."""
  return attempt.clean(count_of(attempt), flags, steps=STEPS, common=CLASSIFIER)


def done(run: Run) -> int:
  """Returns the last step whose numbers are written; 0 before the first."""
  return max((step for step, _ in story(run.workdir)), default=0)


def killed_after(run: Run, step: int, *indices: int) -> tuple[int, int]:
  """Kills processes after a step; returns from which step the run goes on, and what was done."""
  run.wait_until(lambda: done(run) >= step, f"step {step}")
  pids, before = run.pids(), len(run.text())
  for index in indices:
    with contextlib.suppress(ProcessLookupError):  # process 0 has died, and JAX has ended it
      os.kill(pids[index], signal.SIGKILL)
  steps = done(run)
  run.wait_until(lambda: GOES_ON in run.text()[before:], "where it goes on")
  return resumed(run.text()[before:]), steps


@row(
  37,
  fault="checkpoints in memory and `processes.launch --replacements`: SIGKILL of one of 2 or 4 "
  "processes, of process 0, or of two of 4",
  passes="what died is replaced, or JAX ends all, which are replaced; the state is taken from "
  "memory, at most two steps are made again; Same; no copy is left",
  trials=12,
  seconds=40,
  note="Shards and replicas in turn.",
)
def in_place_from_memory(attempt: Attempt) -> None:
  """Kills one or two processes, which are replaced, and take the state from memory."""
  chance, number = attempt.chance, attempt.number
  count, layout = count_of(attempt), (SHARDED, REPLICATED)[number % 2]
  first = chance.randrange(count)
  killed = (first, (first + 2) % count) if number % 6 == 5 else (first,)
  step = chance.randrange(STORED_EVERY + 3, 2 * STORED_EVERY - 2)
  kind = "sharded" if layout is SHARDED else "replicated"
  attempt.does = f"{kind}, processes {[*killed]} of {count} after step {step}"
  given = {"count": count, "replacements": 3 * count, "flags": flags_of(layout, count, 1)}
  with Run(attempt.workdir, **PLACE, **given) as run:
    at, before = killed_after(run, step, *killed)
    assert "in memory" in (text := run.text()), text
    run.ends(0)
    stayed = run.text().count("abandons the step")
  attempt.seen.append(f"{stayed} stayed, {before - at} of {before} steps made again")
  assert at >= before - 2, f"{at}, {before}"
  assert not memory_of(attempt.workdir).exists(), "copies are left"
  same.check(attempt.workdir, clean_of(attempt, flags_of(layout, count, 0)).record)


@row(
  38,
  fault="checkpoints in memory and a /dev/shm that is full from the start, or that fills while the "
  "run is under way; it stays so, or is empty again; then SIGKILL of one of 2 or 4 processes",
  passes="the run goes on, with a message where a save is given up; what died is replaced; it "
  "resumes from storage or from memory, from memory where there is space again; Same",
  trials=12,
  seconds=45,
  note="The host is a namespace with a /dev/shm of its own, which takes root.",
)
def full_memory(attempt: Attempt) -> None:
  """Fills /dev/shm before the first step or later, for a while or for good, and kills a process."""
  at_start, for_good = attempt.number % 2 == 0, attempt.number // 2 % 2 == 0
  count, step = count_of(attempt), attempt.chance.randrange(4, 12)
  killed = attempt.chance.randrange(count)
  when = "from the start" if at_start else f"after step {step}"
  attempt.does = f"full {when}, {'for good' if for_good else 'for a while'}; process {killed} dies"
  with Hosts(attempt.folder / "host", 1, "8m") as hosts:
    fill = "head -c 64m /dev/zero > /dev/shm/of_others 2> /dev/null; df /dev/shm | grep 100%"
    if at_start:
      hosts.shell(0, fill)
    flags = flags_of(SHARDED, count, 1)
    given = {"count": count, "replacements": 3 * count, "flags": flags}
    with Run(attempt.workdir, **PLACE, **given, within=[hosts.entered(0)]) as run:
      run.wait_until(lambda: done(run) >= step, f"step {step}")
      if not at_start:
        hosts.shell(0, fill)
      run.wait_until(lambda: done(run) >= STORED_EVERY + step, "more steps")
      if not for_good:
        hosts.shell(0, "rm /dev/shm/of_others")
      at, before = killed_after(run, 2 * STORED_EVERY + step, killed)
      run.ends(0)
      text = run.text()
      given_up = " to memory is given up: " in text
    left = hosts.shell(0, "find /dev/shm -type f -not -name of_others")
  attempt.seen.append(f"{'saves' if given_up else 'no save'} given up, {before - at} of {before}")
  assert given_up or not at_start, text
  assert at >= (before - 2 if not for_good else 2 * STORED_EVERY), f"{at}, {before}"
  assert at % STORED_EVERY == 0 or not (at_start and for_good), f"{at} is in no memory"
  assert not left, left
  same.check(attempt.workdir, clean_of(attempt, flags_of(SHARDED, count, 0)).record)


@row(
  39,
  fault="training.elastic: SIGKILL of one of 2 or 4 processes, or of two, not replaced; then all "
  "are back, or are killed and started again; with and without checkpoints in memory",
  passes="goes on with fewer data replicas, then with all; each step appears once, losses within "
  "1e-12 of those of the whole mesh (float64)",
  trials=12,
  seconds=60,
  note="The processes are back at once, mostly at a step before that of the death, of which the "
  "mesh before has left copies in memory.",
)
def fewer_for_a_while(attempt: Attempt) -> None:
  """Kills one or two processes; the others go on, and soon all."""
  chance, number = attempt.chance, attempt.number
  count, every = count_of(attempt), int(number % 4 < 3)
  killed = chance.sample(range(count), 2 if number % 6 == 5 else 1)
  step = chance.randrange(2 * STORED_EVERY - 5, 2 * STORED_EVERY - 1)
  crash = number % 2 == 0
  then = "the others are killed, all started" if crash else "all are back"
  attempt.does = f"processes {killed} of {count} after step {step}, then {then}"
  attempt.does += ", with checkpoints in memory" if every else ""
  clean_flags = (*flags_of(REPLICATED, count, 0), "--config.training.parameter_dtype=float64")
  flags = (*clean_flags, *flags_of(REPLICATED, count, every), "--config.training.elastic=True")
  given = {"count": count, "flags": flags}
  with Run(attempt.workdir, **PLACE, **given, options=["--return_seconds=0"]) as run:
    at, _ = killed_after(run, step, *killed)
    assert at == STORED_EVERY, f"{at}: what is in memory is of another mesh"
    run.wait_until(lambda: at < done(run) < step, "a step of the smaller mesh")
    if not crash:
      run.popens[0].send_signal(signal.SIGUSR2)
      run.ends(0)
    else:
      kill_all(run)
    text = run.text()
  if crash:
    with Run(attempt.workdir, **PLACE, **given) as run:
      run.ends(0)
      text += run.text()
  assert f"elastic: {count - len(killed)} of {count} data replicas" in text, text
  resumed_at = [
    int(step) for step in re.findall(r"resumes from the checkpoint of step (\d+)", text)
  ]
  attempt.seen.append(f"resumes from {resumed_at}")
  assert len(resumed_at) == 2, text
  found, wanted = map(numbers, (attempt.workdir, clean_of(attempt, clean_flags).workdir))
  assert [*found] == [*wanted], f"{[*found]} instead of {[*wanted]}"
  for one, value in wanted.items():
    assert math.isclose(found[one], value, rel_tol=1e-12), f"{one}: {found[one]}, not {value}"


def numbers(workdir: pathlib.Path) -> dict[tuple[str, int, int], float]:
  """Returns (name, step, line among those of the step) -> each loss, in the order of the lines."""
  found, lines = {}, collections.Counter()
  for line in lines_of(workdir):
    for name in ("loss", "eval_loss"):
      if name in line:
        lines[name, line["step"]] += 1
        found[name, line["step"], lines[name, line["step"]]] = line[name]
  return found
