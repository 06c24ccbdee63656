"""A variant of attention and a mesh axis, added to a copy of the tree in few lines, are complete.

They train, are equal to one device, and are planned: nothing else has to be told of them.
"""

import pathlib
import re
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.long

ROOT = pathlib.Path(__file__).parents[2]
ATTENTION = "models/attention.py"
# file -> (line, the line and what is added before or after it)
AXIS = [
  ("partitioning/mesh_sizes.py", '\nAXES = ("data"', '\nAXES = ("replica", "data"'),
  (
    "configs/keys/run.py",
    "_AXES: Rows = {\n",
    '_AXES: Rows = {\n  "replica": Key(1, "splits the batch", unit="devices"),\n',
  ),
  (
    "configs/schema/axis_tables.py",
    '"batch": (None, ("data", "fsdp", "expert")),',
    '"batch": (None, ("replica", "data", "fsdp", "expert")),',
  ),
]
# The output of each head times a gate of its own, a sigmoid of the residual.
GATE = [
  ("models/spec.py", "  clip_qkv: float\n", "  clip_qkv: float\n  head_gate: bool\n"),
  (
    "configs/keys/model.py",
    '  "clip_qkv": Key(',
    '  "head_gate": Key(False, "a gate of each head"),\n  "clip_qkv": Key(',
  ),
  (
    ATTENTION,
    '    self.value = linear(f"{name}/value")\n    if spec.query_key_norm:\n',
    '    self.value = linear(f"{name}/value")\n'
    '    if spec.head_gate:\n      self.gate = linear(f"{name}/gate")\n'
    "    if spec.query_key_norm:\n",
  ),
  (
    ATTENTION,
    '      found["sinks"] = "N"\n',
    '      found["sinks"] = "N"\n    if spec.head_gate:\n      found["gate/kernel"] = "DN"\n',
  ),
  (
    ATTENTION,
    "    inputs = dropped(key=keys[1], letters=QUERIES",
    "    if spec.head_gate:\n"
    "      [gate_BTN] = column_parallel(x_BRD, [self.gate], RESIDUAL)\n"
    "      output_BTNH = output_BTNH * jax.nn.sigmoid(gate_BTN)[..., None]\n"
    "    inputs = dropped(key=keys[1], letters=QUERIES",
  ),
]
SMALL = {"model.layers": 1, "model.model_size": 32, "model.feedforward_size": 48}
SMALL |= {"data.sequence_length": 32, "model.head_gate": True}


@pytest.fixture(scope="module")
def edited(tmp_path_factory):
  """Returns a copy of the tree with both edits."""
  tree = tmp_path_factory.mktemp("edited") / "tree"
  shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "runs", "tests", "docs"))
  for name, before, after in [*AXIS, *GATE]:
    text = (tree / name).read_text()
    assert text.count(before) == 1, f"{name}: {before}"
    (tree / name).write_text(text.replace(before, after))
  return tree


def run(tree, *arguments):
  """Returns what `python main.py` prints in a tree."""
  command = [sys.executable, "main.py", *arguments]
  found = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=400)
  assert found.returncode == 0, found.stdout[-2000:] + found.stderr
  return found.stdout


def keys(flag, **more):
  """Returns the flags of a small model, and of further keys."""
  return [f"--{flag}.{key}={value}" for key, value in {**SMALL, **more}.items()]


def test_they_are_equal_to_one_device(edited):
  mesh = {"mesh.data": 2, "mesh.replica": 2}  # and tensor=2
  configs = "--config=configs/dp4_tp2.py", "--against=configs/single.py"
  found = run(edited, "compare", *configs, *keys("config", **mesh), *keys("against"))
  assert re.search(r"gradient +layers/attention/gate/kernel .* rounding", found)
  assert re.search(r"\nequal: \d+ tensors", found)


def test_they_train(edited, tmp_path):
  flags = keys("config", **{"mesh.data": 2, "mesh.replica": 2, "training.steps": 3})
  found = run(edited, "--config=configs/dp4_tp2.py", f"--workdir={tmp_path / 'run'}", *flags)
  assert "replica=2 x data=2 x tensor=2" in found
  assert re.search(r"all-reduce.*replica", (tmp_path / "run" / "layout.txt").read_text())


def test_gradients_over_the_new_axis_are_planned(edited):
  def rows(**mesh):
    command = "plan", "--config=configs/dp8.py", "--topology=h100:8", *keys("config", **mesh)
    return re.findall(r"\n(\S+) +all-reduce +(.*)", run(edited, *command))

  [(axes, added)] = rows(**{"mesh.data": 2, "mesh.replica": 4})
  [(axis, data)] = rows(**{"mesh.data": 8})
  assert (axes, axis) == ("replica+data", "data")
  assert added == data
