"""A run of an earlier version of this code resumes with the same numbers.

fixtures/older_run holds the workdir of such a run after 4 of its 8 steps, and what it logged for
the other 4. It was made at the commit that expected.json names, on data that this test writes.
"""

import importlib.metadata
import json
import pathlib
import platform
import re
import shutil

import numpy as np
import pytest

from tests.helpers.cli import lines_of
from tests.input_pipeline.writing import write

FIXTURE = pathlib.Path(__file__).parent / "fixtures" / "older_run"
EXPECTED = json.loads((FIXTURE / "expected.json").read_text())


def documents(count, seed):
  """Returns texts of words whose frequencies follow Zipf's law, as those of natural text do."""
  random = np.random.default_rng(seed)
  words = [bytes(random.integers(97, 123, random.integers(2, 9), np.uint8)) for _ in range(40)]
  zipf = (random.zipf(1.5, 60) - 1 for _ in range(count))
  return [b" ".join(words[min(int(i), 39)] for i in numbers) for numbers in zipf]


@pytest.fixture
def arguments(tmp_path):
  """Returns the command line of the run, whose workdir and data are copied and written here."""
  import tensorflow_datasets as tfds

  shutil.copytree(FIXTURE / "run", tmp_path / "run")
  splits = {"train": documents(24, 0), "test": documents(6, 1)}
  examples = {split: [{"text": text} for text in texts] for split, texts in splits.items()}
  write(tmp_path / "data", "words", {"text": tfds.features.Text()}, examples)
  own = (f"--workdir={tmp_path}/run", f"--config.data.data_dir={tmp_path}/data")
  return [f"--config={EXPECTED['config']}", *EXPECTED["flags"], *own]


def changed_versions():
  """Returns what --accept_changes must name: the versions that differ from the older run's."""
  record = json.loads((FIXTURE / "run/checkpoints/4/record/metadata").read_text())["versions"]
  here = {
    name: platform.python_version() if name == "python" else importlib.metadata.version(name)
    for name in record
    if name != "code"
  }
  return [
    "versions.code",
    *(f"versions.{n}" for n, version in here.items() if version != record[n]),
  ]


def same_machine_kind():
  """Returns whether this is the JAX and the kind of processor that the numbers are from."""
  flags = re.search(r"^flags\s*: (.*)$", pathlib.Path("/proc/cpuinfo").read_text(), re.MULTILINE)
  here = {*flags[1].split()} if flags else set()
  return importlib.metadata.version("jax") == EXPECTED["jax"] and {*EXPECTED["cpu"]} <= here


@pytest.mark.long
def test_a_run_of_an_older_version_resumes_with_the_same_numbers(main, arguments, tmp_path):
  code, out, err = main(*arguments)
  assert code == 2, (out, err)  # the code has changed, and nobody has accepted that yet
  assert "versions.code" in err
  code, out, err = main(*arguments, f"--accept_changes={','.join(changed_versions())}")
  assert code == 0, (out, err)
  lines = [line for line in lines_of(tmp_path / "run") if line["step"] > 4]
  names = ("step", "loss", "grad_norm", "learning_rate", "eval_loss", "eval_bits_per_byte")
  found = [{name: line[name] for name in names if name in line} for line in lines]
  assert [line.keys() for line in found] == [line.keys() for line in EXPECTED["lines"]]
  for ours, theirs in zip(found, EXPECTED["lines"], strict=True):
    assert ours == pytest.approx(theirs, rel=1e-5)
    # Evaluations now sum the rows in another order.
    assert ours == theirs or "eval_loss" in ours or not same_machine_kind()
