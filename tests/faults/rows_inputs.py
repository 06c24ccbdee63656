"""Row 29: wrong command lines, overrides, variables, and small files of a workdir."""

import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

from tests.faults import inputs
from tests.faults.plan import Trial

ROOT = pathlib.Path(__file__).parent.parent.parent
LIMIT_SECONDS = 120.0  # of a case, on a machine that is busy
MESSAGE = re.compile(r"^(refused|error): ", re.MULTILINE)
CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def row_29(trials: int, folder: pathlib.Path, seed: int = 0) -> Iterator[Trial]:
  """Runs one case after the other, each in a fork of a process that has imported everything."""
  with Server() as server:
    whole = folder / "whole"
    answer = server.run([*inputs.TINY, "--config.training.steps=2", f"--workdir={whole}"])
    assert answer["code"] == 0, answer
    for number in range(seed, seed + trials):
      began = time.monotonic()
      case, own = inputs.case(number), folder / str(number)
      note = ended(server, case, whole, own)
      shutil.rmtree(own, ignore_errors=True)
      seconds = time.monotonic() - began
      yield Trial(f"seed {number}: {case}", not note.startswith("WRONG"), note, seconds)


class Server:
  """The process that runs command lines in forks; a context manager."""

  def __enter__(self) -> "Server":
    """Starts it."""
    self._process = subprocess.Popen(
      [sys.executable, str(ROOT / "tests" / "helpers" / "cli_server.py")],
      cwd=ROOT,
      env={k: v for k, v in os.environ.items() if k != "NPROC"} | {"PYTHONPATH": str(ROOT)},
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )
    return self

  def __exit__(self, *raised: object) -> None:
    """Ends it."""
    self._process.stdin.close()
    self._process.wait()

  def run(self, arguments: list[str], environment: dict[str, str] | None = None) -> dict:
    """Returns the code and the output of one command line."""
    asked = {
      "arguments": arguments,
      "environment": environment or {},
      "timeout_seconds": LIMIT_SECONDS,
    }
    self._process.stdin.write(json.dumps(asked) + "\n")
    self._process.stdin.flush()
    return json.loads(self._process.stdout.readline())


def ended(server: Server, case: inputs.Case, whole: pathlib.Path, own: pathlib.Path) -> str:
  """Runs a case in a folder of its own; returns its end, after WRONG if that is not right."""
  own.mkdir()
  workdir = own / "run"
  if case.damage:
    shutil.copytree(whole, workdir)
    case.damage(workdir)
  before = digest(own)
  ours = any(word.startswith("--workdir=") for word in case.arguments)
  arguments = [*case.arguments, *([] if ours else [f"--workdir={workdir}"])]
  answer = server.run(arguments, case.environment)
  code, out, err = answer["code"], answer["out"], answer["err"]
  problems = []
  if code not in case.codes:
    problems.append(f"exit code {code}, not one of {case.codes}")
  if "Traceback" in out + err:
    problems.append("a traceback")
  if code != 0 and len(MESSAGE.findall(err)) != 1:
    problems.append(f"{len(MESSAGE.findall(err))} messages")
  if found := CONTROLS.findall(out + err):
    problems.append(f"control characters {sorted(set(found))}")
  if code == 2 and digest(own) != before:
    problems.append("refused, and the workdir has changed")
  said = f"exit code {code}: {err[-1500:]}"
  return f"WRONG: {'; '.join(problems)}; {said}" if problems else f"exit code {code}"


def digest(folder: pathlib.Path) -> str:
  """Returns a digest of the names and contents of all that is in a folder."""
  found = hashlib.sha256()
  for path in sorted(folder.rglob("*")):
    content = path.read_bytes() if path.is_file() else b"a folder"
    found.update(f"{path.relative_to(folder)}\0{len(content)}\0".encode() + content)
  return found.hexdigest()
