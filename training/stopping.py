"""SIGTERM and Ctrl-C ask the loop to stop after the step at hand; it saves, and exits with 75."""

import signal

EXIT_CODE = 75  # EX_TEMPFAIL: run the same command again


class StopRequest:
  """Set by SIGTERM or Ctrl-C; a context manager that puts the old handlers back.

  A second Ctrl-C interrupts at once, for someone who does not want to wait for a save.
  """

  def __init__(self):
    """Requests nothing yet."""
    self.requested = ""

  def __enter__(self) -> "StopRequest":
    """Installs the handlers."""
    self._old = {s: signal.signal(s, self._handle) for s in (signal.SIGTERM, signal.SIGINT)}
    return self

  def __exit__(self, *exception) -> None:
    """Puts the old handlers back."""
    for number, handler in self._old.items():
      signal.signal(number, handler)

  def __bool__(self) -> bool:
    """Tells whether a stop was requested."""
    return bool(self.requested)

  def _handle(self, number: int, frame) -> None:
    if self.requested and number == signal.SIGINT:
      raise KeyboardInterrupt
    self.requested = signal.Signals(number).name
