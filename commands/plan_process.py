"""Starts the process that makes a plan, with the environment that the TPU compiler needs.

A plan is cached under a digest of its inputs: config, topology, code and versions.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import pathlib
import pickle
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

from etils import epath
from ml_collections import ConfigDict
from rich.console import Console

from interop import hf_folder
from planning.topology import parse
from processes import preemption
from runtime import exit_codes, extensions, files
from runtime.chips import overridden
from runtime.printable import printable
from runtime.provenance import everything
from runtime.units import clock
from training.checkpointing.resume_policy import plain

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
REPORT, FILES = "report.txt", ("plan.json", "plan.html")


def run(
  config: ConfigDict,
  topology: str | None,
  workdir: epath.Path,
  *,
  title: str,
  simulate: bool = False,
  debug: bool = False,
  command: str = "",
) -> int:
  """Prints the plan, writes plan.json and plan.html, and returns 0 (fits), 3 (not), 1 (failed).

  Args:
    config: as parsed, with overrides.
    topology: `v5p:4x4x4`; None: the devices at hand.
    workdir: to write to.
    title: of the plan.
    simulate: plan for simulated devices instead of the attached ones.
    debug: shows the compiler's output and the traceback of a refusal; ignores the cached plan.
    command: the command line, which the page shows.

  Raises:
    ValueError: the plan is impossible; nothing has been written.
    OSError: the workdir cannot be written to.
  """
  chips, _ = overridden(config.planning.constants)  # before anything is waited for
  kept = None
  if topology is not None:
    parse(topology, chips)
    kept = place(config, topology, title)
  if kept and not debug and (kept / REPORT).exists():
    known = "cached plan of the same config, topology, code and versions"
    return _deliver(kept, workdir, f"{known}: {kept}")
  request = {"config": config, "topology": topology, "title": title, "simulate": simulate}
  request |= {"task": "plan", "command": command}
  with worked(request, debug=debug) as (folder, code):
    if code == 0:
      code = _deliver(folder, workdir)
      _keep(folder, kept)
    else:
      sys.stderr.write(printed(folder))
  return code


def made(
  config: ConfigDict, topology: str, *, title: str, label: str, command: str = ""
) -> dict[str, Any]:
  """Returns the content of plan.json of a new plan, or of a cached one.

  Args:
    config: as parsed, with overrides.
    topology: `v5p:4x4x4`.
    title: of the plan.
    label: what a terminal shows while it is made.
    command: the command line, which the page shows.

  Raises:
    ValueError: the plan is impossible.
    RetryableError: the worker failed.
  """
  kept = place(config, topology, title)
  if kept and (kept / REPORT).exists():
    return json.loads((kept / "plan.json").read_text())
  request = {"config": config, "topology": topology, "title": title, "simulate": False}
  request |= {"task": "plan", "command": command}
  with worked(request, label=label) as (folder, code):
    if code:
      raise exit_codes.RetryableError(last_line(folder))
    _keep(folder, kept)
    return json.loads((folder / "plan.json").read_text())


def printed(folder: pathlib.Path) -> str:
  """Returns what a worker that failed has printed."""
  said = folder / "stderr"
  return said.read_text(errors="replace") if said.exists() else ""


def last_line(folder: pathlib.Path) -> str:
  """Returns the last line of what a worker that failed has printed."""
  return next((line for line in reversed(printed(folder).splitlines()) if line.strip()), "failed")


@contextlib.contextmanager
def worked(
  request: Mapping[str, Any],
  *,
  debug: bool = False,
  label: str = "plan",
  say: Callable[[str], None] | None = None,
) -> Iterator[tuple[pathlib.Path, int]]:
  """Yields the folder of a worker's results and what `work` returns; then the folder is removed."""
  with tempfile.TemporaryDirectory() as name, preemption.undone(lambda: shutil.rmtree(name)):
    folder = pathlib.Path(name)
    yield folder, work(request, folder, debug=debug, label=label, say=say)


def work(
  request: Mapping[str, Any],
  folder: pathlib.Path,
  *,
  debug: bool = False,
  label: str = "plan",
  say: Callable[[str], None] | None = None,
) -> int:
  """Runs a worker; returns 0 if it was done, or 1 if it failed.

  A compiler does not react to signals. So the worker has its own session, which a terminal's Ctrl-C
  does not reach, and is killed when this process is asked to stop. If this process is killed, the
  worker's standard input ends, and it kills itself.

  Args:
    request: what it is to do.
    folder: where it writes its results; what it printed, if it failed, is in `stderr` there.
    debug: shows its output.
    label: what a terminal shows before its phases.
    say: takes a phase now and then, where standard error is no terminal.

  Raises:
    ValueError: it refused.
  """
  here = request["topology"] is None
  # The compiler may be in a folder of the caller's.
  path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
  said = folder / "stderr"
  read, write = os.pipe()
  with said.open("wb") as errors, open(read, "rb", buffering=0) as phases:
    worker = subprocess.Popen(
      [sys.executable, "-m", "commands.plan_worker"],
      stdin=subprocess.PIPE,
      stderr=None if debug else errors,
      env={**os.environ, **({} if here else ENVIRONMENT), "PYTHONPATH": path},
      pass_fds=(write,),
      start_new_session=True,
    )
    asked = threading.Event()
    with preemption.undone(lambda: (asked.set(), _kill(worker))):
      try:
        os.close(write)
        more = {"folder": str(folder), "debug": debug, "phases": write}
        more["extensions"] = [*map(str, extensions.loaded())]
        with contextlib.suppress(BrokenPipeError):  # it has ended already, with a message
          worker.stdin.write(pickle.dumps({**request, **more}))
          worker.stdin.flush()
        _watch(phases, label, say, quiet=debug)
        code = worker.wait()
      finally:
        _kill(worker)
        with contextlib.suppress(BrokenPipeError):
          worker.stdin.close()
  if asked.is_set():  # to stop, in the thread that waits for signals, which ends this process
    sys.exit(exit_codes.STOPPED)
  if code == exit_codes.REFUSED:
    raise ValueError((folder / "refusal").read_text())
  if code < 0:
    hint = ", as the system does where memory runs out" if code == -signal.SIGKILL else ""
    with said.open("a") as errors:
      errors.write(f"error: the process of {label} was ended by signal {-code}{hint}\n")
  if code:
    return exit_codes.FAILED
  said.unlink()
  return exit_codes.DONE


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
        phase = printable(text.decode(errors="replace").splitlines()[-1], newlines=False)


def _deliver(folder: pathlib.Path, workdir: epath.Path, remark: str = "") -> int:
  """Prints and writes an existing plan; returns its exit code."""
  found = json.loads((folder / "plan.json").read_text())
  workdir.mkdir(parents=True, exist_ok=True)
  for name in FILES:
    files.replace(workdir / name, (folder / name).read_text())
  print((folder / REPORT).read_text(), end="")
  print(f"page: {workdir / 'plan.html'}")
  if remark:
    print(remark)
  return 0 if found["fits"] else 3


def place(config: ConfigDict, topology: str, title: str) -> pathlib.Path | None:
  """Returns the place of this plan in the cache; None without a cache."""
  if not config.planning.cache_dir:
    return None
  code = hashlib.sha256()
  for path in sorted((ROOT / "planning").glob("*.py")):
    code.update(f"{path.name}\n".encode() + path.read_bytes())
  given = {key: value for key, value in plain(config).items() if key != "planning"}
  given["planning"] = {k: v for k, v in config.planning.items() if k != "cache_dir"}
  facts = [given, topology, title, everything(), code.hexdigest(), _compiler()]
  if "folder" in config.model and config.model.folder:
    facts.append(hf_folder.digest(hf_folder.local(config.model.folder, "model.folder")))
  digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]
  return pathlib.Path(config.planning.cache_dir).expanduser() / digest


def _compiler() -> str:
  try:
    return importlib.metadata.version("libtpu")
  except importlib.metadata.PackageNotFoundError:
    return ""


def _keep(folder: pathlib.Path, kept: pathlib.Path | None) -> None:
  """Puts a plan into the cache atomically: other processes may read it, or write the same."""
  if kept is None or kept.exists():
    return
  kept.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=kept.parent) as name:
    shutil.copytree(folder, half := pathlib.Path(name, "plan"))
    if not kept.exists():
      half.rename(kept)
