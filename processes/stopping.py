"""SIGTERM and Ctrl-C ask the loop to stop; it saves the step at hand, and exits with 75."""

import os
import signal

EXIT_CODE = 75  # EX_TEMPFAIL: run the same command again


class StopRequest:
  """Set by SIGTERM or Ctrl-C, here or in another process; a context manager.

  A second Ctrl-C interrupts at once, for someone who does not want to wait for a save. Python runs
  handlers in the main thread alone, which may be inside of a compilation for minutes: whoever
  waits for a signal reads `wakeup`, to which it is written at once.

  Attributes:
    requested: what has asked for it, "" where nothing has.
    wakeup: a file descriptor that becomes readable when a signal arrives.
  """

  def __init__(self):
    """Requests nothing yet."""
    self.requested = ""
    self.wakeup, self._write = os.pipe()
    for end in (self.wakeup, self._write):
      os.set_blocking(end, False)

  def __enter__(self) -> "StopRequest":
    """Installs the handlers."""
    self._old = {s: signal.signal(s, self._handle) for s in (signal.SIGTERM, signal.SIGINT)}
    self._old_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
    return self

  def __exit__(self, *exception) -> None:
    """Puts the old handlers back."""
    signal.set_wakeup_fd(self._old_wakeup)
    for number, handler in self._old.items():
      signal.signal(number, handler)
    os.close(self._write)
    os.close(self.wakeup)

  def __bool__(self) -> bool:
    """Tells whether a stop was requested."""
    return bool(self.requested)

  def request(self, reason: str) -> None:
    """Asks for a stop, from any thread."""
    self.requested = self.requested or reason

  def arrived(self) -> str:
    """Returns the name of a signal that has come since, "" for none; for the thread that waits."""
    try:
      numbers = os.read(self.wakeup, 64)
    except BlockingIOError:
      return ""
    asking = [n for n in numbers if n in (signal.SIGTERM, signal.SIGINT)]
    return signal.Signals(asking[0]).name if asking else ""

  def _handle(self, number: int, frame) -> None:
    del frame
    if self.requested and number == signal.SIGINT:
      raise KeyboardInterrupt
    self.request(signal.Signals(number).name)
