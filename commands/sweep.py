"""The verb `sweep`: runs of a config, each an ordinary workdir, and what they show together."""

import contextlib
import dataclasses
import itertools
import math
import os
import re
import select
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

from etils import epath
from ml_collections import ConfigDict

from commands import config_flag, flags, sweep_axes
from commands.sweep_axes import SEED
from processes import reaper
from processes.preemption import StopRequest
from reports import run_files, sweep_report
from reports.sweep_report import DONE, FAILED, LEFT, LOST, RUNNING, Entry
from runtime import devices, exit_codes, files, forms
from runtime.printable import printable
from runtime.units import clock
from training import workdir_files
from training.metrics.console import say

LOGS, LINES, TABLE, PAGE = "logs", "runs.txt", "sweep.csv", "sweep.html"
POLL_SECONDS = 0.2
# A second Ctrl-C sooner than a second after the first, or a run that takes longer to save: killed.
SAVE_SECONDS = 120.0
KEEP = 2  # of so many settings that are left, halving keeps one
_BEGINS = ("error: ", "refused: ")  # a line that says why a run has ended
_PROCESS = re.compile(r"\[\d+\] ")  # before each line of a process that a launcher has started
_LAUNCHER = "launch: "  # before its own lines


def run() -> int:
  """Makes the runs that are not there yet; writes the table, the page and sweep.csv."""
  settings, folder = _asked()
  named = zip(sweep_axes.names(settings), settings, strict=True)
  entries = [Entry(name, dict(setting)) for name, setting in named]
  runs = Runs(folder, entries, flags.PARALLEL.value, flags.HOURS.value)
  folder.mkdir(parents=True, exist_ok=True)
  if flags.SLURM.value:
    runs.write()
    _write_array(runs)
    return exit_codes.DONE
  with runs, StopRequest() as runs.stop:
    for until in runs.rungs() if flags.HALVING.value else ():
      runs.advance(until)
      runs.halve(until)
    runs.advance()
  runs.write()
  return exit_code(runs)


def exit_code(runs: "Runs") -> int:
  """Returns the exit code of runs that have ended, and says if the command resumes some."""
  if runs.stop or runs.any(LEFT):
    say(f"stopped: {runs.counts()}; the same command resumes")
    return exit_codes.STOPPED
  if not runs.any(FAILED):
    return exit_codes.DONE
  final = (exit_codes.REFUSED, exit_codes.CHECK_FAILED)
  again = any(one.state == FAILED and one.code not in final for one in runs.entries)
  return exit_codes.FAILED if again else exit_codes.CHECK_FAILED


def _asked() -> tuple[list[sweep_axes.Setting], epath.Path]:
  """Returns the settings and the folder; raises ValueError for what cannot be meant."""
  if not flags.AXES.value:
    example = "--axes='optimizer.learning_rate=0.001,0.002;seed=0,1,2'"
    raise ValueError(f"sweep: what differs between the runs? Give {example}, or a file")
  config, draw, seed = flags.CONFIG.value, flags.RANDOM.value, flags.SEED.value
  settings = sweep_axes.read(flags.AXES.value, draw=draw, seed=seed)
  for one in settings:
    with_setting(config, one)
  if draw < 0:
    raise ValueError("--random is at least 0")
  if flags.LAUNCHER.value and flags.SLURM.value:
    raise ValueError("--launcher: --slurm starts no run; processes/launch/slurm.sh starts them")
  folder = folder_of("sweep", "--slurm makes an array of the runs, ")
  every = config.evaluation.every_steps
  varied = {"training.steps", "evaluation.every_steps"} & {*settings[0]}
  if flags.HALVING.value and (varied or not every):
    raise ValueError(
      "--halving compares runs at the same evaluations: leave training.steps and evaluation."
      f"every_steps out of --axes, and set evaluation.every_steps above 0 (it is {every})"
    )
  return settings, folder


def _launcher() -> list[str]:
  """Returns the words before the command of each run; raises ValueError where they are none."""
  text = flags.LAUNCHER.value
  try:
    words = shlex.split(text)
  except ValueError as error:
    raise ValueError(f"--launcher={text}: {error}") from error
  if words and shutil.which(words[0]) is None:
    raise ValueError(f"--launcher={text}: there is no program {words[0]}")
  return words


def folder_of(verb: str, otherwise: str = "") -> epath.Path:
  """Returns the folder of many runs; raises ValueError for one that cannot be, or bad flags.

  Args:
    verb: that makes them.
    otherwise: what is there in place of --parallel besides --launcher.
  """
  parallel = flags.PARALLEL.value
  if parallel < 1 or not flags.HOURS.value >= 0:
    raise ValueError("--parallel is at least 1, --hours at least 0")
  elsewhere = _launcher()
  if parallel > 1 and not elsewhere and not devices.simulates(flags.SIMULATE.value):
    raise ValueError(
      f"--parallel={parallel}: a run takes all {devices.hardware()} devices of this machine, so "
      f"one runs at a time; {otherwise}--launcher starts them elsewhere"
    )
  folder = epath.Path(flags.WORKDIR.value or f"runs/{config_flag.name(flags.CONFIG)}_{verb}")
  if not files.is_local(folder):
    raise ValueError(f"--workdir={folder}: the folder of a {verb} is a local one")
  if run_files.is_run(folder):
    raise ValueError(
      f"--workdir={folder} is the workdir of a run; a {verb} has a folder of its own"
    )
  return folder


def with_setting(config: ConfigDict, setting: sweep_axes.Setting) -> ConfigDict:
  """Returns a copy of the config as parsed with a setting; raises ValueError for an unknown key."""
  copy = ConfigDict(config)
  known = {key: (section, last) for key, section, last in config_flag.keys(copy)}
  for key, text in setting.items():
    config_flag.set_key(known, key, text, flags.CONFIG.name)
  return copy


class Runs:
  """The runs of a sweep and their processes; a context manager that leaves no process behind.

  Attributes:
    entries: one for each setting, in their order.
    stop: a request to stop, while runs are started.
  """

  def __init__(self, folder: epath.Path, entries: Sequence[Entry], parallel: int, hours: float):
    """Finds what is there; `hours` is how long it may take, 0: without a limit."""
    self.folder, self.stop = folder, None
    self._parallel, self._began = parallel, time.monotonic()
    self._deadline = self._began + 3600 * hours if hours else math.inf
    self._popen: dict[str, subprocess.Popen] = {}
    self._told: set[str] = set()  # the names of those of them that have had SIGTERM
    self._reaper: subprocess.Popen | None = None
    self._ended_at: list[float] = []
    self.entries = [self._found(entry) for entry in entries]

  def __enter__(self) -> "Runs":
    """Starts what kills the runs if this process is killed."""
    self._reaper = subprocess.Popen(
      [sys.executable, reaper.__file__], stdin=subprocess.PIPE, bufsize=0, start_new_session=True
    )
    return self

  def __exit__(self, *exception) -> None:
    """Kills what still runs."""
    for popen in self._popen.values():
      reaper.kill_session(popen.pid)
      popen.wait()
    self._reaper.stdin.close()
    self._reaper.wait()

  # ------------------------------ what is there ------------------------------

  def workdir(self, entry: Entry) -> epath.Path:
    """Returns the workdir of a run."""
    return self.folder / entry.name

  def _found(self, entry: Entry) -> Entry:
    """Returns an entry with what its workdir has; done only if the config is the one asked for."""
    workdir = self.workdir(entry)
    if not run_files.is_run(workdir):
      return entry
    there = run_files.read(workdir)
    done = there.times is not None and there.times["done"]
    given = workdir / workdir_files.GIVEN
    asked = forms.plain(with_setting(flags.CONFIG.value, entry.setting))
    same = given.exists() and files.read_json(given)["config"] == asked
    return dataclasses.replace(entry, run=there, state=DONE if done and same else LEFT)

  def any(self, state: str) -> bool:
    """Returns whether a run is in this state."""
    return any(one.state == state for one in self.entries)

  def counts(self) -> str:
    """Returns `3 done, 1 failed, 2 left`."""
    states = [one.state for one in self.entries]
    return ", ".join(f"{states.count(name)} {name}" for name in dict.fromkeys(states))

  def write(self, *, shown: bool = True) -> None:
    """Writes sweep.csv and the page, and prints the result if it is to be shown."""
    result = sweep_report.Result(config_flag.name(flags.CONFIG), self.entries)
    if shown:
      say(sweep_report.text(result, shutil.get_terminal_size((100, 24)).columns))
    files.replace(self.folder / TABLE, sweep_report.table(result))
    if result.runs:
      page = self.folder / PAGE
      files.replace(page, sweep_report.html(result, page=page, command=flags.command_line()))
      say(f"page: {page}; table: {self.folder / TABLE}")

  # ------------------------------ halving ------------------------------

  def rungs(self) -> list[int]:
    """Returns the steps after which runs are compared: ever fewer settings get ever more steps."""
    config = flags.CONFIG.value
    every, total = config.evaluation.every_steps, config.training.steps
    rungs, count = [], len(self._groups())
    while count > 1 and (step := total / KEEP ** (len(rungs) + 1)) >= every:
      rungs.append(math.ceil(step / every) * every)
      count = math.ceil(count / KEEP)
    return sorted({step for step in rungs if step < total})

  def _groups(self) -> list[list[int]]:
    """Returns the places of runs that can still win, together where only their seeds differ."""
    groups: dict[tuple, list[int]] = {}
    for place, one in enumerate(self.entries):
      key = tuple(value for name, value in one.setting.items() if name != SEED)
      groups.setdefault(key, []).append(place)
    out = (LOST, FAILED)
    return [some for some in groups.values() if all(self.entries[n].state not in out for n in some)]

  def halve(self, step: int) -> None:
    """Stops the settings that are worse after so many steps, by the mean over their seeds."""
    if self.stop:
      return
    if short := [one.name for one in self.entries if not self._at(one, step)]:
      say(f"after step {step:,}: nothing is compared, as {short[0]} was stopped before it")
      return
    metric = sweep_report.metric_of([one.run for one in self.entries if one.run])

    def order(places: Sequence[int]) -> float:
      values = [sweep_report.value_at(self.entries[one].run, metric, step) for one in places]
      return math.inf if None in values else metric.sign * statistics.fmean(values)

    ranked = sorted(self._groups(), key=order)
    kept = math.ceil(len(ranked) / KEEP)
    reason = f"not among the best {kept} of {len(ranked)} after step {step:,}"
    for place in itertools.chain(*ranked[kept:]):
      self._replace(place, state=LOST, reason=reason)
    say(f"after step {step:,}: {kept} of {len(ranked)} settings go on")

  def _at(self, entry: Entry, step: int) -> bool:
    """Returns whether a run needs no more steps to be compared after this one."""
    there = entry.run is not None and any(one["step"] >= step for one in entry.run.evaluations)
    return there or entry.state in (DONE, FAILED, LOST)

  # ------------------------------ processes ------------------------------

  def advance(self, until: int | None = None) -> None:
    """Runs what is left, so many at a time: to its end, or until it is evaluated after a step."""
    waiting = [
      place
      for place, one in enumerate(self.entries)
      if one.state == LEFT and not (until and self._at(one, until))
    ]
    asked_at = None
    while waiting or self._popen:
      if asked_at is None and self._asked_to_stop():
        asked_at, waiting = time.monotonic(), []
        self._terminate([*self._popen])
      if asked_at and (self.stop.insisted or time.monotonic() > asked_at + SAVE_SECONDS):
        for popen in self._popen.values():
          reaper.kill_session(popen.pid)
      while waiting and len(self._popen) < self._parallel:
        self._start(waiting.pop(0))
      select.select([self.stop.wakeup], [], [], POLL_SECONDS)
      self.stop.hear()
      for place, one in enumerate(self.entries):
        if one.state == RUNNING:
          self._look(place, until)
      if asked_at and not self._popen:
        return

  def _asked_to_stop(self) -> bool:
    """Returns whether to stop, and says so."""
    late = time.monotonic() > self._deadline
    if late or self.stop:
      why = f"--hours={flags.HOURS.value:g} are over" if late else self.stop.requested
      say(f"{why}: stopping {len(self._popen)} runs, which save; Ctrl-C again kills them")
      self.stop.announced()
    return bool(late or self.stop)

  def _start(self, place: int) -> None:
    entry = self.entries[place]
    log = self.folder / LOGS / f"{entry.name}.txt"
    log.parent.mkdir(exist_ok=True)
    command = [*_launcher(), sys.executable, sys.argv[0], *flags.words_to_train(), *_words(entry)]

    def before() -> None:
      os.write(self._reaper.stdin.fileno(), b"+%d\n" % os.getpid())

    with open(log, "wb") as output:
      self._popen[entry.name] = subprocess.Popen(
        [*command, f"--workdir={self.workdir(entry)}"],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,  # the terminal's Ctrl-C reaches this process alone
        preexec_fn=before,
      )
    self._replace(place, state=RUNNING)

  def _look(self, place: int, until: int | None) -> None:
    """Notes the end of a run; asks one to stop that has come as far as it should."""
    entry = self.entries[place]
    code = self._popen[entry.name].poll()
    if code is None:
      if until and (self.workdir(entry) / run_files.METRICS).exists():
        there = dataclasses.replace(entry, run=run_files.read(self.workdir(entry)))
        if self._at(there, until):
          self._terminate([entry.name])
      return
    popen, told = self._popen.pop(entry.name), entry.name in self._told
    self._told.discard(entry.name)
    self._reaper.stdin.write(b"-%d\n" % popen.pid)
    there = run_files.read(self.workdir(entry)) if run_files.is_run(self.workdir(entry)) else None
    state = {exit_codes.DONE: DONE, exit_codes.STOPPED: LEFT}.get(code, FAILED)
    # SIGTERM ends a process that cannot handle it yet, or no longer; a launcher passes on its code.
    by_signal = code < 0 or code > 128
    ended = told and code in (-signal.SIGTERM, 128 + signal.SIGTERM)
    if state == FAILED and by_signal and (self.stop.insisted or ended):
      state = DONE if there and there.times and there.times["done"] else LEFT
    reason = self._reason(entry, code) if state == FAILED else ""
    self._replace(place, run=there, state=state, code=code, reason=reason)
    self._ended_at.append(time.monotonic())
    what = f"paused after step {there.done:,}" if there and state == LEFT else state
    say(f"{entry.name}: {what}{f' ({reason})' if reason else ''}; {self.counts()}{self._time()}")

  def _reason(self, entry: Entry, code: int) -> str:
    """Returns why a run has failed: what it has printed since it said so, else its last line."""
    log = self.folder / LOGS / f"{entry.name}.txt"
    lines = log.read_bytes().decode(errors="replace").splitlines()
    printed = [_PROCESS.sub("", line).strip() for line in lines if line.strip()]
    begins = [place for place, line in enumerate(printed) if line.startswith(_BEGINS)]
    since = printed[begins[-1] :] if begins else printed[-1:]
    said = " ".join(one for one in since if not (begins and one.startswith(_LAUNCHER)))
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"{how}: {printable(said, longest=300)}" if said else how

  def _time(self) -> str:
    """Returns how long the rest takes, by the pace so far."""
    left = sum(one.state in (LEFT, RUNNING) for one in self.entries)
    pace = (time.monotonic() - self._began) / len(self._ended_at)
    return f"; about {clock(pace * left)} more" if left else ""

  def _terminate(self, names: Sequence[str]) -> None:
    for name in {*names} - self._told:
      self._told.add(name)
      with contextlib.suppress(ProcessLookupError):
        os.kill(self._popen[name].pid, signal.SIGTERM)

  def _replace(self, place: int, **changes) -> None:
    self.entries[place] = dataclasses.replace(self.entries[place], **changes)


def _words(entry: Entry) -> list[str]:
  return [f"--config.{key}={value}" for key, value in entry.setting.items()]


def _write_array(runs: Runs) -> None:
  """Writes the lines that an array of Slurm reads, and prints the command that submits it."""
  for one in runs.entries:
    if wrong := [value for value in one.setting.values() if len(value.split()) != 1]:
      raise ValueError(f"--slurm: {wrong[0]!r} has a space, at which slurm.sh splits its lines")
  lines = [" ".join([*_words(one), f"--workdir={runs.workdir(one)}\n"]) for one in runs.entries]
  files.replace(runs.folder / LINES, "".join(lines))
  left = [str(place) for place, one in enumerate(runs.entries, start=1) if one.state != DONE]
  if left:
    say("submit what is left, so many at a time, and give this command again to see the result:")
    at_once = f"%{flags.PARALLEL.value}" if flags.given(flags.PARALLEL) else ""
    command = ["sbatch", f"--array={','.join(left)}{at_once}", "--output=slurm-%A_%a.out"]
    command += ["processes/launch/slurm.sh", *flags.words_to_train()]
    say(f"  RUNS={shlex.quote(str(runs.folder / LINES))} {shlex.join(command)}")
