"""Runs `python main.py ...` and the like, each in a fork of one process that has imported it all.

A fork has no backend started and no flag parsed, which is what a new interpreter has after the
seconds that it imports. It runs the file as `__main__` does, under the environment that it is given
(but for variables that are read while Python starts, such as LD_PRELOAD).

Where a config leaves the compilation cache at its default, forks use one of the tests', and keep
every program in it, also those that compile quickly: many tests compile what others have compiled.

Reads a JSON object per line from standard input: `command`, the arguments of Python; `environment`;
`folder`, the working directory; `out` and `err`, files to write to, or null for the same as `out`,
or a terminal, which then is the one that controls it.
Answers with `{"pid": ...}`. Whenever a fork has ended, says `{"ended": pid, "code": ...}`, with the
code as of `subprocess`. All forks end with this process.
"""

import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import json
import os
import pathlib
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import termios
import time

import jax

import main  # noqa: F401 (what the forks find imported)
from commands import compare, evaluate, layout, plan, sample, tour, train  # noqa: F401 (the same)
from configs import base
from runtime import compilation_cache, extensions, provenance
from training.metrics import goodput

ROOT = pathlib.Path(__file__).resolve().parents[2]
PR_SET_PDEATHSIG = 1
DEFAULT_CACHE = base.get_config("mlp", mesh={}).compilation_cache_dir
CACHE = pathlib.Path(tempfile.gettempdir()) / f"meshwright-tests-{os.getuid()}" / "processes"


def become(command: list[str], environment: dict[str, str]) -> None:
  """Runs what `python *command` runs, in this process, and ends it; 0, 1 and 2 are its files."""
  os.environ.clear()
  os.environ.update(environment)
  sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))
  if "PYTHONFAULTHANDLER" in environment:
    faulthandler.enable()
  goodput._IMPORTED = time.monotonic()  # or its time would run from the start of the server
  code = 1
  try:
    for folder in filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)):
      if folder not in sys.path:
        sys.path.insert(0, folder)
      if (site := pathlib.Path(folder) / "sitecustomize.py").exists():
        runpy.run_path(str(site))
    _run(command)
    code = 0
  except SystemExit as end:
    code = end.code if isinstance(end.code, int) else int(end.code is not None)
  except BaseException:  # a fork must end here, not continue as the server
    sys.excepthook(*sys.exc_info())
  finally:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(command: list[str]) -> None:
  if command[0] != "-m":
    sys.argv = command
    subprocess.Popen = _popen
    runpy.run_path(command[0], run_name="__main__")
    return
  sys.argv = command[1:]
  if command[1] == "processes.launch":
    subprocess.Popen = _popen
  runpy.run_module(command[1], run_name="__main__", alter_sys=True)


def _use_cache(folder: str) -> None:
  """Keeps all programs in the tests' cache instead of slow ones in the default one."""
  _USE_CACHE(str(CACHE) if folder == DEFAULT_CACHE else folder)
  if folder == DEFAULT_CACHE:
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _popen(command: list[str], *arguments, **settings) -> subprocess.Popen:
  """Starts a process; `main.py` of a launcher and the worker of `plan` in a fork of this one.

  A worker that has to load a user's files is a new interpreter: a fork would have them already.
  """
  launched = list(command[:2]) == [sys.executable, "main.py"]
  theirs = any(not path.resolve().is_relative_to(ROOT) for path in extensions.loaded())
  if not launched and (command != PLAN_WORKER or theirs):
    return _POPEN(command, *arguments, **settings)
  before = settings.pop("preexec_fn", lambda: None)
  kept = settings.get("pass_fds", ())

  def instead_of_exec() -> None:
    before()
    # By which the parent learns that it has started.
    for file in {*range(3, 1024)} - {*kept}:
      with contextlib.suppress(OSError):
        os.close(file)
    gc.enable()
    # As Python finds and leaves them when it starts.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    become(list(command[1:]), settings["env"])

  return _POPEN(command, *arguments, preexec_fn=instead_of_exec, **settings)


PLAN_WORKER = [sys.executable, "-m", "commands.plan_worker"]
_POPEN = subprocess.Popen
_USE_CACHE = compilation_cache.use


class Server:
  """The forks that run."""

  def __init__(self):
    """Has none yet."""
    self._forks: dict[int, int] = {}  # pidfd -> process id

  def serve(self) -> None:
    """Answers until standard input is closed."""
    text = b""
    while True:
      ready, _, _ = select.select([0, *self._forks], [], [])
      for file in ready:
        if file:
          self._ended(file)
      if 0 in ready:
        part = os.read(0, 65536)
        if not part:
          break
        *lines, text = (text + part).split(b"\n")
        for line in lines:
          _say(pid=self._start(**json.loads(line)))

  def _start(self, command, environment, folder, out, err) -> int:
    append = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOCTTY
    files = [os.open(os.devnull, os.O_RDONLY), os.open(out, append), os.open(err or out, append)]
    child = os.fork()
    if child:
      for file in files:
        os.close(file)
      self._forks[os.pidfd_open(child)] = child
      return child
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    if os.isatty(files[1]):
      os.dup2(files[1], files[0])
      fcntl.ioctl(files[1], termios.TIOCSCTTY, 0)
      # As in a new terminal's session, even where the tests run under nohup.
      signal.signal(signal.SIGINT, signal.default_int_handler)
      signal.signal(signal.SIGHUP, signal.SIG_DFL)
    for number, file in enumerate(files):
      os.dup2(file, number)
    for file in [*files, *self._forks]:
      os.close(file)
    os.chdir(folder)
    become(command, environment)
    return 0

  def _ended(self, file: int) -> None:
    os.close(file)
    child, status = os.waitpid(self._forks.pop(file), 0)
    _say(ended=child, code=os.waitstatus_to_exitcode(status))


def _say(**what: int) -> None:
  os.write(1, json.dumps(what).encode() + b"\n")


if __name__ == "__main__":
  provenance.versions()  # forks have the digests of our files then
  gc.freeze()  # or each fork would copy the pages of what it collects
  gc.set_threshold(20_000, 20, 20)  # as in the tests
  compilation_cache.use = _use_cache
  Server().serve()
