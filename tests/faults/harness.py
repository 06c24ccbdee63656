"""Runs of several real processes, disturbed from outside, and what became of them."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import psutil

from processes.listening import free_port
from tests.helpers.compiling import FAST
from tests.helpers.forks import Forks

ROOT = pathlib.Path(__file__).parents[2]
SITES = pathlib.Path(__file__).parent  # the folders in it with a sitecustomize.py
STEPS, EVALUATE_EVERY, SAVE_EVERY = 100, 15, 10
HEARTBEAT_SECONDS = 10
LEAVING_SECONDS = 3.0  # for helpers to end after their process, on a machine that is busy
FAMILY_SECONDS = 0.5  # between two looks at who is there
PATIENCE_SECONDS = 240  # for what takes seconds, on a machine that is busy
# processes -> sizes of data and tensor; a device each, two where there is one process
MESHES = {1: (2, 1), 2: (2, 1), 4: (2, 2)}
SHARED = (
  "--config.data.global_batch_size=24",
  f"--config.evaluation.every_steps={EVALUATE_EVERY}",
  "--config.evaluation.steps=5",
  "--config.metrics.every_steps=1",
  "--config.metrics.report=False",
  "--config.metrics.tensorboard=false",
  f"--config.checkpoint.every_steps={SAVE_EVERY}",
  f"--config.compiler_options={FAST}",
  f"--config.processes.heartbeat_seconds={HEARTBEAT_SECONDS}",
)
FLAGS = (
  "--config=configs/dp4_tp2.py",
  "--config.model.layers=1",
  "--config.model.model_size=32",
  "--config.model.feedforward_size=48",
  "--config.data.sequence_length=16",
  "--config.data.evaluation_split=test[:1]",
  "--config.evaluation.sample_tokens=8",
  *SHARED,
)
# A classifier, which starts in half the time.
CLASSIFIER = ("--config=configs/dp4_tp2.py:mlp", "--config.model.model_size=16", *SHARED)
# Compiling the last words takes a tenth of the time.
QUICK = ("--config.evaluation.sample_tokens=0",)


def arguments(
  workdir: pathlib.Path, *, count: int, steps: int, flags: Sequence[str], common: Sequence[str]
) -> list[str]:
  """Returns the arguments of main.py, the same for each of so many processes."""
  data, tensor = MESHES[count]
  mesh = [f"--config.mesh.data={data}", f"--config.mesh.tensor={tensor}"]
  return [*common, *mesh, f"--config.training.steps={steps}", *flags, f"--workdir={workdir}"]


def inherited() -> dict[str, str]:
  """Returns the variables of a person's shell: main.py itself sets NPROC."""
  return {key: value for key, value in os.environ.items() if key != "NPROC"}


class Run:
  """The processes of a run, from one start on; a context manager that leaves none behind.

  Attributes:
    count: how many.
    launcher: whether `processes.launch` has started them.
    workdir: of the run.
    port: of the coordinator, where no launcher chooses one.
    stalled: the file that stops the reading of one, while it is there.
    popens: what was started, the launcher alone where one starts them.
    codes: as of Popen, of each of these.
    ended: when they had these codes, by the monotonic clock.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    *,
    count: int = 2,
    launcher: bool = False,
    restarts: int = 0,
    replacements: int = 0,
    options: Sequence[str] = (),
    slow: int | None = None,
    steps: int = STEPS,
    flags: Sequence[str] = (),
    common: Sequence[str] = FLAGS,
    environment: Mapping[str, str] | None = None,
    forks: Forks | None = None,
    within: Sequence[Sequence[str]] = (),
    first_host: str = "localhost",
  ):
    """Starts it, or lets it go on.

    Args:
      workdir: of the run; what is printed goes to files beside it.
      count: how many processes.
      launcher: whether `processes.launch` starts them, and not this class.
      restarts: the launcher's.
      replacements: likewise.
      options: more of the launcher's.
      slow: the process whose reading `stall` stops.
      steps: that the run makes.
      flags: more of them.
      common: those that come first, where they are not those of most rows.
      environment: more variables.
      forks: starts them as forks; None: as new interpreters.
      within: of each process, the command that starts its own (`nsenter`).
      first_host: where process 0 is, for the others.
    """
    self.count, self.launcher, self.workdir = count, launcher, workdir
    self.stalled = workdir.with_name(f"{workdir.name}-stalled")
    self._family: dict[psutil.Process, None] = {}
    self._looked = 0.0
    told = arguments(workdir, count=count, steps=steps, flags=flags, common=common)
    command = ["main.py", *told]
    if launcher:
      counts = {"processes": count, "restarts": restarts, "replacements": replacements}
      options = [*(f"--{name}={n}" for name, n in counts.items()), *options]
      command = ["-m", "processes.launch", *options, "--", sys.executable, *command]
    self.port = free_port()
    self._outputs, self.popens = [], []
    self._texts: dict[pathlib.Path, tuple[int, str]] = {}  # as of the last look: size and text
    number = len(list(workdir.parent.glob(f"{workdir.name}-*.out")))
    for index in range(1 if launcher else count):
      one = {**inherited(), "PYTHONUNBUFFERED": "1", "MESHWRIGHT_TOKEN": "the same for a trial"}
      if not launcher:
        one["JAX_COORDINATOR_ADDRESS"] = f"{first_host}:{self.port}"
        one |= {"JAX_NUM_PROCESSES": str(count), "JAX_PROCESS_ID": str(index)}
      if slow is not None:
        one |= {"PYTHONPATH": str(SITES / "outside"), "FAULTS_PROCESS": str(slow)}
        one["FAULTS_STALL"] = str(self.stalled)
      one |= environment or {}
      out = workdir.with_name(f"{workdir.name}-{number + index}.out")
      out.touch()
      self._outputs.append(out)
      if forks:
        self.popens.append(forks.start(command, environment=one, out=out))
      else:
        whole = [*(within[index] if within else ()), sys.executable, *command]
        self.popens.append(started(whole, out, one))
    self.codes: list[int | None] = [None] * len(self.popens)
    self.ended: list[float] = [0.0] * len(self.popens)

  def __enter__(self) -> "Run":
    """Returns itself."""
    return self

  def __exit__(self, *exception) -> None:
    """Kills what is left."""
    self.stalled.unlink(missing_ok=True)
    for process in [*self._left(), *self.popens]:
      with contextlib.suppress(psutil.Error, OSError):
        process.kill()
    for popen in self.popens:
      popen.wait()

  # ------------------------------ look ------------------------------

  def text(self) -> str:
    """Returns what was printed so far, process after process; reads only what has grown."""
    for path in self._outputs:
      if (size := path.stat().st_size) != self._texts.get(path, (-1, ""))[0]:
        self._texts[path] = size, path.read_text(errors="replace")
    return "".join(text for _, text in self._texts.values())

  def pids(self) -> list[int]:
    """Returns the ids of the processes; those of the launcher's last start."""
    if not self.launcher:
      return [popen.pid for popen in self.popens]
    found = re.findall(r"launch: started .*\(pid ([\d, ]+)\)", self.text())
    return [int(pid) for pid in found[-1].split(", ")] if found else []

  def poll(self) -> bool:
    """Takes note of what has ended, and of who is there; returns whether all have ended."""
    if time.monotonic() - self._looked > FAMILY_SECONDS:
      self.meet()
    for index, popen in enumerate(self.popens):
      if self.codes[index] is None and popen.poll() is not None:
        self.codes[index], self.ended[index] = popen.returncode, time.monotonic()
    return None not in self.codes

  def until(self, condition: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> bool:
    """Waits for a condition, not beyond the end of all; returns whether it holds."""
    end = time.monotonic() + seconds
    while not condition():
      if self.poll() or time.monotonic() > end:
        return bool(condition())
      time.sleep(0.005)
    return True

  def wait_until(self, condition: Callable[[], object], what: str) -> None:
    """Waits until a condition holds; fails where all have ended before."""
    assert self.until(condition), f"waited in vain for {what}: {self.codes}\n{self.text()}"

  def wait_for(self, text: str, times: int = 1) -> None:
    """Waits until a text was printed so many times."""
    self.wait_until(lambda: self.text().count(text) >= times, text)

  def said(self, text: str, times: int = 1) -> bool:
    """Waits until a text was printed so many times, or to the end; returns whether it was."""
    return self.until(lambda: self.text().count(text) >= times)

  def sleep(self, seconds: float) -> bool:
    """Waits that long, unless all end before; returns whether some still run."""
    self.until(lambda: False, seconds)
    return not self.poll()

  def last_line(self) -> str:
    """Returns the last line that process 0 has printed so far, shortened, without gloo's."""
    text = self._outputs[0].read_text(errors="replace")
    lines = [line for line in text.splitlines() if line.strip() and "peer ranks" not in line]
    return lines[-1][:80] if lines else "nothing is printed yet"

  def end(self, indices: Sequence[int] | None = None, seconds: float = PATIENCE_SECONDS) -> list:
    """Waits for the end of all, or of some; returns the codes, None of what still runs."""
    some = range(len(self.codes)) if indices is None else indices
    self.until(lambda: all(self.codes[index] is not None for index in some), seconds)
    return self.codes

  def ends(self, *codes: int, seconds: float = PATIENCE_SECONDS) -> None:
    """Waits for the end of all, with one of these codes each and nothing left behind."""
    self.end(seconds=seconds)
    assert {*self.codes} <= {*codes}, f"{self.codes}\n{self.text()[-2000:]}"
    assert self.left_behind() == []

  def meet(self) -> None:
    """Takes note of all processes that those of the run have started by now."""
    self._looked = time.monotonic()
    for popen in self.popens:
      with contextlib.suppress(psutil.Error):
        process = psutil.Process(popen.pid)
        self._family.update(dict.fromkeys([process, *process.children(recursive=True)]))

  def left_behind(self) -> list[psutil.Process]:
    """Returns the processes that stay, and run with this workdir or were started by one that did.

    What ends within LEAVING_SECONDS is none of them: the reader of stderr outlives its process.
    """
    until = time.monotonic() + LEAVING_SECONDS
    while (left := self._left()) and time.monotonic() < until:
      time.sleep(0.05)
    return left

  def _left(self) -> list[psutil.Process]:
    found = [process for process in self._family if _runs(process)]
    for process in psutil.process_iter(["cmdline", "status"]):
      words = process.info["cmdline"] or []
      if f"--workdir={self.workdir}" in words and process.info["status"] != psutil.STATUS_ZOMBIE:
        found.append(process)
    return [*dict.fromkeys(found)]

  # ------------------------------ disturb ------------------------------

  def signal(self, index: int, number: signal.Signals) -> float:
    """Sends a signal to a process; returns when, by the monotonic clock."""
    os.kill(self.pids()[index], number)
    return time.monotonic()

  def stall(self, text: str = "") -> float:
    """Stops the reading of the slow process; with the text `end` there is no more. Returns when."""
    whole = self.stalled.with_suffix(".written")
    whole.write_text(text)
    whole.rename(self.stalled)
    return time.monotonic()


@dataclasses.dataclass(frozen=True)
class Answer:
  """What a command has ended with."""

  code: int
  out: str
  err: str


class Commands(Forks):
  """Command lines of main.py, one after another, each in a fork of a process that has it all."""

  def __init__(self, folder: pathlib.Path):
    """Starts nothing yet; `folder` gets what commands print."""
    super().__init__()
    self._files = folder / "command.out", folder / "command.err"

  def run(self, *arguments: str, **environment: str) -> Answer:
    """Runs a command, with these variables besides; one that does not end in time fails."""
    out, err = self._files
    for file in self._files:
      file.unlink(missing_ok=True)
    command, variables = ["main.py", *arguments], inherited() | environment
    fork = self.start(command, out=out, err=err, environment=variables)
    try:
      code = fork.wait(PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
      os.killpg(fork.pid, signal.SIGKILL)
      raise AssertionError(f"it hangs: {PATIENCE_SECONDS} s have not been enough") from None
    return Answer(
      code, *(file.read_bytes().decode(errors="surrogateescape") for file in self._files)
    )


def started(
  command: Sequence[str], out: pathlib.Path, environment: Mapping[str, str]
) -> subprocess.Popen:
  """Starts a command at the root of the tree, which prints to the end of a file."""
  with open(out, "ab") as output:
    return subprocess.Popen(
      command,
      cwd=ROOT,
      env=environment,
      stdin=subprocess.DEVNULL,
      stdout=output,
      stderr=subprocess.STDOUT,
    )


def _runs(process: psutil.Process) -> bool:
  try:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
  except psutil.Error:
    return False


def aborted(code: int | None) -> bool:
  """Returns whether a process ended as the others of a failed one do: by itself or by JAX."""
  return code in (1, -signal.SIGABRT)


def refused(codes: Sequence[int | None]) -> bool:
  """Returns whether a run was refused: 2 by whoever saw the reason, 1 by those that were told."""
  return 2 in codes and {*codes} <= {1, 2}


def named(text: str, index: int) -> bool:
  """Returns whether somebody has named a process as the one that the others wait for."""
  signs = rf"(behind:|heartbeat from|no answer from) process ([^;]*\), )?{index}\b"
  return re.search(signs, text) is not None


def lines_of(workdir: pathlib.Path) -> list[dict]:
  """Returns the whole lines of metrics.jsonl, [] without one; the last may be torn by a kill."""
  path = workdir / "metrics.jsonl"
  lines = path.read_text().splitlines(keepends=True) if path.exists() else []
  return [json.loads(line) for line in lines if line.endswith("\n")]


def story(workdir: pathlib.Path) -> list[tuple[int, str]]:
  """Returns (step, its numbers) of each line of metrics.jsonl that has any.

  Of its numbers the text, by names: the same text is the same bits.
  """
  lines = []
  for values in lines_of(workdir):
    kept = {k: v for k, v in values.items() if k in ("loss", "grad_norm") or k.startswith("eval")}
    if kept:
      lines.append((values["step"], repr(sorted(kept.items()))))
  return lines


def saved(workdir: pathlib.Path) -> list[int]:
  """Returns the steps that are saved."""
  folder = workdir / "checkpoints"
  return sorted(int(path.name) for path in folder.glob("*") if path.name.isdigit())
