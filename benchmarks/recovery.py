"""Seconds from the death of a process to the next finished step, of a run on this machine.

python -m benchmarks.recovery [--processes=4] [--trials=4] [--steps_of_loss=5]

Each trial trains a small decoder twice under `processes.launch`, and kills a process by SIGKILL
some steps after a save to storage: with --replacements and checkpoints in memory, where it alone is
replaced, and with --restarts, where all start again from storage. A step counts that the run had
not finished before: the second way repeats the steps since the save first. Both alternate, so that
other programs slow them alike; it prints both, and the ratio of their least times and medians. The
compiled programs are stored before the first trial.
"""

import argparse
import contextlib
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
SAVE_EVERY = 20
PATIENCE_SECONDS = 600
POLL_SECONDS = 0.02


class Run:
  """A run under the launcher; a context manager, which ends it."""

  def __init__(self, folder: pathlib.Path, processes: int, option: str, *more: str):
    """Starts it in a new folder with an option of the launcher, and more flags of the run."""
    self._workdir, self._report = folder / "run", folder / "report"
    folder.mkdir()
    self._log = folder / "log"
    flags = [
      "configs/dp4_tp2",
      f"--config.mesh.data={processes}",
      "--config.mesh.tensor=1",
      f"--config.data.global_batch_size={4 * processes}",
      "--config.training.steps=100000",
      "--config.evaluation.every_steps=0",
      f"--config.checkpoint.every_steps={SAVE_EVERY}",
      "--config.metrics.every_steps=1",
      "--config.metrics.report=False",
      *more,
    ]
    command = [sys.executable, "-m", "processes.launch", f"--processes={processes}", option]
    command += [f"--report={self._report}", "--", sys.executable, "main.py", *flags]
    with self._log.open("wb") as log:
      self._launcher = subprocess.Popen(
        [*command, f"--workdir={self._workdir}"], cwd=ROOT, stdout=log, stderr=log
      )

  def __enter__(self) -> "Run":
    """Returns itself."""
    return self

  def __exit__(self, *_) -> None:
    """Kills the launcher, whose reaper kills the processes."""
    self._launcher.kill()
    self._launcher.wait()

  def step(self) -> int:
    """Returns the last step whose metrics are written; 0 before the first."""
    found = 0
    with contextlib.suppress(OSError):
      for line in (self._workdir / "metrics.jsonl").read_text().splitlines():
        with contextlib.suppress(ValueError):  # it is being written
          found = json.loads(line).get("step", found)
    return found

  def wait_for_step(self, least: int) -> float:
    """Waits until a step is finished; returns when that was seen, by the monotonic clock."""
    until = time.monotonic() + PATIENCE_SECONDS
    while self.step() < least:
      if self._launcher.poll() is not None or time.monotonic() > until:
        raise RuntimeError(f"step {least} was not reached:\n{self._log.read_text()}")
      time.sleep(POLL_SECONDS)
    return time.monotonic()

  def kill(self, index: int) -> float:
    """Kills a process; returns when."""
    first = json.loads(self._report.read_text().splitlines()[0])
    os.kill(first["pids"][index], signal.SIGKILL)
    return time.monotonic()

  def recovered(self, index: int, after: int) -> float:
    """Kills a process after a step; returns the seconds to the next step that is new."""
    self.wait_for_step(after)
    killed = self.kill(index)
    return self.wait_for_step(self.step() + 1) - killed

  def wait_for_spare(self) -> None:
    """Waits until the launcher has a process that can take another's place."""
    until = time.monotonic() + PATIENCE_SECONDS
    while "is ready to take the place" not in self._log.read_text() and time.monotonic() < until:
      time.sleep(POLL_SECONDS)


def main() -> None:
  """Prints the seconds of each trial, and the least and the medians with their ratios."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--processes", type=int, default=4)
  parser.add_argument("--trials", type=int, default=4)
  parser.add_argument("--steps_of_loss", type=int, default=5, help="since the last save")
  options = parser.parse_args()
  in_memory = "--config.checkpoint.memory_every_steps=1"
  ways = {"in place": ("--replacements=1", in_memory), "all restarted": ("--restarts=1",)}
  seconds: dict[str, list[float]] = {way: [] for way in ways}
  with tempfile.TemporaryDirectory() as folder:
    for way, (_, *more) in ways.items():
      path = pathlib.Path(folder) / f"first {way}"
      with Run(path, options.processes, "--restarts=0", *more) as run:
        run.wait_for_step(2)  # its programs are stored now
    for trial in range(options.trials):
      for way, more in ways.items():
        with Run(pathlib.Path(folder) / f"{way} {trial}", options.processes, *more) as run:
          if way == "in place":
            run.wait_for_spare()
          after = (run.step() // SAVE_EVERY + 1) * SAVE_EVERY + options.steps_of_loss
          killed = options.processes - 1 - trial % (options.processes - 1)  # not process 0
          took = run.recovered(killed, after)
        seconds[way].append(took)
        print(f"{way}: process {killed} killed, a new step after {took:.1f} s", flush=True)
  for name, of in (("least", min), ("medians", statistics.median)):
    place, restart = map(of, seconds.values())
    print(f"{name}: {place:.1f} s in place, {restart:.1f} s restarted: {place / restart:.2f} of it")


if __name__ == "__main__":
  main()
