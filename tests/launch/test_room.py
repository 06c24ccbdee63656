"""How many processes a machine can hold, and what is said where it cannot."""

import dataclasses
import resource

import psutil
import pytest

from processes.launch import __main__ as launcher_code
from processes.launch.__main__ import Machine
from runtime import exit_codes
from tests.launch.launchers import runs

MANY = 10**6
ENOUGH = Machine(MANY, MANY, MANY, MANY, cores=64, files=MANY)
LACKS = {
  "free_mib": (1600, 10, "1600 MiB of memory are available, about 150 are needed for each"),
  "cores": (2, 64, "2 cores, at most 32 processes for each"),
  "free_tasks": (1700, 17, "1700 more process ids may be taken, about 100 by each"),
  "files": (264, 100, "264 files may be open, 2 for each and 64 others"),
}


@pytest.mark.parametrize("what", LACKS)
def test_what_is_lacking_is_said_with_the_numbers(what):
  has, most, text = LACKS[what]
  machine = dataclasses.replace(ENOUGH, **{what: has})
  assert machine.lacks(most) == ("", 0)
  said, code = machine.lacks(most + 1)
  # What other processes have now may be there later.
  assert code == (exit_codes.FAILED if what.startswith("free") else exit_codes.REFUSED)
  assert said.startswith(f"--processes={most + 1}: this machine fits about {most}: {text}")
  assert ";" not in said.split(": ", 2)[2].removesuffix("; start fewer, or on several machines")


def test_all_that_is_lacking_is_said_at_once():
  said, _ = dataclasses.replace(ENOUGH, free_mib=300, cores=1).lacks(1000)
  assert "fits about 2: 300 MiB" in said
  assert "; 1 cores, at most 32" in said


def test_more_than_the_machine_would_ever_have_is_refused():
  machine = dataclasses.replace(ENOUGH, free_mib=300, total_mib=1500)
  assert [machine.lacks(count)[1] for count in (2, 10, 11)] == [0, 1, 2]


def test_this_machine_has_what_its_system_says():
  machine = Machine.this()
  assert 0 < machine.free_mib <= psutil.virtual_memory().total >> 20
  assert 0 < machine.cores <= psutil.cpu_count()
  assert 0 < machine.free_tasks < machine.total_tasks < 2**23
  assert machine.lacks(1) == ("", 0)


def test_the_limit_of_open_files_is_raised():
  before = resource.getrlimit(resource.RLIMIT_NOFILE)
  try:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    launcher_code.raise_open_files(500)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 1064
  finally:
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


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
