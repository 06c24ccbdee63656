"""Starts launchers and leaves none of them behind."""

import contextlib
import signal
import sys

import psutil
import pytest

from tests.launch.launchers import PRELUDE, Launcher


@pytest.fixture
def launch(tmp_path):
  """Returns a function that starts a launcher; what is left of it is killed after the test.

  It takes a script or a command, the launcher's options, and what else Launcher takes. `index` is
  defined in the script, and so are the functions of the prelude.
  """
  started = []

  def start(script, *options, command=None, **settings) -> Launcher:
    # -S: these start faster without the installed packages.
    command = command or [sys.executable, "-S", "-c", PRELUDE + script]
    if not any(option.startswith("--processes") for option in options):
      options = ("--processes=2", *options)
    folder = tmp_path / str(len(started))
    folder.mkdir()
    started.append(Launcher(folder, options, command, **settings))
    return started[-1]

  yield start
  for launcher in started:
    if launcher.popen.poll() is None:
      family = launcher.family()
      for process in [launcher.popen, *family]:
        with contextlib.suppress(OSError, psutil.Error):
          process.send_signal(signal.SIGKILL)
      launcher.popen.wait()
