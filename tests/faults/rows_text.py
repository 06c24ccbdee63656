"""Row 31: SIGKILL while text is prepared, of the command or of a worker process."""

import hashlib
import json
import os
import pathlib
import re
import signal
import sys
import time

import psutil

from input_pipeline import store
from tests.faults.frame import Attempt, row
from tests.faults.harness import inherited, started

FILES, DOCUMENTS, MOST_KILLS = 5, 8000, 3
LIMIT_SECONDS = 120.0  # of a preparation, on a machine that is busy
WORKER = "input_pipeline.text.worker"


@row(
  31,
  fault="SIGKILL while text is prepared, one to three times in a row: of the command, or of one "
  "of its worker processes",
  passes="complete shards stay and the same command continues; the store is that of an "
  "undisturbed preparation to the byte; no worker outlives the command",
  trials=30,
  seconds=12,
)
def killed_preparation(attempt: Attempt) -> None:
  """Kills preparations a few times each; the store must become that of an undisturbed one."""
  corpus, wanted, span = attempt.once(_undisturbed)
  data_dir = attempt.folder / "data"
  for _ in range(attempt.chance.randint(1, MOST_KILLS)):
    kill_one(attempt, Preparation(corpus, data_dir), span)
  last = Preparation(corpus, data_dir)
  assert last.end() == 0, last.said()
  assert contents(data_dir) == wanted, "the store differs from an undisturbed one"


def _undisturbed(folder: pathlib.Path) -> tuple[pathlib.Path, dict[str, str], float]:
  """Makes a corpus; returns it, its store, and the seconds from the first shard to the end."""
  corpus = folder / "corpus"
  corpus.mkdir()
  for number in range(FILES):
    texts = (f"{number} {i} " * (1 + i % 9) for i in range(DOCUMENTS * (1 + number % 2)))
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (corpus / f"{number}.jsonl").write_text(lines)
  preparation = Preparation(corpus, folder / "data")
  preparation.wait_for_a_shard()
  began = time.monotonic()
  assert preparation.end() == 0, preparation.said()
  return corpus, contents(preparation.data_dir), time.monotonic() - began


class Preparation:
  """A `prepare` of the corpus by two worker processes."""

  def __init__(self, corpus: pathlib.Path, data_dir: pathlib.Path):
    """Starts it."""
    self.data_dir = data_dir
    data_dir.mkdir(parents=True, exist_ok=True)
    self._output = data_dir / "prepare.out"
    flags = {"files": corpus, "data_dir": data_dir, "prepare_processes": 2}
    command = [
      sys.executable,
      "main.py",
      "prepare",
      "--config=configs/single.py:model=lm,data=text",
    ]
    command += [f"--config.data.{key}={value}" for key, value in flags.items()]
    self._output.unlink(missing_ok=True)
    self.process = started(command, self._output, inherited() | {"TFDS_DATA_DIR": str(data_dir)})

  def wait_for_a_shard(self) -> None:
    """Waits until something is written, or the command has ended."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while self.process.poll() is None and not [*self.data_dir.glob("prepared/text/*/*.tmp")]:
      assert time.monotonic() < deadline, "nothing is written"
      time.sleep(0.002)

  def workers(self) -> list[psutil.Process]:
    """Returns its worker processes."""
    try:
      children = psutil.Process(self.process.pid).children()
      return [child for child in children if WORKER in child.cmdline()]
    except psutil.NoSuchProcess:
      return []

  def end(self) -> int:
    """Waits for its end and returns the exit code."""
    return self.process.wait(LIMIT_SECONDS)

  def said(self) -> str:
    """Returns what it has printed."""
    return self._output.read_text(errors="replace")


def kill_one(attempt: Attempt, preparation: Preparation, span: float) -> None:
  """Kills a preparation or one of its workers, at a random moment; judges how it ends."""
  preparation.wait_for_a_shard()
  time.sleep(attempt.chance.random() * span)
  workers = preparation.workers()
  of_command = not workers or attempt.chance.random() < 0.5
  victim = preparation.process.pid if of_command else attempt.chance.choice(workers).pid
  shards = f"prepared/*/*/*[0-9a-f]/{store.MANIFEST}"
  done = {path.parent.name for path in preparation.data_dir.glob(shards)}
  attempt.does += f"{'command' if of_command else 'worker'} killed with {len(done)} shards; "
  try:
    os.kill(victim, signal.SIGKILL)
  except ProcessLookupError:
    attempt.seen.append("it had ended by itself")
  code = preparation.end()
  _, alive = psutil.wait_procs(workers, timeout=30)
  assert not alive, f"{len(alive)} workers outlive the command"
  if code == 1:
    assert not of_command, preparation.said()
    message = (
      r"error: worker process \d of 2 has ended with signal 9 \(SIGKILL\); .* run again: .*\n"
    )
    assert re.fullmatch(message, preparation.said()), preparation.said()
  else:
    assert code in (0, -signal.SIGKILL), (code, preparation.said())
  left = {path.parent.name for path in preparation.data_dir.glob(shards)}
  assert done <= left, "a complete shard is gone"


def contents(data_dir: pathlib.Path) -> dict[str, str]:
  """Returns file -> digest of everything in the store."""
  folder = data_dir / "prepared" / "text"
  files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")
  return {
    path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
    for path in files
  }
