"""Sinks: where else the metrics of a run go, besides metrics.jsonl and TensorBoard.

`metrics.sinks` names them: a CSV file, experiment trackers, and what a config file has registered
in SINKS. The functions here are those of process 0, which alone writes.
"""

import functools
import importlib.util
import shutil
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from etils import epy

from processes.coordination import current
from runtime.extensions import Table, error_text

with epy.lazy_imports():
  from training.metrics import built_in_sinks

TRACKERS = ("aim", "mlflow", "trackio", "wandb")  # also the names of their packages


class Sink(Protocol):
  """Takes the lines of metrics.jsonl that are about steps and evaluations.

  It may also have `on_rollback(step)`, which is called when training has gone back to the
  checkpoint of a step, before a later step is written again; `news()`, which returns lines to
  print; `finish()`, which is called on all sinks before the first `close`, so that they are waited
  for together; and `kill()`, which is called after another of its methods has raised.
  """

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Takes a line. After a rollback or a resume, a step comes again."""
    ...

  def close(self) -> None:
    """Called once, at the end."""
    ...


def _tracker(name: str, *given: Any) -> Sink:
  return built_in_sinks.TrackerSink(name, *given)


def _csv(_: Any, *given: Any) -> Sink:
  return built_in_sinks.CsvSink(*given)


# name -> function of (config, workdir, step that the run starts from), which returns a Sink.
SINKS: Table = Table(
  "sink",
  {"csv": _csv, **{name: functools.partial(_tracker, name) for name in TRACKERS}},
  numerics=False,
)


def require_packages(metrics: Any) -> None:
  """Raises ValueError if a tracker's package is not installed; does nothing but on process 0."""
  python = metrics.sinks_python
  wanted = [name for name in metrics.sinks if name in TRACKERS]
  if not current().first or not wanted:
    return
  if python:  # what is missing there is reported by the sink
    if shutil.which(python) is None:
      raise ValueError(f"metrics.sinks_python={python!r}: there is no such program")
    return
  if missing := [name for name in wanted if importlib.util.find_spec(name) is None]:
    raise ValueError(
      f"metrics.sinks: not installed: {', '.join(missing)}; run `make sinks`, and add "
      f"--config.metrics.sinks_python=.venv-sinks/bin/python"
    )


class Sinks:
  """The sinks of a run. One that raises is reported once and dropped: training continues."""

  def __init__(self, config: Any, workdir: Any, step: int, warn: Callable[[str], None]):
    """Opens those that `metrics.sinks` names.

    Args:
      config: finalized.
      workdir: the run's folder.
      step: that the run starts from.
      warn: reports a text.
    """
    self._warn = warn
    self._open: dict[str, Sink] = {}
    for name in config.metrics.sinks:
      self._guarded(name, functools.partial(self._add, name, config, workdir, step))

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Gives a line to every sink."""
    for name in [*self._open]:
      self._call(name, "write", step, dict(values))

  def on_rollback(self, step: int) -> None:
    """Notifies every sink that has `on_rollback`."""
    self._each("on_rollback", step)

  def news(self) -> list[str]:
    """Returns what the sinks have said since the last call; also after `close`."""
    return [line for found in self._each("news") for line in found or ()]

  def close(self) -> None:
    """Closes every sink."""
    self._each("finish")
    self._each("close")

  def _add(self, name: str, *arguments: Any) -> None:
    self._open[name] = SINKS[name](*arguments)

  def _each(self, method: str, *arguments: Any) -> list[Any]:
    """Calls a method of all sinks that have it."""
    return [
      self._call(n, method, *arguments) for n, one in [*self._open.items()] if hasattr(one, method)
    ]

  def _call(self, name: str, method: str, *arguments: Any) -> Any:
    return self._guarded(name, lambda: getattr(self._open[name], method)(*arguments))

  def _guarded(self, name: str, call: Callable[[], Any]) -> Any:
    try:
      return call()
    except Exception as error:
      sink = self._open.pop(name, None)
      if hasattr(sink, "kill"):
        sink.kill()
      why = str(error) if isinstance(error, built_in_sinks.SinkError) else error_text(error)
      self._warn(f"the sink {name!r} is dropped, training continues: {why}")
