"""Signals: noticed wherever the main thread is, once for a save, twice for at once."""

import ctypes
import os
import pathlib
import select
import signal
import subprocess
import sys
import threading
import time

import pytest

from processes import preemption
from processes.preemption import AGAIN_SECONDS, StopRequest
from tests.helpers.terminals import Terminal
from tests.processes.clocks import Clock

ROOT = pathlib.Path(__file__).parent.parent.parent


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_a_request(number, monkeypatch):
  monkeypatch.setattr(os, "isatty", lambda _: False)  # the terminal of these tests is not gone
  before = signal.signal(number, signal.SIG_DFL)  # nohup ignores SIGHUP, and so would this
  try:
    with StopRequest() as stop:
      os.kill(os.getpid(), number)
      assert not stop, "only the thread that waits records it"
      stop.hear()
      assert stop
      assert stop.requested == number.name
  finally:
    signal.signal(number, before)


def test_a_signal_while_the_main_thread_runs_c_code():
  seen = []
  with StopRequest() as stop:

    def wait():
      [ready], _, _ = select.select([stop.wakeup], [], [], 10)
      stop.hear()
      seen.append((ready == stop.wakeup, stop.requested, time.monotonic()))

    # To another thread, as the kernel may choose: the call below is not interrupted by it.
    watcher = threading.Thread(target=wait)
    watcher.start()
    killer = threading.Timer(0.2, signal.pthread_kill, (watcher.ident, signal.SIGTERM))
    killer.start()
    ctypes.CDLL(None).usleep(ctypes.c_uint(800_000))
    back = time.monotonic()
    watcher.join()
    killer.join()
  [(readable, name, when)] = seen
  assert readable
  assert name == "SIGTERM"
  assert when < back - 0.3


@pytest.fixture
def time_passes(monkeypatch):
  """Lets the monotonic clock of a request run by itself; returns it."""
  clock = Clock()
  monkeypatch.setattr(preemption, "time", clock)
  return clock


def ctrl_c(stop: StopRequest, times: int = 1) -> None:
  """Presses Ctrl-C, and lets it be heard."""
  for _ in range(times):
    os.kill(os.getpid(), signal.SIGINT)
  stop.hear()


@pytest.mark.parametrize("first", ["SIGINT", "SIGTERM to process 1"])
def test_a_second_ctrl_c_is_one_that_comes_clearly_after_the_announcement(time_passes, first):
  with StopRequest() as stop:
    stop.request(first)
    ctrl_c(stop, 2)
    time_passes.now += 10
    ctrl_c(stop)
    assert not stop.insisted, "nobody was told yet what the first one does"
    stop.announced()
    ctrl_c(stop)
    time_passes.now += AGAIN_SECONDS / 2
    ctrl_c(stop, 2)
    assert not stop.insisted, "a wrapper passes on the first one"
    time_passes.now += AGAIN_SECONDS
    ctrl_c(stop)
    assert not stop.insisted, "it may have come at any time since the pipe was empty"
    ctrl_c(stop)
    assert stop.insisted
    assert stop.requested == first


def test_sigterm_never_insists(time_passes):
  with StopRequest() as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    stop.hear()
    stop.announced()
    for _ in range(3):
      time_passes.now += 10
      os.kill(os.getpid(), signal.SIGTERM)
      stop.hear()
    assert not stop.insisted


def test_the_first_reason_stays_and_other_signals_are_no_stop():
  old = signal.signal(signal.SIGUSR1, lambda *_: None)
  try:
    with StopRequest() as stop:
      os.kill(os.getpid(), signal.SIGUSR1)
      stop.hear()
      assert not stop
      assert not stop.insisted
      for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
        stop.hear()
      stop.request("SIGINT to process 1")
      assert stop.requested == "SIGTERM"
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


def test_ctrl_c_while_python_ends_changes_nothing():
  script = """
import os, sys, time
from processes import preemption
preemption.begin()

class Last:
  def __del__(self, write=os.write, sleep=time.sleep):  # after all that is called at exit
    write(1, b"ending")
    sleep(1)

last = Last()
sys.exit(preemption.ending(lambda arguments: 3)([]))
"""
  command = [sys.executable, "-c", script]
  with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as popen:
    assert popen.stdout.read(6) == b"ending"
    popen.send_signal(signal.SIGINT)
    _, errors = popen.communicate(timeout=30)
  assert popen.returncode == 3
  assert errors == b""


def test_ctrl_c_before_the_watchdog_lets_what_polls_clean_up(tmp_path):
  script = """
import pathlib, sys, time
from processes import preemption
preemption.begin()

def main(arguments):
  half = pathlib.Path(arguments[0])
  half.touch()
  stop = preemption.current()
  with stop.polled():
    print("began", flush=True)
    try:
      while not stop:
        time.sleep(0.01)
      time.sleep(0.2)  # until the thread of the signals has seen it
      raise preemption.Stopped
    finally:
      half.unlink()

sys.exit(preemption.ending(main)(sys.argv[1:]))
"""
  half = tmp_path / "half"
  command = [sys.executable, "-c", script, half]
  with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as popen:
    assert popen.stdout.readline() == b"began\n"
    popen.send_signal(signal.SIGINT)
    out, errors = popen.communicate(timeout=30)
  assert (popen.returncode, errors) == (75, b"")
  assert out == b"stopped as requested (SIGINT); there was nothing to save\n"
  assert not half.exists()


# Prints before and after its window is closed, and does not hear of that by SIGHUP.
_IN_A_CLOSED_WINDOW = """
import select, signal, sys
from processes.preemption import StopRequest
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with StopRequest():
  print("open", flush=True)
  window = select.poll()
  window.register(0, 0)
  window.poll(60_000)
  print("lost", flush=True)
  print("lost", file=sys.stderr, flush=True)
  print("lost", flush=True)
raise SystemExit(23)
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_what_is_printed_after_the_window_was_closed_is_no_error(unbuffered):
  command = [sys.executable, "-c", _IN_A_CLOSED_WINDOW]
  with Terminal(command, environment={"PYTHONUNBUFFERED": unbuffered}) as terminal:
    terminal.wait_for("open")
    terminal.hang_up()
    assert terminal.end() == 23
