"""Writes the lock files: `make lock`, or `make lock UPGRADE=--upgrade` for newer versions.

A lock file pins every package of an installation, those required by others included, with the
SHA-256 of each of its files, for all platforms and each Python version from 3.11 on (an entry that
only some versions take carries a marker). `make setup` and `make test` install from the lock files
with pip's --require-hashes. `base.txt` is requirements.txt; the others hold what they add to it.
`fixtures.txt` is data for the tests, installed without what its packages require. Those of ALONE
are for environments without the project's own requirements, with which theirs conflict.
"""

import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[2]
LOCKS = ROOT / "requirements" / "locks"
OLDEST_PYTHON = "3.11"
EXTRAS = {
  "dev": "-r requirements/dev.txt",
  "plan": "-r requirements/plan.txt",
  "buckets": "-r requirements/buckets.txt",
  "sentencepiece": "-r requirements/sentencepiece.txt",
  "tpu": "-r requirements.txt\njax[tpu]",
  "gpu": "-r requirements.txt\njax[cuda12]",
}
# Environments of their own, beside that of the project.
ALONE = ("deploy", "ray", "sinks", "transformers4", "transformers5")


def compile_lock(wanted: str, output: pathlib.Path, *options: str) -> None:
  """Resolves requirements and writes the packages with their hashes."""
  with tempfile.NamedTemporaryFile("w", dir=ROOT, suffix=".in") as file:
    file.write(wanted + "\n")
    file.flush()
    command = [sys.executable, "-m", "uv", "pip", "compile", file.name, f"--output-file={output}"]
    command += [f"--python-version={OLDEST_PYTHON}", "--universal", "--generate-hashes"]
    command += ["--quiet", "--no-header", "--no-annotate", *options]
    subprocess.run(command, cwd=ROOT, check=True)


def names(lock: pathlib.Path) -> list[str]:
  """Returns the packages of a lock file."""
  return sorted({*re.findall(r"^([A-Za-z0-9._-]+)==", lock.read_text(), re.MULTILINE)})


def main(options: list[str]) -> None:
  """Writes all lock files."""
  base = LOCKS / "base.txt"
  compile_lock("-r requirements.txt", base, *options)
  in_base = [f"--no-emit-package={name}" for name in names(base)]
  for extra, wanted in EXTRAS.items():
    compile_lock(wanted, LOCKS / f"{extra}.txt", f"--constraint={base}", *in_base, *options)
  for name in ALONE:
    compile_lock(f"-r requirements/{name}.txt", LOCKS / f"{name}.txt", *options)
  compile_lock("-r requirements/fixtures.txt", LOCKS / "fixtures.txt", "--no-deps", *options)
  print("wrote", *(f"{path.name}: {len(names(path))} packages;" for path in LOCKS.glob("*.txt")))


if __name__ == "__main__":
  main(sys.argv[1:])
