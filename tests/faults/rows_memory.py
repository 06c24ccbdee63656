"""Rows 34 to 36: what is lost of a run whose checkpoints are in memory, and where it resumes."""

import contextlib
import os
import pathlib
import shutil
import signal
from collections.abc import Callable, Sequence

from tests.faults import same
from tests.faults.frame import Attempt, Pace, row
from tests.faults.harness import CLASSIFIER, Run, saved, story
from tests.faults.hosts import ADDRESS, Hosts
from tests.faults.rows_kills import resumed
from training.checkpointing.memory_copies import RUN_ID, SHARED_MEMORY

STEPS = 40
STORED_EVERY = 15
FLAGS = (f"--config.checkpoint.every_steps={STORED_EVERY}", "--config.checkpoint.keep=1")
# Shards that one process has, and copies of them that its peer has; or replicas.
SHARDED = ("--config.mesh.data=1", "--config.mesh.tensor=1", "--config.mesh.fsdp={count}")
REPLICATED = ("--config.mesh.data={count}", "--config.mesh.tensor=1")


def flags_of(layout: Sequence[str], count: int, every: int) -> tuple[str, ...]:
  """Returns the flags of a run in a layout, which saves to memory every so many steps; 0: never."""
  mesh = [flag.format(count=count) for flag in layout]
  return (*FLAGS, *mesh, *([f"--config.checkpoint.memory_every_steps={every}"] if every else []))


def clean_of(attempt: Attempt, layout: Sequence[str], count: int) -> Pace:
  """Returns a run that nothing disturbs, without a checkpoint in memory."""
  return attempt.clean(count, flags_of(layout, count, 0), steps=STEPS, common=CLASSIFIER)


def memory_of(workdir: pathlib.Path) -> pathlib.Path:
  """Returns the folder in memory of the run in a workdir."""
  return pathlib.Path(SHARED_MEMORY) / f"meshwright-{os.getuid()}" / (workdir / RUN_ID).read_text()


# ------------------------------ processes of one host ------------------------------


@row(
  34,
  fault="checkpoints in memory: SIGKILL of one or two of 2 or 4 processes of a host, at any step; "
  "their copies stay, one's is lost, or all are",
  passes="resumes from the newest step in memory, or from storage where all copies are lost; at "
  "most two intervals of memory made again; Same; no copy is left",
  trials=48,
  seconds=40,
  note="Shards that one process has and its peer a copy of, and replicas, in turn.",
)
def processes_of_one_host(attempt: Attempt) -> None:
  """Kills processes at any step; in turn their copies stay, are lost, or are all lost."""
  chance, number = attempt.chance, attempt.number
  layout = (SHARDED, REPLICATED)[number % 2]
  count, every = (4, 2)[number % 3 > 0], chance.choice((1, 1, 2, 3))
  killed = sorted(chance.sample(range(count), 2 if number % 4 == 3 else 1))
  lost = ((), killed[:1], range(count))[number // 2 % 3]
  # Of two processes neither has a copy of its own that the other one's does not replace.
  attempt.does = (
    f"{count} processes, {'sharded' if layout is SHARDED else 'replicated'}, saved every {every} "
    f"steps, killed: {killed}, copies lost of: {[*lost]}"
  )
  step, workdir, flags = chance.randrange(4, STEPS - 3), attempt.workdir, ()
  flags = flags_of(layout, count, every)
  settings = {"count": count, "launcher": True, "restarts": 1, "steps": STEPS, "flags": flags}
  with Run(workdir, **settings, common=CLASSIFIER) as run:
    run.wait_for(f"step {step}/")
    pids = run.pids()
    for index in killed:
      with contextlib.suppress(ProcessLookupError):
        os.kill(pids[index], signal.SIGKILL)
    for index in lost:
      shutil.rmtree(memory_of(workdir) / f"process-{index}", ignore_errors=True)
    run.wait_for("launch: restart 1 of")
    stored, done = max(saved(workdir), default=0), story(workdir)[-1][0]
    assert run.end() == [0], run.text()
    at = resumed(run.text().partition("launch: restart 1 of")[2])
  attempt.seen.append(f"{done - at} of {done} steps made again")
  assert at >= (stored if len(lost) == count else done - 2 * every), f"{at}, {done}, {stored}"
  assert at == stored or len(lost) != count, f"{at} is in no memory"
  assert not memory_of(workdir).exists(), "copies are left"
  same.check(workdir, clean_of(attempt, layout, count).record)


# ------------------------------ hosts ------------------------------


@row(
  35,
  fault="checkpoints in memory of 2 hosts: one is replaced by an empty one, both are, a bit of a "
  "copy changes, there is no space for any",
  passes="resumes from memory by what the other host sends; from storage; from an intact copy; "
  "the run continues with a message, and resumes from storage. Same; no copy is left",
  trials=24,
  seconds=60,
  note="Hosts are namespaces with a name and a /dev/shm of their own, which takes root. 4 "
  "processes, sharded over all.",
)
def hosts_are_lost(attempt: Attempt) -> None:
  """Takes hosts with all they have away, changes a bit of a copy, or leaves no space for any."""
  what = (one_host_lost, a_bit_changed, hosts_lost, no_space)
  disturb = what[attempt.number % len(what)]
  attempt.does = f"4 processes on 2 hosts: {disturb.__doc__.partition('.')[0]}"
  size = "16k" if disturb is no_space else "64m"
  flags, pair = flags_of(SHARDED, 4, attempt.chance.choice((1, 2))), (0, 0, 1, 1)
  step = attempt.chance.randrange(STORED_EVERY + 2, STEPS - 3)
  with Hosts(attempt.folder / "hosts", 2, size) as hosts:
    within = [hosts.entered(host) for host in pair]
    settings = {"count": 4, "steps": STEPS, "flags": flags, "common": CLASSIFIER}
    with Run(attempt.workdir, **settings, within=within) as run:
      run.wait_for(f"step {step}/")
      for popen in run.popens:
        popen.kill()
      run.end()
      assert run.left_behind() == []
      at_kill = run.text()
    stored, done = max(saved(attempt.workdir), default=0), story(attempt.workdir)[-1][0]
    from_memory = disturb(attempt, hosts)
    with Run(attempt.workdir, **settings, within=within) as run:
      run.ends(0)
      at = resumed(run.text())
      assert disturb is not one_host_lost or "from another process" in run.text(), run.text()
      assert ("is given up" in at_kill) == (disturb is no_space), at_kill
    left = [hosts.shell(host, "find /dev/shm -type f") for host in range(2)]
  attempt.seen.append(f"{done - at} of {done} steps made again")
  assert at >= done - 4 if from_memory else at == stored, f"{at}, {done}, {stored}"
  assert not any(left), left
  same.check(attempt.workdir, clean_of(attempt, SHARDED, 4).record)


@row(
  36,
  fault="checkpoints in memory: SIGSTOP of one of 4 processes; the network between two hosts is "
  "cut",
  passes="the launcher kills the stopped one and names it; all end within 60 s of the cut; they "
  "resume from memory; at most two steps made again; Same",
  trials=12,
  seconds=60,
  note="Hosts are namespaces with networks of their own, which takes root.",
)
def stopped_or_cut(attempt: Attempt) -> None:
  """Stops a process by SIGSTOP under the launcher; cuts the network between two hosts."""
  step = attempt.chance.randrange(STORED_EVERY + 2, STEPS - 5)
  act = stopped if attempt.number % 2 == 0 else partitioned
  attempt.does = f"{act.__doc__.partition('.')[0]}, after step {step}"
  done, text = act(attempt, step)
  at = resumed(text)
  attempt.seen.append(f"{done - at} of {done} steps made again")
  assert at >= done - 2, f"{at}, {done}"
  same.check(attempt.workdir, clean_of(attempt, SHARDED, 4).record)


def stopped(attempt: Attempt, step: int) -> tuple[int, str]:
  """SIGSTOP of one of 4 processes, which are restarted."""
  flags = flags_of(SHARDED, 4, 1)
  settings = {"count": 4, "launcher": True, "restarts": 1, "replacements": 4, "steps": STEPS}
  with Run(attempt.workdir, **settings, flags=flags, common=CLASSIFIER) as run:
    run.wait_for(f"step {step}/")
    index = attempt.chance.randrange(4)
    run.signal(index, signal.SIGSTOP)
    run.wait_for("launch: restart 1 of")
    done = story(attempt.workdir)[-1][0]
    assert f"launch: process {index} is stopped (SIGSTOP); killed" in run.text(), run.text()
    run.ends(0)
    return done, run.text().partition("launch: restart 1 of")[2]


def partitioned(attempt: Attempt, step: int) -> tuple[int, str]:
  """The link between 2 hosts of 2 processes each is cut, and is there again for the next start."""
  flags = flags_of(SHARDED, 4, 1)
  with Hosts(attempt.folder / "hosts", 2, linked=True) as hosts:
    given = {"count": 4, "steps": STEPS, "flags": flags, "common": CLASSIFIER}
    given |= {"within": [hosts.entered(host) for host in (0, 0, 1, 1)]}
    given["first_host"] = ADDRESS.format(0)
    with Run(attempt.workdir, **given) as run:
      run.wait_for(f"step {step}/")
      hosts.link("down")
      run.sleep(60)
      assert None not in run.codes, f"within 60 s: {run.codes}"
      assert 0 not in run.codes, run.text()
      assert run.left_behind() == []
    done = story(attempt.workdir)[-1][0]
    hosts.link("up")
    with Run(attempt.workdir, **given) as run:
      run.ends(0)
      return done, run.text()


Disturb = Callable[[Attempt, Hosts], bool]  # returns whether memory still has a step


def one_host_lost(attempt: Attempt, hosts: Hosts) -> bool:
  """A host is replaced by one with nothing in its memory."""
  hosts.shell(attempt.chance.randrange(2), "rm -rf /dev/shm/*")
  return True


def hosts_lost(attempt: Attempt, hosts: Hosts) -> bool:
  """Both hosts are replaced."""
  for host in range(2):
    hosts.shell(host, "rm -rf /dev/shm/*")
  return False


def a_bit_changed(attempt: Attempt, hosts: Hosts) -> bool:
  """A bit of the newest copy of a process has changed: the one before, or its peer's, is taken."""
  newest = "ls -t /dev/shm/*/*/process-{0}/*-{0}.own | head -n 1".format(
    attempt.chance.randrange(2)
  )
  script = f"printf x | dd of=$({newest}) bs=1 seek=99 conv=notrunc 2>&1"
  hosts.shell(0, script)
  return True


def no_space(attempt: Attempt, hosts: Hosts) -> bool:
  """Their memory is too small for a copy, from the first step on."""
  del attempt, hosts
  return False
