"""A workdir has one owner: the run with the highest claim, which it renews by a heartbeat.

A claim's number is a fencing token. Whoever takes over claims the next number, and the owner looks
for a higher one before each write; a run that was stopped and replaced meanwhile stops there. No
clock is compared with another machine's: a start watches whether the heartbeat changes.
"""

import contextlib
import dataclasses
import datetime
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from processes.claims import FOLDER, LAST, Claims
from runtime.printable import printable

BEATS_PER_LEASE = 6
RUNNING, STOPPING, RELEASED = "running", "stopping", "released"
_LARGEST_PID = 2**22  # of Linux
_LONGEST_LEASE_SECONDS = 3600.0  # of what another run's claim says


class OwnedError(RuntimeError):
  """The workdir belongs to another run, which is alive."""


class LostError(RuntimeError):
  """The workdir belonged to this run, and does so no longer."""


@dataclasses.dataclass(frozen=True)
class Process:
  """Who claims a workdir.

  Attributes:
    host: its name, for people.
    pid: of the process.
    ticks: when it started, in clock ticks since the machine did; 0 where that is not known.
    machine: the boot and the PID namespace, in which pid and ticks mean something; "" where they
      are not known. Containers on one machine have namespaces of their own.
  """

  host: str
  pid: int
  ticks: int
  machine: str

  def ended(self) -> bool:
    """Returns whether it certainly runs no longer: known on the same machine alone."""
    if not self.machine or self.machine != _machine():
      return False
    if self.ticks <= 0 or not 0 < self.pid <= _LARGEST_PID:
      return False
    ticks = _ticks(self.pid)
    return ticks != self.ticks and (ticks != 0 or not _exists(self.pid))


def this_process() -> Process:
  """Returns the process that asks."""
  return Process(socket.gethostname(), os.getpid(), _ticks(os.getpid()), _machine())


def _machine() -> str:
  try:
    with open("/proc/sys/kernel/random/boot_id") as file:
      return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
  except OSError:
    return ""


def _ticks(pid: int) -> int:
  """Returns when a process started, -1 if it has ended, 0 if nothing is known of it.

  Read from the kernel: a time of day would change with the clock.
  """
  try:
    with open(f"/proc/{pid}/stat", "rb") as file:
      fields = file.read().rpartition(b")")[2].split()  # the name before it may hold anything
  except OSError:
    return 0
  return -1 if fields[0] in (b"Z", b"X") else int(fields[19])


def _exists(pid: int) -> bool:
  """Returns whether there is a process; /proc may hide those of other users (`hidepid`)."""
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  except OSError:
    return True
  return True


@dataclasses.dataclass(frozen=True)
class Owner:
  """What the claim of another run says; nothing in it is trusted to be well formed."""

  process: Process
  since: str
  lease_seconds: float

  @classmethod
  def parse(cls, text: str, lease_seconds: float) -> "Owner":
    """Reads a claim; with this lease where it has none that makes sense."""
    try:
      said = json.loads(text)
    except (ValueError, RecursionError):
      said = {}
    said = said if isinstance(said, dict) else {}

    def field(name: str, kind: type, otherwise: Any) -> Any:
      value = said.get(name)
      return value if isinstance(value, kind) and not isinstance(value, bool) else otherwise

    process = Process(
      field("host", str, "an unknown host"),
      field("pid", int, 0),
      field("ticks", int, 0),
      field("machine", str, ""),
    )
    lease = field("lease_seconds", (int, float), 0)
    lease = max(lease, lease_seconds) if 0 < lease <= _LONGEST_LEASE_SECONDS else lease_seconds
    return cls(process, field("since", str, ""), lease)

  def __str__(self) -> str:
    """Returns who it is, for a message."""
    since = f", since {self.since}" if self.since else ""
    text = f"process {self.process.pid} on {self.process.host}{since}"
    return printable(text, newlines=False, longest=300)


class Ownership:
  """Of one workdir by one run; a context manager, which releases it at the end.

  Process 0 holds it. The others only know its number, which their files of a save carry.

  Attributes:
    number: of the claim; 0 where there is no claim, as in tests of what writes.
    replaced: whether the owner before did not release the workdir, nor is known to be dead.
  """

  def __init__(
    self,
    claims: Claims | None = None,
    number: int = 0,
    *,
    lease_seconds: float = 30.0,
    replaced: bool = False,
  ):
    """Takes a number that is claimed already; `watch` begins to renew it."""
    self.number, self.replaced = number, replaced
    self._claims, self._period = claims, lease_seconds / BEATS_PER_LEASE
    self._count, self._ended, self._settled, self._loss = 0, False, False, ""
    self._state: Callable[[], str] = lambda: RUNNING
    self._lost: Callable[[str], None] = lambda text: None
    self._losing, self._beating = threading.Lock(), threading.Lock()
    self._over = threading.Event()
    self._thread = threading.Thread(target=self._run, name="workdir owner", daemon=True)

  def __enter__(self) -> "Ownership":
    """Returns itself."""
    return self

  def __exit__(self, *exception) -> None:
    """Releases the workdir."""
    self.end()

  def watch(self, stopping: Callable[[], bool], lost: Callable[[str], None]) -> None:
    """Begins to renew the claim in a thread.

    Args:
      stopping: tells whether this run is about to end, for which another start waits.
      lost: is called once with what has happened, by whichever thread finds out first; it should
        end this process.
    """
    self._state, self._lost = lambda: STOPPING if stopping() else RUNNING, lost
    if self._claims is not None:
      self._thread.start()

  def require(self) -> None:
    """Returns if this run still owns the workdir; to be called before each write.

    Raises:
      LostError: another run has taken it over, or the claim has been removed.
      OSError: that cannot be found out.
    """
    if self._claims is None:
      return
    if self._ended:
      raise LostError("this run has released its workdir")
    numbers = self._claims.numbers()
    if max(numbers, default=0) == self.number:
      return
    with self._losing:  # a second thread that finds out waits here while the process ends
      if not self._loss:
        self._loss = self._what_happened(max(numbers, default=0))
        self._lost(self._loss)
    raise LostError(self._loss)

  def settle(self) -> None:
    """Takes it that the run begins: what earlier owners have left in the folder is removed."""
    self._settled = True
    if self._claims is not None:
      self.require()
      self._claims.remove_others(self.number)

  def end(self) -> None:
    """Releases the workdir; a claim that was never settled is withdrawn, as if never made."""
    self._over.set()
    if self._claims is None or self._loss:
      return
    with self._beating:
      if self._ended:
        return
      self._ended = True
      with contextlib.suppress(OSError):  # another start then waits for the lease
        if not self._settled:
          self._claims.withdraw(self.number)
        elif max(self._claims.numbers(), default=0) == self.number:
          self._claims.write_beat(self.number, RELEASED)

  def renew(self) -> None:
    """Shows that this run is alive, unless the workdir has been taken over."""
    with self._beating:
      if not self._ended:
        self.require()
        self._count += 1
        self._claims.write_beat(self.number, f"{self._state()} {self._count}")

  def _run(self) -> None:
    while not self._over.wait(self._period):
      # Where storage does not answer, those who write fail by themselves.
      with contextlib.suppress(OSError):
        try:
          self.renew()
        except LostError:
          return

  def _what_happened(self, highest: int) -> str:
    if highest < self.number:
      return f"the claim {self.number:06} to this workdir has been removed"
    owner = "another run"
    with contextlib.suppress(OSError):
      owner = str(Owner.parse(self._claims.read(highest), 0.0))
    return f"this workdir now belongs to another run: {owner}"


def acquire(
  claims: Claims,
  workdir: str,
  *,
  lease_seconds: float,
  wait_seconds: float,
  ending_seconds: float,
  processes: int = 1,
  say: Callable[[str], None] = lambda text: None,
  clock: Callable[[], float] = time.monotonic,
  sleep: Callable[[float], None] = time.sleep,
) -> Ownership:
  """Makes this run the owner of a workdir, waiting for another where it has to.

  A workdir that was released, whose owner is known to be dead, or whose heartbeat has not changed
  for the owner's lease, is taken. A run that only looks alive may be about to end, such as the pods
  of a job that was requeued; so it is waited for.

  Args:
    claims: to the workdir.
    workdir: its name, for messages.
    lease_seconds: after so long without a heartbeat others may take over from this run.
    wait_seconds: how long another run that is alive is waited for.
    ending_seconds: how long one is waited for that is saving in order to stop.
    processes: of this run.
    say: is given what is waited for, once.
    clock: of this machine, in seconds.
    sleep: waits.

  Raises:
    OwnedError: the workdir belongs to another run.
    OSError: the workdir cannot be read or written.
  """
  me = _claim(lease_seconds, processes)
  began = since = clock()
  seen: tuple[int, str] | None = None
  moved, told = False, False
  while True:
    number = max(claims.numbers(), default=0)
    beat = claims.read_beat(number) if number else None
    owner = Owner.parse(claims.read(number), lease_seconds) if number else None
    if beat is not None and (number, beat.stamp) != seen:
      moved = seen is not None and seen[0] == number
      seen, since = (number, beat.stamp), clock()
    if number >= LAST:
      raise OwnedError(f"{workdir}/{FOLDER}: {number} is no number of a run; remove that file")
    ended = beat is None or beat.text.startswith(RELEASED) or owner.process.ended()
    expired = beat is not None and clock() - since > owner.lease_seconds
    if ended or expired:
      if claims.create(number + 1, me):
        taken = Ownership(
          claims, number + 1, lease_seconds=lease_seconds, replaced=expired and not ended
        )
        if max(claims.numbers(), default=0) == taken.number:
          taken.renew()
          return taken
        claims.remove(taken.number)  # of a number that was used long ago
      continue
    patience = ending_seconds if beat.text.startswith(STOPPING) else wait_seconds
    if moved and clock() - began >= patience:
      raise OwnedError(
        f"{printable(workdir, newlines=False)} belongs to another run that is alive: {owner}; stop "
        f"it, wait for its end, or give another --workdir"
      )
    if not told:
      told = True
      say(
        f"{printable(workdir, newlines=False)} belongs to another run: {owner}; waiting "
        f"for it to end, {wait_seconds:g} s (processes.owner_wait_seconds), or "
        f"{owner.lease_seconds:g} s if it shows no sign of life"
      )
    sleep(min(1.0, lease_seconds / BEATS_PER_LEASE / 2))


def _claim(lease_seconds: float, processes: int) -> str:
  """Returns what this run writes into its claim."""
  now = datetime.datetime.now().astimezone()
  said = {
    **dataclasses.asdict(this_process()),
    "since": now.isoformat(sep=" ", timespec="seconds"),
    "processes": processes,
    "lease_seconds": lease_seconds,
    "secret": secrets.token_hex(16),  # no other claim has the same text
  }
  return json.dumps(said, indent=2) + "\n"
