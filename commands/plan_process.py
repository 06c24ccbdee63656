"""Plans, and the process that makes them, with the environment that the TPU compiler needs.

A plan is cached under a digest of its inputs: config, topology, code and versions; its compiled
program also under what it is lowered to, which most keys of a config do not change.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import pathlib
import pickle
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

from etils import epath
from ml_collections import ConfigDict
from rich.console import Console

from commands.plan_worker import ANSWER, SAID
from interop import hf_folder
from processes import preemption
from runtime import exit_codes, extensions, files, forms
from runtime.printable import printable
from runtime.provenance import everything
from runtime.units import clock

ROOT = pathlib.Path(__file__).resolve().parents[1]
# No TPU is looked for, and several compilers may be loaded at once.
ENVIRONMENT = {
  "JAX_PLATFORMS": "cpu",
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_ACCELERATOR_TYPE": "v5p-8",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
PIPED_SECONDS = 15.0  # between two lines about the phase of a worker, where there is no terminal


class WorkerError(exit_codes.RetryableError):
  """A worker failed; its message is the last line that the worker has printed.

  Attributes:
    printed: all that it has printed.
  """

  def __init__(self, printed: str):
    super().__init__(next(filter(str.strip, reversed(printed.splitlines())), "failed"))
    self.printed = printed


def made(
  config: ConfigDict,
  topology: str | None,
  *,
  title: str,
  simulate: bool = False,
  debug: bool = False,
  label: str = "plan",
  command: str = "",
) -> dict[str, Any]:
  """Returns a new plan, or a cached one: what plan.json has, the page, the texts, and remarks.

  Args:
    config: as parsed, with overrides.
    topology: `v5p:4x4x4`; None: the devices at hand, whose plans are not kept.
    title: of the plan.
    simulate: plan for simulated devices instead of the attached ones.
    debug: shows the compiler's output; ignores the cached plan.
    label: what a terminal shows while it is made.
    command: the command line, which the page shows.

  Raises:
    ValueError: the plan is impossible.
    WorkerError: the worker failed.
  """
  kept = None if topology is None else place(config, topology, title)
  kept = kept and kept.with_suffix(".json")
  if kept and not debug and kept.exists():
    remark = f"cached plan of the same config, topology, code and versions: {kept}"
    return {**json.loads(kept.read_text()), "remarks": [remark]}
  request = {"config": config, "topology": topology, "title": title, "simulate": simulate}
  programs = kept and kept.with_name(_digest(_made_by(topology)))
  request["programs"] = None if debug or programs is None else str(programs)
  found = answer({**request, "task": "plan", "command": command}, debug=debug, label=label)
  if kept:
    kept.parent.mkdir(parents=True, exist_ok=True)
    files.replace(kept, json.dumps(found), shared=True)
  return {**found, "remarks": []}


def answer(
  request: Mapping[str, Any],
  *,
  debug: bool = False,
  label: str = "plan",
  say: Callable[[str], None] | None = None,
) -> Any:
  """Returns what a worker answers.

  A compiler does not react to signals. So the worker has its own session, which a terminal's Ctrl-C
  does not reach, and is killed when this process is asked to stop. If this process is killed, the
  worker's standard input ends, and it kills itself.

  Args:
    request: what it is to do.
    debug: shows its output.
    label: what a terminal shows before its phases.
    say: takes a phase now and then, where standard error is no terminal.

  Raises:
    ValueError: it refused.
    WorkerError: it failed.
  """
  with tempfile.TemporaryDirectory() as name, preemption.undone(lambda: shutil.rmtree(name)):
    folder = pathlib.Path(name)
    code = _work({**request, "folder": name, "debug": debug}, folder / "stderr", label, say)
    if code == exit_codes.REFUSED:
      raise ValueError((folder / ANSWER).read_text())
    if code:
      printed = "" if debug else (folder / "stderr").read_text(errors="replace")
      raise WorkerError(_crash(-code, printed) if code < 0 else printed)
    return json.loads((folder / ANSWER).read_text())


def _crash(number: int, printed: str) -> str:
  """Returns the message of a worker that a signal has ended, in place of its dump."""
  name = signal.Signals(number).name
  if number == signal.SIGKILL:
    return f"error: the process was ended by {name}, as the system does where memory runs out\n"
  # libtpu's dump begins with the function that it was in.
  found = re.search(r"^PC: @ .*?(\w+\(\))$", printed, re.MULTILINE)
  where = f"in the compiler's {found[1]}, a defect of its own" if found else "in native code"
  return f"error: crashed with {name} {where}; try another mesh, and --debug for its output\n"


def _work(
  request: dict[str, Any], errors: pathlib.Path, label: str, say: Callable[[str], None] | None
) -> int:
  """Runs a worker, whose output goes to a file, and returns its exit code."""
  here, debug = request["topology"] is None, request["debug"]
  # The compiler may be in a folder of the caller's.
  path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
  read, write = os.pipe()
  with errors.open("wb") as said, open(read, "rb", buffering=0) as phases:
    worker = subprocess.Popen(
      [sys.executable, "-m", "commands.plan_worker"],
      stdin=subprocess.PIPE,
      stderr=None if debug else said,
      env={**os.environ, **({} if here else ENVIRONMENT), "PYTHONPATH": path},
      pass_fds=(write,),
      start_new_session=True,
    )
    asked = threading.Event()
    with preemption.undone(lambda: (asked.set(), _kill(worker))):
      try:
        os.close(write)
        request |= {"phases": write, "extensions": [*map(str, extensions.loaded())]}
        with contextlib.suppress(BrokenPipeError):  # it has ended already, with a message
          worker.stdin.write(pickle.dumps(request))
          worker.stdin.flush()
        _watch(phases, label, say, quiet=debug)
        code = worker.wait()
      finally:
        _kill(worker)
        with contextlib.suppress(BrokenPipeError):
          worker.stdin.close()
  if asked.is_set():  # to stop, in the thread that waits for signals, which ends this process
    sys.exit(exit_codes.STOPPED)
  return code


def _kill(worker: subprocess.Popen) -> None:
  """Kills the worker and its child processes, if it is still running."""
  if worker.poll() is None:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()


def _watch(phases: BinaryIO, label: str, say: Callable[[str], None] | None, *, quiet: bool) -> None:
  """Shows on a terminal what the worker is doing and since when, until it ends."""
  console, began = Console(stderr=True, highlight=False), time.monotonic()
  shown = console.is_terminal and not quiet
  phase, said = "starting", began
  with contextlib.ExitStack() as stack:
    if shown:
      line = stack.enter_context(console.status(""))
      stack.enter_context(preemption.undone(line.stop))  # which shows the cursor again
    while True:
      now = time.monotonic()
      if shown:
        seconds = clock(now - began)
        line.update(f"{label}: {phase}, {seconds} (Ctrl-C stops it; nothing is lost)")
      elif say and not quiet and now - said >= PIPED_SECONDS:
        said = now
        say(f"{label}: {phase}, {clock(now - began)}")
      if select.select([phases], [], [], 1.0)[0]:
        text = os.read(phases.fileno(), 4096)
        if not text:
          return
        for part in text.decode(errors="replace").splitlines():
          phase = printable(part.removeprefix(SAID), newlines=False)
          if shown and part.startswith(SAID):
            console.print(f"{label}: {phase}", markup=False)
          elif say and not quiet and part.startswith(SAID):
            say(f"{label}: {phase}")


def place(config: ConfigDict, topology: str, title: str) -> epath.Path | None:
  """Returns the place of this plan in the cache, without a suffix; None without a cache."""
  if not config.planning.cache_dir:
    return None
  given = {key: value for key, value in forms.plain(config).items() if key != "planning"}
  given["planning"] = {k: v for k, v in config.planning.items() if k != "cache_dir"}
  facts = [given, title, *_made_by(topology)]
  if "folder" in config.model and config.model.folder:
    facts.append(hf_folder.digest(hf_folder.local(config.model.folder, "model.folder")))
  return epath.Path(config.planning.cache_dir).expanduser() / _digest(facts)


def _made_by(topology: str) -> list[Any]:
  """Returns what plans follow from besides the config: topology, code, compilers, their flags."""
  code = hashlib.sha256()
  for path in sorted((ROOT / "planning").glob("*.py")):
    code.update(f"{path.name}\n".encode() + path.read_bytes())
  given = {name: os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}
  return [topology, everything(), code.hexdigest(), _compilers(), given]


def _digest(facts: Any) -> str:
  return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


def _compilers() -> list[str]:
  """Returns the versions of the compilers for TPUs and for GPUs; "" of what is not installed."""
  found = dict.fromkeys(("libtpu", "jax-cuda12-pjrt", "jax-cuda13-pjrt"), "")
  for name in found:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      found[name] = importlib.metadata.version(name)
  return [*found.values()]
