"""Row 21: Ctrl-C in a real terminal, whenever it comes."""

import dataclasses
import os
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterator

import psutil

from tests.faults import same
from tests.faults.harness import EVALUATE_EVERY, FLAGS, Run, arguments, saved, story
from tests.faults.plan import Trial
from tests.faults.trying import Attempt, Undisturbed, tried
from tests.helpers.terminals import Terminal, main

STOPPED, INTERRUPTED = 75, 130
STOP_SECONDS = 30
AGAIN = "press Ctrl-C again"

Moment = Callable[[Terminal, Attempt], None]


def _after(text: str, seconds: float) -> Moment:
  """Returns the moment up to so many seconds after a text ("": after the start)."""

  def wait(terminal: Terminal, attempt: Attempt) -> None:
    if text:
      terminal.wait_for(text)
    time.sleep(attempt.chance.uniform(0, seconds))

  return wait


def _step(terminal: Terminal, attempt: Attempt) -> None:
  terminal.wait_for(f"step {attempt.chance.randint(2, 60)}/")
  time.sleep(attempt.chance.uniform(0, 0.2))


def _save(terminal: Terminal, attempt: Attempt) -> None:
  folder = attempt.workdir / "checkpoints"
  terminal.wait_until(lambda: any(folder.glob("*.saving*")), "a save")
  time.sleep(attempt.chance.uniform(0, 0.05))


@dataclasses.dataclass(frozen=True)
class Phase:
  """When, and of what, Ctrl-C is pressed.

  Attributes:
    name: for people.
    moment: waits for it.
    verb: of main.py.
    late: whether it may be too late to change anything.
    nothing: whether nothing is to be saved: one line says so.
    launcher: whether `processes.launch` starts two processes.
    twice: whether it is pressed again once that was announced.
    flags: more of them.
  """

  name: str
  moment: Moment
  verb: str = "train"
  late: bool = False
  nothing: bool = False
  launcher: bool = False
  twice: bool = False
  flags: tuple[str, ...] = ()


COMPILES = ("--config.compilation_cache_dir=",)
ANOTHER = ("--against=configs/single.py",)
PHASES = (
  Phase("imports", _after("", 2), nothing=True),
  Phase("data preparation", _after("preparing", 1.5), nothing=True),
  Phase("compilation", _after("workdir:", 2), nothing=True, flags=COMPILES),
  Phase("before the first step", _after("compiled the train step", 1), late=True),
  Phase("a step", _step),
  Phase("an evaluation", _after(f"step {EVALUATE_EVERY * 2}/", 0.1)),
  Phase("a save", _save),
  Phase("the last evaluation", _after("step 100/", 0.7), late=True),
  Phase("the sample at the end", _after("sample from the trained model", 2), late=True),
  Phase("a step, twice", _step, twice=True),
  Phase("a step, under processes.launch", _step, launcher=True),
  Phase("imports, under processes.launch", _after("started 2 processes", 4), launcher=True),
  Phase("evaluate", _after("", 9), "evaluate", late=True),
  Phase("sample", _after("", 9), "sample", late=True, flags=("--max_new_tokens=8",)),
  Phase("layout", _after("", 5), "layout", late=True),
  Phase("compare", _after("", 15), "compare", late=True, flags=ANOTHER),
  Phase("tour", _after("", 20), "tour", late=True),
)


def row_21(trials: int, folder: pathlib.Path, seed: int = 0) -> Iterator[Trial]:
  """Presses Ctrl-C in each phase; runs that train are continued, and compared."""
  clean = Undisturbed(folder, *same.KEPT)

  def one(attempt: Attempt) -> None:
    phase = PHASES[attempt.number % len(PHASES)]
    attempt.does = f"Ctrl-C, {phase.name}"
    reference = clean.of(2 if phase.launcher else 1)
    trained = folder / "undisturbed-1" / "run"
    environment = {"TFDS_DATA_DIR": os.environ.get("TFDS_DATA_DIR", "")}
    if phase.name == "data preparation":
      environment["TFDS_DATA_DIR"] = str(attempt.folder / "data")
    environment = {key: value for key, value in environment.items() if value}
    with Terminal(_command(phase, attempt, clean.steps, trained), environment=environment) as shown:
      phase.moment(shown, attempt)
      attempt.seen.append(f"pressed at: {shown.text().splitlines()[-1:]}")
      when = shown.press()
      if phase.twice:
        shown.wait_for(AGAIN)
        time.sleep(1.5)
        ended = shown.popen.poll() is not None  # a step is soon over, and saved
        if not ended:
          shown.press()
      code, text = shown.end(), shown.text()
      seconds = time.monotonic() - when
      left = _left_behind(shown.popen.pid)
    attempt.seen.append(f"ended after {seconds:.1f} s with {code}")
    codes = {STOPPED} | ({0} if phase.late else set()) | ({INTERRUPTED} if phase.twice else set())
    assert code in codes, f"{code}: {text[-1500:]}"
    assert seconds < STOP_SECONDS, f"{seconds:.1f} s"
    for sign in ("Traceback", "Exception ignored", "KeyboardInterrupt"):
      assert sign not in text, text[-1500:]
    assert left == [], left
    done, there = [step for step, _ in story(attempt.workdir)], saved(attempt.workdir)
    if phase.nothing and not done:  # a machine may be faster than the moment was drawn for
      assert text.count("there was nothing to save") == 1, text[-1500:]
    if phase.verb != "train":
      return
    if code == STOPPED and done:
      assert there[-1:] == done[-1:], f"saved {there}, done {done[-1:]}"
    count = 2 if phase.launcher else 1
    with Run(
      attempt.workdir, count=count, steps=clean.steps, flags=same.KEPT, environment=environment
    ) as run:
      assert set(run.end()) == {0}, run.text()[-1500:]
    same.check(attempt.workdir, reference.record)
    assert not list(attempt.folder.rglob("*.tmp")), "what was half prepared is left"

  return tried(21, range(seed, seed + trials), folder, one)


def _command(phase: Phase, attempt: Attempt, steps: int, trained: pathlib.Path) -> list[str]:
  if phase.verb == "tour":
    return main("tour", "--simulate")
  workdir = attempt.workdir if phase.verb == "train" else trained
  flags = (*same.KEPT, *phase.flags)
  count = 2 if phase.launcher else 1
  told = arguments(workdir, count=count, steps=steps, flags=flags, common=FLAGS)
  if phase.verb == "compare":  # all but the mesh holds for both sides
    told = [re.sub(r"^--config\.(?!mesh)", "--set=", flag) for flag in told]
  command = main(*([] if phase.verb == "train" else [phase.verb]), *told)
  if phase.launcher:
    return [sys.executable, "-m", "processes.launch", f"--processes={count}", "--", *command]
  return command


def _left_behind(session: int) -> list[str]:
  """Returns what still runs in a session, or was started from it, a moment after its end."""
  time.sleep(1)
  found = []
  for process in psutil.process_iter():
    try:
      if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
        found.append(" ".join(process.cmdline())[:100])
    except (OSError, psutil.Error):
      continue
  return found
