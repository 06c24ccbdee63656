"""Two processes save and restore: what each does, and what becomes of all where one fails."""

import contextlib
import json
import os
import pathlib
import random
import resource
import subprocess
import sys
import time

import pytest
from etils import epath

from processes.listening import free_port
from tests.training.checkpointing.damage import flip
from training.checkpointing import integrity, reading

ROOT = pathlib.Path(__file__).parents[3]
COUNT = 2
LONG_SECONDS = 90  # on a busy machine; where processes wait for one that has failed it is 300


class Pair:
  """Two processes of saving_process.py."""

  def __init__(self, folder: pathlib.Path):
    """Starts them."""
    self.folder, address = folder, f"localhost:{free_port()}"
    self._popens = []
    for index in range(COUNT):
      three = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(COUNT)}
      environment = {**os.environ, **three, "JAX_PROCESS_ID": str(index), "PYTHONPATH": str(ROOT)}
      environment["MESHWRIGHT_TOKEN"] = "the same for both"
      self._popens.append(
        subprocess.Popen(
          [sys.executable, str(pathlib.Path(__file__).with_name("saving_process.py")), str(folder)],
          env=environment,
          stdin=subprocess.PIPE,
          stdout=subprocess.PIPE,
          text=True,
          bufsize=1,
        )
      )
    for popen in self._popens:
      assert self._answer(popen) == {"ready": True}

  def do(self, *command) -> list[dict]:
    """Lets both do something, and returns what each answers."""
    for popen in self._popens:
      popen.stdin.write(f"{json.dumps(command)}\n")
    return [self._answer(popen) for popen in self._popens]

  def _answer(self, popen: subprocess.Popen) -> dict:
    while not (line := popen.stdout.readline()).startswith("{"):  # gloo says something too
      assert line, "the process has ended"
    return json.loads(line)

  def well(self, *command) -> list:
    """Lets both do something that must go well; returns what each returns."""
    answers = self.do(*command)
    assert all("error" not in answer for answer in answers), answers
    return [answer["result"] for answer in answers]

  @contextlib.contextmanager
  def full_disk(self, index: int, size: int = 1024):
    """Lets a process write no more than so many bytes to a file; set from outside."""
    pid = self._popens[index].pid
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))
    try:
      yield
    finally:
      resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))

  def close(self) -> list[int]:
    """Lets them end; returns their exit codes."""
    for popen in self._popens:
      popen.stdin.close()
    try:
      return [popen.wait(30) for popen in self._popens]
    finally:
      for popen in self._popens:
        popen.kill()
        popen.wait()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
  """Returns two processes that have saved step 10."""
  pair = Pair(tmp_path_factory.mktemp("pair") / "checkpoints")
  try:
    pair.well("save", 10)
    pair.well("wait")
    yield pair
  finally:
    codes = pair.close()
  assert codes == [0, 0]


def owner(path: str) -> int:
  """Returns which process has written a file."""
  return int("/ocdbt.process_1/" in path)


def test_each_computes_the_digests_of_what_it_has_written(pair):
  pair.well("save", 11)
  answers = pair.do("wait")
  files = integrity.file_sizes(epath.Path(pair.folder / "11"))
  for index, answer in enumerate(answers):
    assert sorted(answer["computed"]) == sorted(p for p in files if owner(p) == index)
    assert answer["computed"]
  assert [digest.path for digest in reading.read_digests(epath.Path(pair.folder / "11"))] == sorted(
    files
  )


def test_each_checks_its_share_of_the_large_files_and_all_the_small_ones(pair):
  answers = pair.do("restore")
  newest = pair.well("steps")[0][-1]
  assert [answer["result"] for answer in answers] == [newest] * 2
  files = integrity.file_sizes(epath.Path(pair.folder / str(newest)))
  # The names of arrays are believed, too.
  small = {path for path, size in files.items() if size <= 100 or path == "state/_METADATA"}
  large = {*files} - small
  first, second = (set(answer["checked"]) for answer in answers)
  assert first & second == small
  assert first | second == small | large
  assert first - small
  assert second - small


def test_what_one_finds_damaged_all_pass_over_and_the_first_names_it(pair):
  pair.well("save", 30)
  pair.well("wait")
  _, second = (answer["checked"] for answer in pair.do("restore"))
  [large] = [p for p in second if "/d/" in p][:1]
  flip(pair.folder / "30" / large, random.Random(0))
  older = pair.well("steps")[0][-2]
  answers = pair.do("restore")
  assert [answer["result"] for answer in answers] == [older] * 2
  for answer in answers:
    [line] = answer["said"]
    assert f"30 cannot be read (process 1: {large}: its bytes have changed" in line
    assert f"step {older} is used instead" in line
  assert pair.well("steps")[0][-1] == older
  assert (pair.folder / "30.broken").is_dir()


@pytest.mark.parametrize(("full", "asks"), [(0, "settle"), (1, "wait")])
def test_if_one_cannot_write_all_are_notified_and_save_again(pair, full, asks):
  before = pair.well("steps")[0]
  step = before[-1] + 10
  with pair.full_disk(full):
    pair.well("save", step)
    began = time.monotonic()
    answers = pair.do("settle") if asks == "settle" else pair.do("wait")
    seconds = time.monotonic() - began
  texts = [answer["error"] for answer in answers]
  assert texts[0] == texts[1]
  assert texts[0][0] == "SaveError"
  assert texts[0][1].startswith(f"saving step {step} to {pair.folder} failed: process {full}: ")
  assert "File too large" in texts[0][1]
  assert seconds < LONG_SECONDS
  assert pair.well("steps") == [before] * 2
  pair.well("save", step + 1)
  pair.well("settle")
  assert pair.well("restore") == [step + 1] * 2
  assert not [path.name for path in pair.folder.iterdir() if ".saving" in path.name]


def test_where_the_first_cannot_write_the_digests_no_step_comes_into_being(pair):
  before = pair.well("steps")[0]
  step = before[-1] + 10
  pair.well("lose_digests")
  pair.well("save", step)
  answers = pair.do("wait")
  assert [answer["error"][1].partition("failed: ")[2] for answer in answers] == [
    "process 0: OSError: [Errno 28] No space left on device"
  ] * 2
  assert pair.well("steps") == [before] * 2
  pair.well("save", step)  # process 1 writes none
  pair.well("wait")
  assert pair.well("restore") == [step] * 2


def test_newer_steps_are_removed_for_all(pair):
  steps = pair.well("steps")[0]
  pair.well("remove_after", steps[0])
  assert pair.well("steps") == [steps[:1]] * 2
  pair.well("save", steps[1])
  pair.well("wait")
  assert pair.well("restore") == [steps[1]] * 2
