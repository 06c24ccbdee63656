"""The newest JAX, jaxlib, Flax, Optax and Orbax, tried in an environment of their own.

  python -m tests.upgrade [--python=python3.13] [--folder=.venv-upgrade]

Installs requirements.txt and requirements/dev.txt with the newest releases of those five in place
of the pinned ones, prints which, and runs the part of the parity matrix that `make test` runs, the
golden layouts, a resume to the bit, and five steps of the main job beside the same steps under the
pinned releases. Exits with 1 where anything fails; not part of `make test`, since it depends on
what the index has.
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[1]
NEWEST = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
TESTS = (
  "tests/golden/test_layouts.py",
  "tests/parity/test_strategies.py",
  "tests/parity/test_programs.py",
  "tests/parity/test_decoder_options.py",
  "tests/integration/test_main.py::test_the_same_command_resumes",
)
STEPS = 5
# Another compiler may sum float32 in another order; a wrong gradient shows in the second step.
LOSS_TOLERANCE = 1e-5


def unpinned(text: str) -> str:
  """Returns the lines of a requirements file, those of `NEWEST` once each and without versions."""
  kept = []
  for line in text.splitlines():
    name = re.split(r"[=<>;\[ ]", line, maxsplit=1)[0]
    kept.append(name if name in NEWEST else line)
  return "\n".join(dict.fromkeys(kept)) + "\n"


def install(python: str, folder: pathlib.Path) -> pathlib.Path:
  """Installs the newest releases into a folder; returns its interpreter."""
  subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
  interpreter = folder / "bin" / "python"
  with tempfile.TemporaryDirectory() as temporary:
    wanted = pathlib.Path(temporary, "requirements.txt")
    wanted.write_text(unpinned((ROOT / "requirements.txt").read_text()))
    added = (
      (ROOT / "requirements" / "dev.txt").read_text().replace("../requirements.txt", str(wanted))
    )
    dev = pathlib.Path(temporary, "dev.txt")
    dev.write_text(
      added.replace("-r sentencepiece.txt", f"-r {ROOT}/requirements/sentencepiece.txt")
    )
    pip = [interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--upgrade", f"--requirement={dev}"], check=True)
  return interpreter


def versions(interpreter: pathlib.Path | str) -> dict[str, str]:
  """Returns name -> version of `NEWEST` and of Python."""
  code = (
    "import importlib.metadata, json, platform, sys;"
    "found = {name: importlib.metadata.version(name) for name in sys.argv[1:]};"
    "print(json.dumps({'python': platform.python_version(), **found}))"
  )
  run = subprocess.run([interpreter, "-c", code, *NEWEST], check=True, stdout=subprocess.PIPE)
  return json.loads(run.stdout)


def losses(interpreter: pathlib.Path | str, workdir: pathlib.Path) -> list[float]:
  """Trains the main job for `STEPS` steps; returns the loss of each, in nats."""
  # Not on Python's own source, as by default: each Python has another one.
  command = [
    interpreter,
    "main.py",
    "--config=configs/dp4_tp2.py:data=text",
    f"--workdir={workdir}",
  ]
  command += [f"--config.data.files={ROOT}/docs/*.md"]
  command += [f"--config.training.steps={STEPS}", "--config.metrics.every_steps=1"]
  command += ["--config.evaluation.every_steps=0", "--config.checkpoint.every_steps=0"]
  subprocess.run(command, cwd=ROOT, check=True)
  lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
  return [line["loss"] for line in lines if "loss" in line]


def main() -> int:
  """Installs, runs and compares; returns the exit code."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--python", default=sys.executable, help="for the new environment")
  parser.add_argument("--folder", type=pathlib.Path, default=ROOT / ".venv-upgrade")
  options = parser.parse_args()
  interpreter = install(options.python, options.folder.resolve())
  pinned, newest = versions(sys.executable), versions(interpreter)
  for name in pinned:
    print(f"{name:18} {pinned[name]:12} -> {newest[name]}", flush=True)
  with tempfile.TemporaryDirectory() as temporary:
    before = losses(sys.executable, pathlib.Path(temporary, "pinned"))
    after = losses(interpreter, pathlib.Path(temporary, "newest"))
  distance = max(abs(a - b) / abs(b) for a, b in zip(after, before, strict=True))
  equal = len(after) == STEPS and distance <= LOSS_TOLERANCE
  tests = subprocess.run([interpreter, "-m", "pytest", "-n", "2", *TESTS], cwd=ROOT, check=False)
  print(f"losses of {len(after)} steps: {distance:.1e} apart, at most {LOSS_TOLERANCE} is allowed")
  print(f"tests: {'passed' if tests.returncode == 0 else 'failed'}")
  return int(not equal or tests.returncode != 0)


if __name__ == "__main__":
  sys.exit(main())
