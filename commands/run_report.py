"""A run's own report while it trains: its history, samples of its text, and `run.html`.

The page is made from the files of the workdir alone (`page_writer`), so that it holds nothing that
a killed run would have lost. Only process 0 writes.
"""

import dataclasses
import socket
from collections.abc import Callable
from typing import Any

from etils import epath

from commands.page_writer import PageWriter
from inference.request import Request, as_bytes, text_spec
from processes import coordination
from runtime import collectives, files, provenance
from training import history
from training.bad_steps import BadStepError
from training.callbacks import Observer
from training.history import History
from training.metrics.console import warn
from training.restore import Start
from training.setup import Job
from training.state import State

LONGEST_SECONDS = 60.0  # that the end of a run waits for its page
STOPPED_SECONDS = 10.0  # after a stop, which may be followed by a kill


def of(start: Start, wanted: Request | None, *, command: str = "") -> "RunReport":
  """Returns the report of a run that begins; without `metrics.report` it does nothing.

  Args:
    start: where it starts.
    wanted: what it samples at each evaluation; None for nothing.
    command: the command line; "" of a notebook.
  """
  on = start.job.config.metrics.report
  report = RunReport(start.job, start.workdir, start.owner.require, wanted, on=on)
  report.begin(start.step, command)
  return report


class RunReport(Observer):
  """Records what happens to a run, draws samples, and has the page rewritten.

  Sampling runs on all processes; the rest on process 0.

  Attributes:
    sampler: compiled for `evaluation.sample_tokens`; None before the first sample.
  """

  def __init__(
    self,
    job: Job,
    workdir: epath.Path,
    require: Callable[[], None],
    wanted: Request | None,
    *,
    on: bool,
  ):
    """Writes nothing yet.

    Args:
      job: of the run.
      workdir: the run's folder.
      require: raises where the run may write no longer.
      wanted: what is sampled at each evaluation.
      on: whether it does anything.
    """
    self._job, self._workdir, self._require = job, workdir, require
    self._on, self._writes = on, on and coordination.current().first
    self._history = History(workdir, require)
    self._page = PageWriter(workdir, history.REPORT, require, warn)
    self._request = wanted if on else None
    self._step = 0
    self.sampler: Any = None

  def begin(self, step: int, command: str) -> None:
    """Records a start, and the layout; `step` steps are done."""
    self._step = step
    if not self._writes:
      return
    from reports import layout_page  # of runs with a page alone

    job = self._job
    text = files.json_text(layout_page.stored_layout(job)) + "\n"
    try:
      files.replace(self._workdir / history.DRAWINGS, text, require=self._require)
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

  def compiled(self, step: int, program: Any) -> None:
    """Records the collectives of the step, and what the planner predicts for it."""
    if not self._writes:
      return
    from planning import prediction  # as layout_page

    rows = collectives.summarize(collectives.collectives(program.as_text(), self._job.mesh))
    try:
      predicted = dataclasses.asdict(prediction.of_program(self._job, program))
    except Exception as error:  # of whatever hardware; a run does not depend on it
      predicted = {"missing": str(error)}
    self._history.add(
      history.COMPILED,
      step,
      collectives=[
        {"axis": "+".join(row.axes), "kind": row.kind, "runs": row.count, "bytes": row.bytes}
        for row in rows
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
