"""Writes `run.html` beside a training run, by another process: `python -m reports.run_page`.

So a page costs the run neither imports nor Python's lock. The process reads the files of the
workdir alone, and has a low priority as long as the run trains.
"""

import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from etils import epath

from runtime import files

ROOT = pathlib.Path(__file__).resolve().parents[1]
LONGEST_SECONDS = 600.0  # that a page may take beside a run, on a machine without a free core
# After a page took t seconds, the next one begins at least this many times t later.
PAUSE = 4
NICENESS = 5  # of the process beside a run


class PageWriter:
  """Rewrites a page in the background, one at a time. A page that fails is reported once."""

  def __init__(
    self,
    workdir: epath.Path,
    name: str,
    require: Callable[[], None],
    report: Callable[[str], None],
  ):
    """Starts nothing yet.

    Args:
      workdir: the run's folder.
      name: of the page in it.
      require: raises where the run may write no longer.
      report: is called with a text, once.
    """
    self._workdir, self._path = workdir, workdir / name
    self._require, self._report = require, report
    self._reported = False
    self._page: _Page | None = None

  def request(self) -> None:
    """Starts to write the page, unless one is being written, or was a short time ago."""
    last = self._page
    if last is None or (last.ended and time.monotonic() >= last.ended + PAUSE * last.seconds):
      self._begin(NICENESS)

  def finish(self, seconds: float) -> None:
    """Writes the page from what the files say now, and waits for it so long at most."""
    if self._page is not None:
      self._page.quit()  # of older numbers
    self._begin(0)
    if self._page is not None:
      self._page.join(seconds)
      if self._page.is_alive():
        self._page.quit()
        self._failed(f"it took longer than {seconds:g} s")

  def _begin(self, niceness: int) -> None:
    try:
      self._page = _Page(self._workdir, niceness, self._written, self._failed)
      self._page.start()
    except OSError as error:
      self._page = None
      self._failed(str(error))

  def _written(self, content: bytes) -> None:
    files.replace(self._path, content, require=self._require)

  def _failed(self, why: str) -> None:
    if not self._reported:
      self._report(f"{self._path} is not written, training continues: {why}")
    self._reported = True


class _Page(threading.Thread):
  """The thread that waits for the process of one page.

  Attributes:
    ended: when it has ended, on the clock of `time.monotonic`; 0 before.
    seconds: that the page took.
  """

  def __init__(
    self,
    workdir: epath.Path,
    niceness: int,
    written: Callable[[bytes], None],
    failed: Callable[[str], None],
  ):
    super().__init__(name="run.html", daemon=True)
    self.ended = self.seconds = 0.0
    self._began = time.monotonic()
    self._written, self._failed = written, failed
    self._quit = False
    self._process = subprocess.Popen(
      [sys.executable, "-m", "reports.run_page", os.fspath(workdir), str(niceness)],
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
    )

  def quit(self) -> None:
    """Ends the process, without a report, and the thread."""
    self._quit = True
    self._process.kill()
    self.join()

  def run(self) -> None:
    """Hands the page over, or reports the last line that the process has printed."""
    try:
      with self._process as process:
        try:
          page, said = process.communicate(timeout=LONGEST_SECONDS)
        except subprocess.TimeoutExpired:
          process.kill()
          raise RuntimeError(f"it took longer than {LONGEST_SECONDS:g} s") from None
      if process.returncode:
        lines = said.decode(errors="replace").strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"exit code {process.returncode}")
      if not self._quit:
        self._written(page)
    except Exception as error:  # whatever it is, it is only a page
      if not self._quit:
        self._failed(str(error))
    self.ended = time.monotonic()
    self.seconds = self.ended - self._began
