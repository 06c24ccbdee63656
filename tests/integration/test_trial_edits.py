"""Edits that a reader would try, made on a copy of the tree: nothing else has to be told."""

import json
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SMALL = ("--config.model.layers=2", "--config.model.vocabulary_size=256")
# A second mesh axis that splits the batch, as data does.
AXIS = {
  "configs/keys/run.py": (
    '  "fsdp": Key(1, "splits',
    '  "replica": Key(1, "splits the batch"),\n  "fsdp": Key(1, "splits',
  ),
  "partitioning/mesh_sizes.py": ('AXES = ("data", ', 'AXES = ("data", "replica", '),
  "configs/schema/axis_tables.py": ('"batch": ("data", ', '"batch": ("data", "replica", '),
}


@pytest.fixture(scope="module")
def edited(tmp_path_factory):
  """A copy of the tree with one more mesh axis."""
  copy = tmp_path_factory.mktemp("copy")
  for package in ROOT.glob("[a-z]*/"):
    if package.name not in ("tests", "docs", "runs", "benchmarks"):
      shutil.copytree(package, copy / package.name, ignore=shutil.ignore_patterns("__pycache__"))
  for name in ("main.py", "requirements.txt"):
    shutil.copy(ROOT / name, copy)
  for name, (before, after) in AXIS.items():
    text = (copy / name).read_text()
    assert before in text, name
    (copy / name).write_text(text.replace(before, after))
  strategy = (
    "from configs import base\n\n\ndef get_config(argument=None):\n  return base.get_config("
  )
  for name, mesh in (("replicas", "data=2, replica=2"), ("data", "data=4")):
    text = f"{strategy}argument, mesh=dict({mesh}, tensor=2))\n"
    (copy / "configs" / f"{name}.py").write_text(text)
  return copy


def run(folder, *words):
  command = [sys.executable, "main.py", *words]
  return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.mark.long
def test_a_mesh_axis_is_three_lines_and_trains_the_same(edited):
  found = run(
    edited, "compare", "--config=configs/replicas.py:mlp", "--against=configs/data.py:mlp"
  )
  assert found.returncode == 0, found.stdout + found.stderr


def planned(edited, name, tmp_path):
  """Returns (mesh axes, kind, what is sent) -> runs and bytes, by formula."""
  words = (
    f"--config=configs/{name}.py",
    "--topology=h100:8",
    f"--workdir={tmp_path / name}",
    *SMALL,
  )
  found = run(edited, "plan", *words, "--config.planning.cache_dir=")
  assert found.returncode == 0, found.stdout + found.stderr
  plan = json.loads((tmp_path / name / "plan.json").read_text())
  return {
    (one["axis"], one["kind"], one["source"]): (one["count"], one["bytes"])
    for one in plan["collectives"]
  }


@pytest.mark.long
def test_a_mesh_axis_is_planned_as_the_one_whose_work_it_does(edited, tmp_path):
  found, wanted = (planned(edited, name, tmp_path) for name in ("replicas", "data"))
  assert ("data", "all-reduce", "the gradient of embed/table") in wanted
  assert found == {
    ("data+replica" if axis == "data" else axis, *rest): sent
    for (axis, *rest), sent in wanted.items()
  }
