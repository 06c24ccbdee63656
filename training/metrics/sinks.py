"""Sinks: where else the metrics of a run go, besides metrics.jsonl and TensorBoard.

A config file registers one in SINKS, and `metrics.sinks` names it. The functions here are those
of process 0, which alone writes.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from runtime.extensions import Table, error_text


class Sink(Protocol):
  """Takes the lines of metrics.jsonl that are about steps and evaluations.

  It may also have `on_rollback(step)`, which is called when training has gone back to the
  checkpoint of a step, before a later step is written again.
  """

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Takes a line. After a rollback or a resume, a step comes again."""
    ...

  def close(self) -> None:
    """Called once, at the end."""
    ...


# name -> function of (config, workdir, step that the run starts from), which returns a Sink.
SINKS: Table = Table("sink", {}, numerics=False)


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
      self._guarded(name, lambda name=name: self._add(name, config, workdir, step))

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Gives a line to every sink."""
    for name, sink in list(self._open.items()):
      self._guarded(name, lambda sink=sink: sink.write(step, dict(values)))

  def on_rollback(self, step: int) -> None:
    """Notifies every sink that has `on_rollback`."""
    for name, sink in list(self._open.items()):
      if hasattr(sink, "on_rollback"):
        self._guarded(name, lambda sink=sink: sink.on_rollback(step))

  def close(self) -> None:
    """Closes every sink."""
    for name, sink in list(self._open.items()):
      self._guarded(name, sink.close)
    self._open.clear()

  def _add(self, name: str, *arguments: Any) -> None:
    self._open[name] = SINKS[name](*arguments)

  def _guarded(self, name: str, call: Callable[[], None]) -> None:
    try:
      call()
    except Exception as error:
      self._open.pop(name, None)
      self._warn(f"the sink {name!r} is dropped, training continues: {error_text(error)}")
