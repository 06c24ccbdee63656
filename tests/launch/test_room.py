"""How many processes a machine can hold, and what is said where it cannot."""

import resource
import types

import psutil
import pytest

from processes.launch import __main__ as launcher_code
from runtime import exit_codes
from tests.launch.launchers import runs


@pytest.mark.parametrize(
  ("memory_mib", "cores", "files", "most", "said"),
  [
    (1600, 64, 10**6, 10, "1600 MiB of memory, about 150 for each"),
    (10**6, 2, 10**6, 64, "2 cores, at most 32 processes for each"),
    (10**6, 64, 264, 100, "264 files may be open, 2 for each and 64 others (RLIMIT_NOFILE)"),
    (300, 1, 10**6, 2, "300 MiB of memory, about 150 for each"),
  ],
)
def test_what_is_lacking_is_said_with_the_numbers(
  monkeypatch, memory_mib, cores, files, most, said
):
  limits = []
  total = types.SimpleNamespace(total=memory_mib << 20)
  monkeypatch.setattr(psutil, "virtual_memory", lambda: total)
  monkeypatch.setattr("os.sched_getaffinity", lambda _: range(cores), raising=False)
  monkeypatch.setattr(resource, "getrlimit", lambda _: (68, files))
  monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
  assert launcher_code.make_room(most) == ""
  assert limits == ([(2 * most + 64, files)] if most > 2 else [])
  text = launcher_code.make_room(100 * most)
  assert text.startswith(f"--processes={100 * most}: this machine fits about {most}: ")
  assert said in text
  assert text.endswith("; start fewer, or on several machines")


def test_the_launcher_refuses_and_starts_nothing(launch):
  launcher = launch("mark('up')", "--processes=1000000", "--restarts=3")
  assert launcher.end() == 2
  [line] = launcher.err.splitlines()
  assert "--processes=1000000: this machine fits about " in line
  assert not (launcher.folder / "up").exists()


def test_sigterm_while_processes_are_started_leaves_none_behind(launch):
  # The first one to start asks the launcher to stop, while it starts the others.
  command = ["sh", "-c", 'kill -TERM "$PPID"; echo $$ >> pids; exec sleep 100']
  launcher = launch(None, "--processes=48", "--restarts=2", command=command)
  assert launcher.end() == exit_codes.STOPPED
  assert " of 48 processes were started; nothing has begun" in launcher.err
  assert "restart" not in launcher.err
  pids = map(int, (launcher.folder / "pids").read_text().split())
  assert not [pid for pid in pids if psutil.pid_exists(pid) and runs(psutil.Process(pid))]
