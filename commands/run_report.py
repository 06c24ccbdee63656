"""A run's own report while it trains: its history, samples of its text, and `run.html`.

The page is made from the files of the workdir alone, so that it holds nothing that a killed run
would have lost, and by another process, `python -m reports.run_page`, so that it costs the run
neither imports nor Python's lock. Only process 0 writes.
"""

import os
import pathlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from etils import epath

from inference.request import Request, as_bytes, text_spec
from processes import coordination
from runtime import files, provenance
from training import history, workdir_files
from training.bad_steps import BadStepError
from training.callbacks import CompiledStep, Observer
from training.history import History
from training.metrics.console import warn
from training.setup import Job
from training.state import State

LONGEST_SECONDS = 60.0  # that the end of a run waits for its page
STOPPED_SECONDS = 10.0  # after a stop, which may be followed by a kill


class RunReport(Observer):
  """Records what happens to a run, draws samples, and has the page rewritten.

  Sampling runs on all processes; the rest on process 0.
  """

  def __init__(
    self,
    job: Job,
    workdir: epath.Path,
    require: Callable[[], None],
    wanted: Request | None,
  ):
    """Writes nothing yet.

    Args:
      job: of the run.
      workdir: the run's folder.
      require: raises where the run may write no longer.
      wanted: what is sampled at each evaluation; None for nothing.
    """
    self._job, self._workdir, self._require = job, workdir, require
    self._writes = coordination.current().first
    self._history = History(workdir, require)
    self._page = PageWriter(workdir, workdir_files.REPORT, require, warn)
    self._request = wanted
    self._step, self.sampler = 0, None

  def begin(self, step: int, command: str) -> None:
    """Records a start, by a command line ("" of a notebook), and the layout."""
    self._step = step
    if not self._writes:
      return
    from reports import layout_page  # of runs with a page alone

    job = self._job
    text = files.json_text(layout_page.stored_layout(job)) + "\n"
    try:
      files.replace(self._workdir / workdir_files.DRAWINGS, text, require=self._require)
    except OSError as error:
      warn(f"the drawings of the layout are not written, training continues: {error}")
    self._history.add(
      history.START,
      step,
      command=command,
      host=socket.gethostname(),
      processes=coordination.current().count,
      devices=job.mesh.size,
      device_kind=job.mesh.devices.flat[0].device_kind,
      simulated=job.devices.simulated,
      mesh={axis: size for axis, size in job.devices.sizes.items() if size > 1},
      chosen={one.key: str(one.value) for one in job.choices},
      versions=provenance.versions(),
    )

  def compiled(self, step: int, found: CompiledStep) -> None:
    """Records the collectives of the step, and what the planner predicts for it."""
    if not self._writes:
      return
    from planning import prediction  # as layout_page

    platform, constants = self._job.devices.platform, self._job.config.planning.constants
    try:
      predicted = prediction.of_program(found.program, self._job.mesh, platform, constants)
    except Exception as error:  # of whatever hardware; a run does not depend on it
      predicted = {"missing": str(error)}
    self._history.add(
      history.COMPILED,
      step,
      collectives=[
        {"axis": "+".join(row.axes), "kind": row.kind, "runs": row.count, "bytes": row.bytes}
        for row in found.collectives
      ],
      predicted=predicted,
    )
    self._page.request()

  def saved(self, step: int) -> None:
    """Records a checkpoint."""
    if self._writes:
      self._history.add(history.SAVED, step)

  def rolled_back(self, step: int) -> None:
    """Records a rollback, and has the page rewritten."""
    self._step = step
    if self._writes:
      self._history.add(history.ROLLED_BACK, step)
      self._page.request()

  def evaluated(self, step: int, state: State) -> None:
    """Draws a sample, unless it is the last step, and has the page rewritten."""
    self._step = step
    if self._request is not None and step < self._job.config.training.steps:
      if self.sampler is None:
        from inference.sampler import Sampler  # of runs that show samples alone

        self.sampler = Sampler(self._job, self._request)
      [drawn] = self.sampler(state.params, self._request, variables=state.variables)
      self.sampled(drawn)
    if self._writes:
      self._page.request()

  def sampled(self, drawn: bytes) -> None:
    """Records a sample of the newest state that was evaluated: what follows the prompt."""
    if self._writes:
      [prompt] = self._request.prompts
      shown = as_bytes(text_spec(self._job.config).shown(prompt))
      texts = {"prompt": shown, "text": drawn}
      texts = {key: text.decode(errors="replace") for key, text in texts.items()}
      self._history.add(history.SAMPLE, self._step, **texts)

  def end(self, *, stopped: bool = False) -> None:
    """Records the end of this process, writes the page, and waits for it; less long if stopped."""
    self._end("stopped" if stopped else "done", STOPPED_SECONDS if stopped else LONGEST_SECONDS)

  def failed(self, error: Exception) -> None:
    """Records what has ended the run, and writes the page."""
    bad = {"bad_step": error.step} if isinstance(error, BadStepError) else {}
    why = error.why if isinstance(error, BadStepError) else str(error)
    self._end("failed", STOPPED_SECONDS, why=why, **bad)

  def _end(self, how: str, seconds: float, **values: Any) -> None:
    if self._writes:
      self._history.add(history.END, self._step, how=how, **values)
      self._page.finish(seconds)


# ------------------------------ the page ------------------------------

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE_SECONDS = 600.0  # that a page may take beside a run, on a machine without a free core
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
    self._process: subprocess.Popen | None = None  # whose page is wanted
    self._thread: threading.Thread | None = None  # that waits for it
    self._rests_until = 0.0  # on the clock of `time.monotonic`

  def request(self) -> None:
    """Starts to write the page, unless one is being written, or was a short time ago."""
    if self._process is None and time.monotonic() >= self._rests_until:
      self._begin(NICENESS)

  def finish(self, seconds: float) -> None:
    """Writes the page from what the files say now, and waits for it so long at most."""
    self._quit()  # the page of older numbers
    self._begin(0)
    if self._thread is not None:
      self._thread.join(seconds)
      if self._quit():
        self._failed(f"it took longer than {seconds:g} s")

  def _begin(self, niceness: int) -> None:
    try:
      self._process = subprocess.Popen(
        [sys.executable, "-m", "reports.run_page", os.fspath(self._workdir), str(niceness)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
      )
    except OSError as error:
      self._failed(str(error))
      return
    self._thread = threading.Thread(
      target=self._wait, args=(self._process,), name="run.html", daemon=True
    )
    self._thread.start()

  def _quit(self) -> bool:
    """Ends the process, without a report, and the thread; returns whether there was one."""
    process, self._process = self._process, None
    if process is not None:
      process.kill()
      self._thread.join()
    return process is not None

  def _wait(self, process: subprocess.Popen) -> None:
    """Writes the page of a process, or reports the last line that it has printed."""
    began = time.monotonic()
    try:
      with process:
        try:
          page, said = process.communicate(timeout=PAGE_SECONDS)
        except subprocess.TimeoutExpired:
          process.kill()
          raise RuntimeError(f"it took longer than {PAGE_SECONDS:g} s") from None
      if process.returncode:
        lines = said.decode(errors="replace").strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"exit code {process.returncode}")
      if process is self._process:
        files.replace(self._path, page, require=self._require)
    except Exception as error:  # whatever it is, it is only a page
      if process is self._process:
        self._failed(str(error))
    ended = time.monotonic()
    self._rests_until = ended + PAUSE * (ended - began)
    if process is self._process:
      self._process = None

  def _failed(self, why: str) -> None:
    self._report(f"{self._path} is not written, training continues: {why}")
    self._report = lambda text: None
