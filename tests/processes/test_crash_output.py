"""What C++ prints when a peer has died goes to a file; other crashes are printed as they are."""

import os
import pathlib
import re
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]
STACKS = ["", "Thread 0x00007fb5a (most recent call first):", '  File "loop.py", line 94 in train']
# As printed by jax 0.10.2 when a peer was killed, shortened.
COORDINATION = [
  "E1124 08:33:58.254096   32493 coordination_service_agent.cc:289] Polled an error",
  "F1124 08:33:58.254115   32493 client.h:80] Terminating process because the JAX distributed "
  "service detected fatal errors.",
  "*** Check failure stack trace: ***",
  "    @     0x7f676f240634  absl::lts_20260107::log_internal::LogMessage::SendToLog()",
]
GLOO = [
  "terminate called after throwing an instance of 'gloo::EnforceNotMet'",
  "  what():  [enforce fail at external/gloo/gloo/transport/tcp/pair.cc:459] op.preamble.length",
]
OTHER = [
  "F1124 08:33:58.254115   32493 array.cc:80] Check failed: a == b",
  "*** Check failure stack trace: ***",
]
CLOSED = "Gloo AllGather failed: [pair.cc:547] Connection closed by peer [127.0.0.1]:20181"
# What Python has seen: an error of the loop, of a save, and of a thread.
_STACK = "Traceback (most recent call last):\\n  File x\\n"
OF_PYTHON = {
  "traceback": f"crash_output.print_error('{_STACK}{CLOSED}', RuntimeError({CLOSED!r}))",
  "save": f"crash_output.print_error('error: saving step 13: {CLOSED}', RuntimeError({CLOSED!r}))",
  "thread": f"""
import threading
def fail():
  raise RuntimeError("Gloo context initialization failed: {CLOSED}")
thread = threading.Thread(target=fail)
thread.start()
thread.join()
""",
}
FATAL = ["Fatal Python error: Aborted", *STACKS]


def start(folder, lines, then="os.abort()", before="", after=""):
  """Starts a process whose file descriptor 2 is diverted, and gets these lines from C++."""
  code = f"""
import os, subprocess, sys, time
from processes import crash_output
crash_output.divert({str(folder)!r}, 3, "process 3 (host): ")
{before}
os.write(2, b"W0000 an ordinary line\\n")
print("of Python", file=sys.stderr)
for line in {lines!r}:
  os.write(2, line.encode() + b"\\n")
{after}
{then}
"""
  return subprocess.Popen(
    [sys.executable, "-c", code],
    cwd=ROOT,
    env=ENVIRONMENT,
    stdin=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def run(*arguments, **more) -> str:
  """Returns what is printed by a process that is started so, until its end."""
  with start(*arguments, **more) as process:
    return process.communicate(timeout=60)[1]


ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "PYTHONFAULTHANDLER"}
BEFORE = {"W0000 an ordinary line", "of Python"}


@pytest.mark.parametrize("lines", [COORDINATION, GLOO], ids=["coordination", "gloo"])
def test_the_death_of_a_peer_is_one_line_and_the_stacks_are_in_a_file(tmp_path, lines):
  printed = run(tmp_path, [*lines, *FATAL])
  *before, line = printed.splitlines()
  file = tmp_path / "crash-process-3.txt"
  assert {*before} == BEFORE
  assert line == (
    "process 3 (host): another process has died or does not answer, which ends this one; the same "
    f"command resumes (stacks: {file})"
  )
  assert file.read_text().splitlines() == [*lines, *FATAL]


@pytest.mark.parametrize("after", OF_PYTHON.values(), ids=OF_PYTHON)
def test_an_error_that_python_has_seen_is_one_line_too(tmp_path, after):
  printed = run(tmp_path, [], "os._exit(1)", after=after)
  assert {*printed.splitlines()[:-1]} == BEFORE, printed
  assert printed.splitlines()[-1].startswith("process 3 (host): another process has died")
  assert "Connection closed by peer" in (tmp_path / "crash-process-3.txt").read_text()


def test_an_error_of_a_thread_without_a_peer_is_printed_in_full(tmp_path):
  after = OF_PYTHON["thread"].replace("Gloo context", "A context").replace(CLOSED, "no file")
  printed = run(tmp_path, [], "os._exit(1)", after=after)
  assert "RuntimeError: A context initialization failed: no file" in printed.splitlines()
  assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("lines", [[*OTHER, *FATAL], ["no end"]])
def test_any_other_crash_is_printed_in_full(tmp_path, lines):
  printed = run(tmp_path, lines)
  assert {*printed.splitlines()[:2]} == BEFORE
  assert printed.splitlines()[2:] == lines
  assert [*tmp_path.iterdir()] == []


def test_what_was_no_crash_is_printed_while_the_process_lives(tmp_path):
  lines = ["Traceback (most recent call last):", "  of a library"]
  with start(tmp_path, lines, "sys.stdin.read(); print('alive', file=sys.stderr)") as process:
    shown = [process.stderr.readline().rstrip() for _ in range(4)]
    assert shown[2:] == lines
    assert process.communicate(timeout=60)[1] == "alive\n"


@pytest.mark.parametrize("link", [True, False])
def test_without_a_workdir_or_with_a_link_in_its_place_the_file_is_a_temporary_one(tmp_path, link):
  workdir = tmp_path / "run"
  if link:
    workdir.mkdir()
    (workdir / "crash-process-3.txt").symlink_to(tmp_path / "elsewhere")
  file = pathlib.Path(re.search(r"\(stacks: (.*)\)", run(workdir, GLOO))[1])
  assert file.read_text().splitlines() == GLOO
  assert not file.is_relative_to(tmp_path)
  assert not (tmp_path / "elsewhere").exists()
  assert workdir.exists() == link
  file.unlink()


def test_signals_to_all_and_children_that_live_on_change_nothing(tmp_path):
  # A supervisor signals every process; a child has inherited the pipe.
  before = (
    "[helper] = crash_output._helpers\n"
    "child = subprocess.Popen(['sleep', '30'], stdout=subprocess.DEVNULL)"
  )
  after = "for number in (15, 2, 1): os.kill(helper.pid, number)"
  end = "os.write(2, b'terminate called by gloo::\\n'); os.abort()"
  began = time.monotonic()
  printed = run(tmp_path, [], end, before, after)
  assert time.monotonic() - began < 20
  assert "process 3 (host): another process has died" in printed


def test_python_keeps_its_terminal(tmp_path):
  main, other = os.openpty()
  code = (
    "import sys; from processes import crash_output\ncrash_output.divert('', 0, '')\n"
    "print(sys.stderr.isatty(), file=sys.stderr)"
  )
  subprocess.run([sys.executable, "-c", code], cwd=ROOT, stderr=other, check=True)
  os.close(other)
  assert os.read(main, 100) == b"True\r\n"
  os.close(main)
