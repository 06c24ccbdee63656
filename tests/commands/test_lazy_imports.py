"""What needs no JAX does not import it: help, refused command lines, pages, and `prepare`."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]

# Runs the application, and then says which slow libraries it has imported.
_SCRIPT = """
import runpy, sys
sys.argv = {argv!r}
try:
  runpy.run_path("main.py", run_name="__main__")
except SystemExit as error:
  print("exit", error.code)
slow = ("jax", "jaxlib", "flax", "optax", "grain", "orbax", "tensorstore")
print("imported", [name for name in slow if name in sys.modules])
"""


def _run(*words: str, cwd=ROOT) -> list[str]:
  script = _SCRIPT.format(argv=["main.py", *words])
  done = subprocess.run(
    [sys.executable, "-c", script], cwd=cwd, capture_output=True, text=True, check=True
  )
  return done.stdout.splitlines()


@pytest.mark.parametrize(
  ("words", "code"),
  [
    (("config", "--config=configs/dp8.py"), 0),
    (("train", "--config=configs/dp8.py", "--config.training.stepz=3"), 2),
    (("report", "{tmp}"), 0),
  ],
)
def test_command_lines_are_read_without_jax(words, code, tmp_path):
  (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
  *_, exit_code, imported = _run(*(word.format(tmp=tmp_path) for word in words))
  assert exit_code == f"exit {code}"
  assert imported == "imported []"


def test_data_are_prepared_without_jax(tmp_path):
  for i in range(40):
    (tmp_path / f"{i}.txt").write_text(f"Document {i} of some words.\n" * 40)
  files = f"--config.data.files={tmp_path}"
  folder = f"--config.data.data_dir={tmp_path}/data"
  *_, exit_code, imported = _run(
    "prepare", "--config=configs/dp8.py:model=lm,data=text", files, folder
  )
  assert exit_code == "exit 0"
  assert imported == "imported []"
