"""Hosts on this machine: namespaces with a name and a memory folder of their own. As root.

Two of them may have networks of their own, and a link between these that can be cut.
"""

import pathlib
import shutil
import subprocess
import time
from collections.abc import Sequence

ADDRESS = "10.99.99.1{0}"  # of a linked host
SIZE = "64m"  # of a host's /dev/shm

_SCRIPT = """
set -e
mount -t tmpfs -o size={size} tmpfs /dev/shm
hostname {name}
(cat /etc/hosts; echo {address} {name}) > {folder}/{name}.hosts
mount --bind {folder}/{name}.hosts /etc/hosts
touch {folder}/{name}.ready
exec sleep infinity
"""


class Hosts:
  """Some hosts; a context manager. What they have in memory outlives the processes of a run."""

  def __init__(self, folder: pathlib.Path, count: int, size: str = SIZE, *, linked: bool = False):
    """Starts them; `folder` gets files of theirs. `linked`: two with networks of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    self._keepers, self._folder = [], folder
    self._kinds = ["--mount", "--uts", *(["--net"] if linked else [])]
    for number in range(count):
      address = ADDRESS.format(number) if linked else "127.0.0.1"
      names = {"name": f"host-{number}", "address": address}
      script = _SCRIPT.format(**names, folder=folder, size=size)
      command = ["unshare", *self._kinds, "sh", "-c", script]
      self._keepers.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
    until = time.monotonic() + 20
    while len(list(folder.glob("*.ready"))) < count:
      assert time.monotonic() < until, "the namespaces cannot be made: is this root?"
      time.sleep(0.02)
    if linked:
      first, second = (keeper.pid for keeper in self._keepers)
      run = f"ip link add eth0 netns {first} type veth peer name eth0 netns {second}"
      subprocess.run(run.split(), check=True)
      for number in range(2):
        address = ADDRESS.format(number)
        self.shell(number, f"ip addr add {address}/24 dev eth0; ip link set lo up")
      self.link("up")

  def link(self, state: str) -> None:
    """Makes the link between the two `up`, or cuts it: `down`."""
    for number in range(2):
      self.shell(number, f"ip link set eth0 {state}")

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
    return ["nsenter", keeper, *self._kinds, f"--wd={pathlib.Path.cwd()}", "--"]

  def shell(self, host: int, script: str) -> str:
    """Runs a script on a host; returns what it prints."""
    command: Sequence[str] = [*self.entered(host), "sh", "-c", script]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
