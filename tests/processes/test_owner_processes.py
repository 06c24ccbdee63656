"""Whether the process that owns a workdir still runs on this machine."""

import dataclasses
import os
import subprocess
import sys

import pytest

from processes import workdir_lease
from processes.workdir_lease import this_process


def test_a_running_process_and_a_reused_pid_are_distinguished():
  me = this_process()
  assert me.machine, "no /proc here"
  assert not me.ended()
  assert dataclasses.replace(me, ticks=me.ticks + 1).ended()  # an earlier process of this number
  assert not dataclasses.replace(me, ticks=me.ticks + 1, machine="another boot").ended()
  assert not dataclasses.replace(me, ticks=0).ended()


@pytest.mark.parametrize("pid", [0, -1, 2**31, 2**70])
def test_a_process_that_cannot_be_is_not_taken_for_dead(pid):
  assert not dataclasses.replace(this_process(), pid=pid).ended()


def test_a_process_of_another_user_that_proc_hides_lives(monkeypatch):
  def kill(pid, number):
    raise PermissionError(1, "another user's")

  theirs = dataclasses.replace(this_process(), pid=2**22)  # beyond the largest of Linux
  assert theirs.ended()
  monkeypatch.setattr(os, "kill", kill)
  assert not theirs.ended()


def test_a_zombie_is_dead():
  child = subprocess.Popen([sys.executable, "-c", ""])
  ticks = workdir_lease._ticks(child.pid)
  os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
  assert ticks
  assert workdir_lease.Owner("here", child.pid, ticks, this_process().machine).ended()
  child.wait()
