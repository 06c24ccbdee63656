"""The launcher leaves no process behind, whatever ends it."""

import os
import random
import sys
import time
import uuid

import psutil

from tests.launch.launchers import runs, wait_until

UP = ("[0] up 0", "[1] up 1")

# Two grandchildren, one of them in a process group of its own, as `timeout` makes it.
SLEEPER = f"{sys.executable} -S -c 'import os, time; GROUP; time.sleep(100)' &"
GROUP = SLEEPER.replace("GROUP", "os.setpgid(0, 0)")
SHELL = f"{SLEEPER.replace('GROUP', 'pass')} {GROUP} echo up $JAX_PROCESS_ID; wait"


def whole(launcher):
  """Returns its descendants once each process has a grandchild in another group."""
  family = launcher.family()
  apart = [process for process in family if os.getpgid(process.pid) == process.pid]
  return family if len(apart) == 1 + 2 + 2 else None


def test_killed_itself_it_leaves_no_orphan(launch):
  launcher = launch(None, command=["sh", "-c", SHELL])
  launcher.wait_for(*UP)
  family = wait_until(lambda: whole(launcher), "grandchildren")
  launcher.popen.kill()
  wait_until(lambda: not any(map(runs, family)), "the end of all")


def test_killed_at_any_moment_of_its_start_it_leaves_no_orphan(launch):
  marker = uuid.uuid4().hex

  def left():
    return [
      process
      for process in psutil.process_iter(["cmdline"])
      if marker in " ".join(process.info["cmdline"] or ()) and runs(process)
    ]

  seen = 0
  for _ in range(5):
    launcher = launch(f"'{marker}'; time.sleep(100)", "--processes=4")
    wait_until(launcher.family, "the reaper")
    time.sleep(random.uniform(0, 0.06))
    seen += len(left()) - 1  # the launcher's own arguments hold the marker too
    launcher.popen.kill()
    launcher.popen.wait()
  wait_until(lambda: not left(), "the end of all")
  assert seen > 0


def test_what_a_process_leaves_behind_ends_with_it(launch):
  end = "mkfifo end$JAX_PROCESS_ID; echo up $JAX_PROCESS_ID; read x < end$JAX_PROCESS_ID"
  shell = SHELL.replace("echo up $JAX_PROCESS_ID; wait", end)
  launcher = launch(None, command=["sh", "-c", shell])
  ends = [launcher.folder / f"end{index}" for index in range(2)]
  launcher.wait_for(*UP)
  family = wait_until(lambda: whole(launcher), "grandchildren")
  for end in ends:
    end.write_text("x\n")
  assert launcher.end() == 0
  assert not any(map(runs, family))
