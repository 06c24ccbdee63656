"""Seconds from the death of a process to the next finished step, of a run on this machine.

python -m benchmarks.recovery [--trials=4]

Each trial trains a small decoder twice under `processes.launch`, in four processes, and kills one
by SIGKILL five steps after a save to storage: with --replacements and checkpoints in memory, where
it alone is replaced, and with --restarts, where all start again from storage. A step counts that
the run had not done before: the second way repeats the steps since the save first. Both
alternate, so that other programs slow them alike; it prints both, and the ratio of their least
times and medians. The compiled programs are stored before the first trial.
"""

import argparse
import pathlib
import signal
import statistics
import tempfile
import time

from tests.faults.harness import Run, story

COUNT, SAVE_EVERY, STEPS_OF_LOSS = 4, 20, 5
FLAGS = (
  *(f"--config.mesh.data={COUNT}", "--config.mesh.tensor=1", "--config.metrics.report=False"),
  *(f"--config.data.global_batch_size={4 * COUNT}", "--config.evaluation.every_steps=0"),
  *(f"--config.checkpoint.every_steps={SAVE_EVERY}", "--config.metrics.every_steps=1"),
)
# Way -> what the launcher does, and more flags of the run.
WAYS = {
  "in place": ({"replacements": 1}, ["--config.checkpoint.memory_every_steps=1"]),
  "all restarted": ({"restarts": 1}, []),
}


def started(workdir: pathlib.Path, way: str, *, first: bool = False) -> Run:
  """Starts a run under the launcher; the first one of a way replaces and restarts nothing."""
  launcher, more = WAYS[way]
  common, flags = ["--config=configs/dp4_tp2.py"], (*FLAGS, *more)
  given = {"launcher": True, "steps": 100_000, **({} if first else launcher)}
  return Run(workdir, count=COUNT, common=common, flags=flags, **given)


def step_of(run: Run) -> int:
  """Returns the last step whose metrics are written; 0 before the first."""
  return max((step for step, _ in story(run.workdir)), default=0)


def recovered(run: Run, way: str, index: int) -> float:
  """Kills a process some steps after a save; returns the seconds to the next step that is new."""
  if way == "in place":
    run.wait_for("is ready to take the place")
  after = (step_of(run) // SAVE_EVERY + 1) * SAVE_EVERY + STEPS_OF_LOSS
  run.wait_until(lambda: step_of(run) >= after, f"step {after}")
  killed, done = run.signal(index, signal.SIGKILL), step_of(run)
  run.wait_until(lambda: step_of(run) > done, "a new step")
  return time.monotonic() - killed


def main() -> None:
  """Prints the seconds of each trial, and the least and the medians with their ratios."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--trials", type=int, default=4)
  trials = parser.parse_args().trials
  seconds: dict[str, list[float]] = {way: [] for way in WAYS}
  with tempfile.TemporaryDirectory() as folder:
    for way in WAYS:
      with started(pathlib.Path(folder, f"first {way}"), way, first=True) as run:
        run.wait_until(lambda run=run: step_of(run) >= 2, "step 2")  # its programs are stored now
    for trial in range(trials):
      for way in WAYS:
        killed = COUNT - 1 - trial % (COUNT - 1)  # not process 0
        with started(pathlib.Path(folder, f"{way} {trial}"), way) as run:
          seconds[way].append(recovered(run, way, killed))
        took = seconds[way][-1]
        print(f"{way}: process {killed} killed, a new step after {took:.1f} s", flush=True)
  for name, of in (("least", min), ("medians", statistics.median)):
    place, restart = map(of, seconds.values())
    print(f"{name}: {place:.1f} s in place, {restart:.1f} s restarted: {place / restart:.2f} of it")


if __name__ == "__main__":
  main()
