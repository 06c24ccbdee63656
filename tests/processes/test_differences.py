"""A process that differs is named before the first collective, with the key and both values."""

import importlib.metadata
import os
import pathlib
import shutil
import subprocess
import sys
import time

import pytest

from launch.local import free_port
from tests.processes.commands import MLP, everything

ROOT = pathlib.Path(__file__).parent.parent.parent

# what differs: (further arguments of process 1, its variables, what all say)
DIFFERENCES = {
  "batch shape": (
    ["--config.data.global_batch_size=24"],
    {},
    ["config.data.global_batch_size: 12 on process 0; 24 on process 1"],
  ),
  "config key": (
    ["--config.optimizer.learning_rate=0.5"],
    {},
    ["config.optimizer.learning_rate: 0.002 on process 0; 0.5 on process 1"],
  ),
  "dtype": (
    ["--config.training.compute_dtype=bfloat16"],
    {},
    ['config.training.compute_dtype: null on process 0; "bfloat16" on process 1'],
  ),
  "seed": (["--config.seed=7"], {}, ["config.seed: 0 on process 0; 7 on process 1"]),
  "mesh": (
    ["--config.mesh.data=2", "--config.mesh.tensor=2"],
    {},
    [
      "config.mesh.data: 4 on process 0; 2 on process 1",
      "config.mesh.tensor: 1 on process 0; 2 on process 1",
    ],
  ),
  "table": (
    ["--config.partitioning.parameters.model=()"],
    {},
    ['config.partitioning.parameters.model: ["fsdp"] on process 0; [] on process 1'],
  ),
  "workdir by name": (
    ["--workdir=WORKDIR/other"],
    {},
    ['workdir: "WORKDIR" on process 0; "WORKDIR/other" on process 1'],
  ),
  "flag": (
    ["--accept_changes=seed"],
    {},
    ['accept_changes: [] on process 0; ["seed"] on process 1'],
  ),
  "the compiler's flags": (
    [],
    {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"},
    ["XLA_FLAGS", "--xla_cpu_enable_fast_math=true"],
  ),
  "JAX's flags": ([], {"JAX_ENABLE_X64": "1"}, ["JAX_ENABLE_X64"]),
  "verb": (["evaluate"], {}, ['verb: "train" on process 0; "evaluate" on process 1']),
}
SAMPLE = ("batch shape", "verb")


def refused(ended, messages, workdir: pathlib.Path) -> None:
  """Checks a refusal: by all, in time, with these messages, and with nothing changed."""
  assert [process.code for process in ended] == [2, 2], ended
  assert max(process.seconds for process in ended) < 15
  said = "".join(process.err for process in ended)
  assert "Traceback" not in said
  for message in messages:
    assert message.replace("WORKDIR", str(workdir)) in said, said
  assert not workdir.exists()


def _marked(cases, sample):
  return [
    case if case in sample else pytest.param(case, marks=pytest.mark.faults) for case in cases
  ]


@pytest.mark.parametrize("case", _marked(DIFFERENCES, SAMPLE))
def test_is_refused_by_all(start, tmp_path, case):
  more, variables, messages = DIFFERENCES[case]
  workdir = tmp_path / "run"
  more = [argument.replace("WORKDIR", str(workdir)) for argument in more]
  ended = start(2, *MLP, f"--workdir={workdir}", more={1: more}, environments={1: variables})
  refused(ended, messages, workdir)
  # Once, and by process 0: the others would say the same.
  assert ended[0].err.startswith("refused: the processes differ"), ended
  assert ended[1].err == "", ended


@pytest.mark.faults
def test_process_0_is_the_one_that_differs(start, tmp_path):
  workdir = tmp_path / "run"
  ended = start(2, *MLP, f"--workdir={workdir}", more={0: ["--config.seed=7"]})
  refused(ended, ["config.seed: 7 on process 0; 0 on process 1"], workdir)


def test_other_rows_under_the_same_name(start, tmp_path):
  # Process 1 has another `digits` of the same version, as another release of scikit-learn makes it.
  workdir, folder = tmp_path / "run", tmp_path / "data"
  shutil.copytree(os.environ["TFDS_DATA_DIR"] + "/digits", folder / "digits")
  shutil.copytree(
    os.environ["TFDS_DATA_DIR"] + "/prepared/digits",
    folder / "prepared" / "digits",
    ignore=shutil.ignore_patterns("*.lock"),
  )
  [manifest] = folder.glob("prepared/digits/*/train-image-*/store.json")
  text = manifest.read_text()
  digest = text.split('"digest": "')[1][:64]
  manifest.write_text(text.replace(digest, digest[::-1]))
  ended = start(2, *MLP, f"--workdir={workdir}", environments={1: {"TFDS_DATA_DIR": str(folder)}})
  message = 'data, train: "digits:1.0.0 train, 1497 rows, digest '
  refused(ended, [message, "on process 0; "], workdir)


@pytest.mark.faults
def test_another_split_of_the_data(start, tmp_path):
  workdir = tmp_path / "run"
  ended = start(
    2, *MLP, f"--workdir={workdir}", more={1: ["--config.data.train_split=train[:50%]"]}
  )
  message = 'config.data.train_split: "train" on process 0; "train[:50%]" on process 1'
  refused(ended, [message], workdir)


def test_a_process_that_sees_another_workdir(start, tmp_path):
  # One name and two folders: each process has a root of its own for what lies below it.
  ended = start(
    2,
    *MLP,
    "--workdir=run",
    environments={index: {"TEST_FOLDER": _made(tmp_path / str(index))} for index in range(2)},
    script=ROOT / "tests" / "processes" / "elsewhere.py",
  )
  messages = ["process 1 of 2 cannot read what process 0 writes to the workdir run; name a folder"]
  refused(ended, messages, tmp_path / "0" / "run")
  assert everything(tmp_path) == ["0", "1"]


def _made(folder: pathlib.Path) -> str:
  folder.mkdir()
  return str(folder)


@pytest.mark.faults
@pytest.mark.parametrize("checkpoints_of", [0, 1])
def test_a_process_that_sees_no_checkpoints(start, well, tmp_path, checkpoints_of):
  here, there = tmp_path / str(checkpoints_of), tmp_path / str(1 - checkpoints_of)
  here.mkdir()
  well(2, *MLP, f"--workdir={here / 'run'}")
  there.mkdir()
  before = everything(tmp_path)
  ended = start(
    2,
    *MLP,
    "--workdir=run",
    environments={index: {"TEST_FOLDER": str(tmp_path / str(index))} for index in range(2)},
    script=ROOT / "tests" / "processes" / "elsewhere.py",
  )
  assert [process.code for process in ended] == [2, 2], ended
  values = ["[3]", "[]"] if checkpoints_of == 0 else ["[]", "[3]"]
  assert f"checkpoints: {values[0]} on process 0; {values[1]} on process 1" in ended[0].err, ended
  assert everything(tmp_path) == before


# ------------------------------ code and libraries ------------------------------


def started_from(trees, variables, arguments):
  """Runs main.py once from each tree; returns (exit codes, all errors, seconds)."""
  address, began = f"localhost:{free_port()}", time.monotonic()
  running = []
  for index, tree in enumerate(trees):
    three = {
      "JAX_COORDINATOR_ADDRESS": address,
      "JAX_NUM_PROCESSES": str(len(trees)),
      "JAX_PROCESS_ID": str(index),
    }
    environment = {k: v for k, v in os.environ.items() if k != "NPROC"}
    running.append(
      subprocess.Popen(
        [sys.executable, "main.py", *arguments],
        cwd=tree,
        env={**environment, **three, **variables.get(index, {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
      )
    )
  errors = "".join(process.communicate(timeout=120)[1] for process in running)
  return [process.returncode for process in running], errors, time.monotonic() - began


@pytest.mark.faults
@pytest.mark.parametrize(
  "changed", ["models/mlp.py", "checkpointing/store.py", "processes/group.py"]
)
def test_other_code(tmp_path, changed):
  tree, workdir = tmp_path / "tree", tmp_path / "run"
  ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", "tests", "runs", ".*_cache")
  shutil.copytree(ROOT, tree, ignore=ignored)
  with (tree / changed).open("a") as file:
    file.write("# changed\n")
  codes, errors, seconds = started_from([ROOT, tree], {}, [*MLP, f"--workdir={workdir}"])
  assert codes == [2, 2], errors
  assert 'code: "' in errors
  assert '" on process 0; "' in errors
  assert "Traceback" not in errors
  assert seconds < 15
  assert not workdir.exists()


@pytest.mark.faults
@pytest.mark.parametrize("library", ["optax", "grain", "array-record"])
def test_other_libraries(tmp_path, library):
  # Metadata that is found before the installed one says that process 1 has another version.
  workdir, real = tmp_path / "run", importlib.metadata.version(library)
  folder = tmp_path / "site" / f"{library.replace('-', '_')}-0.0.7.dist-info"
  folder.mkdir(parents=True)
  (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {library}\nVersion: 0.0.7\n")
  variables = {1: {"PYTHONPATH": str(folder.parent)}}
  codes, errors, seconds = started_from([ROOT, ROOT], variables, [*MLP, f"--workdir={workdir}"])
  assert codes == [2, 2], errors
  assert f'versions.{library}: "{real}" on process 0; "0.0.7" on process 1' in errors
  assert seconds < 15
  assert not workdir.exists()
