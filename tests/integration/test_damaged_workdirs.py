"""Damaged files of a workdir: a start continues, or is refused before anything is changed."""

import json
import os
import shutil

import pytest

from tests.helpers.cli import TINY_MLP, lines_of
from tests.training.checkpointing.states import contents

SHORT = [
  "--config=configs/dp8.py:mlp",
  *TINY_MLP,
  "--config.metrics.every_steps=1",
  "--config.checkpoint.every_steps=2",
  "--config.checkpoint.keep=9",
  "--config.metrics.tensorboard=false",
]


@pytest.fixture(scope="module")
def finished(main, tmp_path_factory):
  """Returns the workdir of a run of four steps."""
  workdir = tmp_path_factory.mktemp("finished") / "run"
  code, out, err = main(*SHORT, "--config.training.steps=4", f"--workdir={workdir}")
  assert code == 0, (out, err)
  return workdir


@pytest.fixture
def workdir(finished, tmp_path):
  """Returns a copy of it."""
  return shutil.copytree(finished, tmp_path / "run", symlinks=True)


def a_directory(path):
  """Makes a directory with something in it."""
  (path / "inside").mkdir(parents=True)


def a_fifo(path):
  """Makes a FIFO."""
  os.mkfifo(path)


def a_link(path):
  """Makes a link to a file elsewhere."""
  elsewhere = path.parent.parent / "elsewhere"
  elsewhere.write_text("kept\n")
  path.symlink_to(elsewhere)


PLACES = (
  ("metrics.damaged.jsonl", a_fifo, "is a FIFO, not a plain file"),
  ("layout.txt", a_link, "is a symbolic link to "),
)


@pytest.mark.parametrize(("name", "make", "said"), PLACES)
def test_what_is_not_a_plain_file_is_refused_with_the_fix(name, make, said, workdir, main):
  path = workdir / name
  path.unlink(missing_ok=True)
  make(path)
  before = listing(workdir.parent)
  code, out, err = main(*SHORT, "--config.training.steps=5", f"--workdir={workdir}")
  assert code == 2, (out, err)
  [line] = err.splitlines()
  assert line.startswith(f"refused: {path} {said}"), line
  assert line.endswith("move what is there away (mv), or give another --workdir")
  assert listing(workdir.parent) == before


def listing(folder):
  """Returns what `contents` does, but for what cannot be read."""
  found = {path: path.lstat() for path in sorted(folder.rglob("*"))}
  return but_for_the_owner({str(p): (s.st_mtime_ns, s.st_size) for p, s in found.items()})


def but_for_the_owner(found):
  """Returns what was found without the folder of claims: each start claims the workdir first."""
  return {path: value for path, value in found.items() if not path.endswith("/run/owner")}


def test_one_message_has_all_of_them(workdir, main):
  for name in ("config.json", "metrics.jsonl"):
    (workdir / name).unlink()
    (workdir / name).mkdir()
  before = but_for_the_owner(contents(workdir))
  code, _, err = main(*SHORT, "--config.training.steps=5", f"--workdir={workdir}")
  assert code == 2
  [line] = err.splitlines()
  assert "config.json is a directory" in line
  assert "metrics.jsonl is a directory" in line
  assert but_for_the_owner(contents(workdir)) == before


def test_a_run_continues_from_damaged_metrics(workdir, main):
  metrics = workdir / "metrics.jsonl"
  raws = metrics.read_bytes().splitlines(keepends=True)
  damage = [b"\n", bytes(64) + b"\n", b"\xff\xfe\n", b'{"loss": 1.0}\n']
  metrics.write_bytes(b"".join([*raws[:2], *damage, *raws[2:], b'{"step": 5, "lo']))
  code, out, err = main(*SHORT, "--config.training.steps=5", f"--workdir={workdir}")
  assert code == 0, (out, err)
  assert "4 damaged lines moved to metrics.damaged.jsonl, the first of them line 3: it is" in err
  assert (workdir / "metrics.damaged.jsonl").read_bytes() == b"".join(damage)
  assert [line["step"] for line in lines_of(workdir) if "loss" in line] == [1, 2, 3, 4, 5]
  assert json.loads(raws[1]) in lines_of(workdir)


def test_a_workdir_and_its_checkpoints_may_be_links(workdir, main, tmp_path):
  places = "run/checkpoints", "run"
  for place, bigger in zip(places, (tmp_path / "bigger", tmp_path / "large"), strict=True):
    (tmp_path / place).rename(bigger)
    (tmp_path / place).symlink_to(bigger)
  code, out, err = main(*SHORT, "--config.training.steps=6", f"--workdir={workdir}")
  assert code == 0, (out, err)
  assert all((tmp_path / place).is_symlink() for place in places)
  assert (workdir / "checkpoints" / "6").is_dir()
  assert "resumes from the checkpoint of step 4" in out
