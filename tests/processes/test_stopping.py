"""Signals: noticed wherever the main thread is, once for a save, twice for at once."""

import ctypes
import os
import select
import signal
import threading
import time

import pytest

from processes.stopping import StopRequest


def test_nothing_was_asked():
  with StopRequest() as stop:
    assert not stop
    assert stop.requested == ""
    assert stop.arrived() == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_request(number):
  with StopRequest() as stop:
    os.kill(os.getpid(), number)
    assert stop
    assert stop.requested == number.name
    assert stop.arrived() == number.name
    assert stop.arrived() == ""


def test_a_signal_while_the_main_thread_runs_c_code():
  seen = []
  with StopRequest() as stop:

    def wait():
      [ready], _, _ = select.select([stop.wakeup], [], [], 10)
      seen.append((ready == stop.wakeup, stop.arrived(), bool(stop), time.monotonic()))

    # To another thread, as the kernel may choose: the call below is not interrupted by it.
    watcher = threading.Thread(target=wait)
    watcher.start()
    killer = threading.Timer(0.2, signal.pthread_kill, (watcher.ident, signal.SIGTERM))
    killer.start()
    ctypes.CDLL(None).usleep(ctypes.c_uint(800_000))
    back = time.monotonic()
    watcher.join()
    killer.join()
  [(readable, name, handled, when)] = seen
  assert readable
  assert name == "SIGTERM"
  assert not handled  # no handler could run yet
  assert when < back - 0.3


def test_a_second_ctrl_c_interrupts():
  with StopRequest() as stop:
    os.kill(os.getpid(), signal.SIGINT)
    assert stop.requested == "SIGINT"
    with pytest.raises(KeyboardInterrupt):
      os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_after_a_stop_elsewhere_interrupts():
  with StopRequest() as stop:
    stop.request("SIGTERM to process 1")
    with pytest.raises(KeyboardInterrupt):
      os.kill(os.getpid(), signal.SIGINT)


def test_a_second_sigterm_changes_nothing():
  with StopRequest() as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.requested == "SIGTERM"


def test_the_first_reason_stays():
  stop = StopRequest()
  stop.request("SIGTERM to process 1")
  stop.request("SIGINT")
  assert stop.requested == "SIGTERM to process 1"


def test_other_signals_are_no_stop():
  old = signal.signal(signal.SIGUSR1, lambda *_: None)
  try:
    with StopRequest() as stop:
      os.kill(os.getpid(), signal.SIGUSR1)
      assert not stop
      assert stop.arrived() == ""
  finally:
    signal.signal(signal.SIGUSR1, old)


def test_handlers_and_descriptors_are_put_back():
  before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
  with StopRequest() as stop:
    ends = stop.wakeup
  assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
  with pytest.raises(OSError, match="Bad file descriptor"):
    os.fstat(ends)
  old = signal.set_wakeup_fd(-1)
  signal.set_wakeup_fd(old)
  assert old == -1
