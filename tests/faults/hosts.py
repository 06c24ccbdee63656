"""Hosts on this machine: namespaces with a name and a memory folder of their own. As root."""

import pathlib
import shutil
import subprocess
import time
from collections.abc import Sequence

SIZE = "64m"  # of a host's /dev/shm

_SCRIPT = """
set -e
mount -t tmpfs -o size={size} tmpfs /dev/shm
hostname {name}
(cat /etc/hosts; echo 127.0.0.1 {name}) > {folder}/{name}.hosts
mount --bind {folder}/{name}.hosts /etc/hosts
touch {folder}/{name}.ready
exec sleep infinity
"""


class Hosts:
  """Some hosts; a context manager. What they have in memory outlives the processes of a run."""

  def __init__(self, folder: pathlib.Path, count: int, size: str = SIZE):
    """Starts them; `folder` gets files of theirs."""
    folder.mkdir(parents=True, exist_ok=True)
    self._keepers, self._folder = [], folder
    for number in range(count):
      script = _SCRIPT.format(name=f"host-{number}", folder=folder, size=size)
      command = ["unshare", "--mount", "--uts", "sh", "-c", script]
      self._keepers.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
    until = time.monotonic() + 20
    while len(list(folder.glob("*.ready"))) < count:
      assert time.monotonic() < until, "the namespaces cannot be made: is this root?"
      time.sleep(0.02)

  def __enter__(self) -> "Hosts":
    """Returns itself."""
    return self

  def __exit__(self, *exception) -> None:
    """Ends them."""
    for keeper in self._keepers:
      keeper.kill()
      keeper.wait()
    shutil.rmtree(self._folder, ignore_errors=True)

  def entered(self, host: int) -> list[str]:
    """Returns the command that starts another one on a host."""
    keeper = f"--target={self._keepers[host].pid}"
    return ["nsenter", keeper, "--mount", "--uts", f"--wd={pathlib.Path.cwd()}", "--"]

  def shell(self, host: int, script: str) -> str:
    """Runs a script on a host; returns what it prints."""
    command: Sequence[str] = [*self.entered(host), "sh", "-c", script]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
