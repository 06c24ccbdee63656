"""The lease on a workdir: its owner is the run with the highest claim, renewed by a heartbeat.

Claims are numbered files in `WORKDIR/owner/`, on local disks, NFS and in buckets. `000007.json`
names the claimant, and is created only if its number is free, so of two starts that want the same
one exactly one gets it. The owner rewrites `000007.beat` as long as it runs.

A claim's number is a fencing token. A run that takes over claims the next number, and the owner
checks for a higher one before each write, so a run that was suspended and replaced stops there. No
clocks of different machines are compared: a start watches whether the heartbeat changes.
"""

import contextlib
import dataclasses
import datetime
import errno
import json
import os
import pathlib
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from etils import epath

from runtime import files
from runtime.printable import printable

if TYPE_CHECKING:
  from processes.bucket_claims import BucketStorage

# ------------------------------ claims ------------------------------

FOLDER = "owner"
LAST = 10**9 - 1  # largest number of a claim; files with larger ones are foreign
_CLAIM = re.compile(r"([0-9]{6,9})\.json")
_OURS = re.compile(r"[0-9]{6,9}\.(json|beat|[0-9a-f]{16}\.new)")
_BEAT_BYTES = 32  # constant, so that a heartbeat needs no space on a full disk
_MOST_BYTES = 2**16
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class Claims:
  """The claims to one workdir; every method may raise OSError."""

  def __init__(self, storage: "_FolderStorage | BucketStorage"):
    """Takes where the claims are."""
    self._storage = storage

  def numbers(self) -> list[int]:
    """Returns the claimed numbers, bypassing caches."""
    return [int(found[1]) for found in map(_CLAIM.fullmatch, self._storage.names()) if found]

  def create(self, number: int, text: str) -> bool:
    """Claims a number; returns whether it was free."""
    return self._storage.create(f"{number:06}.json", text)

  def read(self, number: int) -> str:
    """Returns the text of a claim; "" if it cannot be read."""
    return self._storage.read(f"{number:06}.json")[0]

  def write_beat(self, number: int, text: str) -> None:
    """Writes a heartbeat, of at most 32 characters."""
    self._storage.write(f"{number:06}.beat", text[:_BEAT_BYTES].ljust(_BEAT_BYTES))

  def read_beat(self, number: int) -> tuple[str, str]:
    """Returns the newest heartbeat, and a stamp that changes whenever the owner writes one."""
    text, stamp = self._storage.read(f"{number:06}.beat")
    return text.rstrip(), stamp

  def remove(self, number: int) -> None:
    """Removes a claim and its heartbeat."""
    for ending in ("beat", "json"):
      self._storage.remove(f"{number:06}.{ending}")

  def remove_others(self, number: int) -> None:
    """Removes what claims with lower numbers have left."""
    for name in self._storage.names():
      if _OURS.fullmatch(name) and int(name.partition(".")[0]) < number:
        self._storage.remove(name)

  def withdraw(self, number: int) -> None:
    """Removes a claim, and the folders created for it if they are empty."""
    self.remove(number)
    self._storage.remove_created()


def claims_to(workdir: epath.PathLike) -> Claims:
  """Returns the claims to a workdir, which need not exist.

  Raises:
    ValueError: its storage has no conditional write.
  """
  scheme, separator, _ = str(workdir).partition("://")
  if not separator:
    return Claims(_FolderStorage(pathlib.Path(workdir).expanduser().absolute() / FOLDER))
  if scheme in ("gs", "s3"):
    from processes.bucket_claims import BucketStorage  # of workdirs in a bucket alone

    return Claims(BucketStorage(f"{workdir}/{FOLDER}/"))
  raise ValueError(
    f"{workdir}: {scheme}:// has no conditional write here, without which two runs cannot be kept "
    f"out of one workdir; name one in a file system, gs:// or s3:// with --workdir"
  )


class _FolderStorage:
  """A folder of a file system, which may be NFS.

  An NFS client may answer from its cache, but asks the server when a file or folder is opened. So
  claims are found by listing the folder, never by looking up a name, and a heartbeat overwrites the
  same file instead of being renamed into place.
  """

  def __init__(self, folder: pathlib.Path):
    self._folder = folder
    self._made: list[pathlib.Path] = []

  def names(self) -> list[str]:
    """Returns the names of all files, bypassing caches."""
    try:
      return os.listdir(self._folder)
    except FileNotFoundError:
      return []

  def create(self, name: str, text: str) -> bool:
    """Writes a file if there is none of this name; returns whether there was none."""
    self._make()
    target, new = self._folder / name, self._folder / f"{name[:-5]}.{secrets.token_hex(8)}.new"
    try:
      self._write(new, text, os.O_EXCL)
      try:
        os.link(new, target)  # atomic: with all of its content, or not at all
      except OSError as error:
        # The reply of a network file system may have been lost: then the file has two names.
        if error.errno in _NO_LINKS:
          self._write(target, text, os.O_EXCL)
        elif new.stat().st_nlink != 2:
          raise
    except FileExistsError:
      return False
    finally:
      with contextlib.suppress(OSError):
        new.unlink()
    return True

  def read(self, name: str) -> tuple[str, str]:
    """Returns content and stamp, which changes with each write; "" if it cannot be read."""
    try:
      with open(files.open_plain(self._folder / name, os.O_RDONLY), "rb") as file:
        status, text = os.fstat(file.fileno()), file.read(_MOST_BYTES).decode(errors="replace")
    except OSError:
      return "", ""
    return text, f"{status.st_ino} {status.st_mtime_ns} {text}"

  def write(self, name: str, text: str) -> None:
    """Replaces a file's content by one of the same length."""
    try:
      self._write(self._folder / name, text)
    except OSError as error:
      if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        raise
      os.utime(self._folder / name)  # a heartbeat without disk space

  def remove(self, name: str) -> None:
    """Removes a file, if it is there."""
    with contextlib.suppress(FileNotFoundError):
      (self._folder / name).unlink()

  def remove_created(self) -> None:
    """Removes the folders that `create` has made, if they are empty."""
    with contextlib.suppress(OSError):  # something else is in it
      for folder in self._made:
        folder.rmdir()

  def _make(self) -> None:
    """Creates the folder, remembering what was created; rejects a link or a file."""
    missing = [path for path in (self._folder, *self._folder.parents) if not os.path.lexists(path)]
    try:
      self._folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
      why = f"{self._folder} cannot be created: {error.strerror}; give another --workdir"
      raise type(error)(why) from error
    self._made = self._made or missing
    if self._folder.is_symlink():
      raise NotADirectoryError(f"{self._folder} is a symbolic link, not a folder; remove it")

  @staticmethod
  def _write(path: pathlib.Path, text: str, flags: int = 0) -> None:
    descriptor = files.open_plain(path, os.O_WRONLY | os.O_CREAT | flags, mode=0o644)
    try:
      os.pwrite(descriptor, text.encode(), 0)
      if flags:  # a new file
        os.fsync(descriptor)
    finally:
      os.close(descriptor)  # here NFS sends it


# ------------------------------ the owner ------------------------------

BEATS_PER_LEASE = 6
RUNNING, STOPPING, RELEASED = "running", "stopping", "released"
_LARGEST_PID = 2**22  # of Linux
_LONGEST_LEASE_SECONDS = 3600.0  # accepted from another run's claim


class OwnedError(RuntimeError):
  """The workdir belongs to another run, which is alive."""


class LostError(RuntimeError):
  """The workdir no longer belongs to this run."""


@dataclasses.dataclass(frozen=True)
class Owner:
  """The process that claims a workdir, as its claim says.

  Attributes:
    host: its name, for messages.
    pid: of the process.
    ticks: when it started, in clock ticks since boot; 0 if unknown.
    machine: the boot and the PID namespace in which pid and ticks are valid; "" if unknown.
      Containers on one machine have different namespaces.
    since: when it has claimed the workdir; "" if unknown.
    lease_seconds: for how long it owns the workdir without a heartbeat.
  """

  host: str = "an unknown host"
  pid: int = 0
  ticks: int = 0
  machine: str = ""
  since: str = ""
  lease_seconds: float = 0.0

  @classmethod
  def parse(cls, text: str, lease_seconds: float) -> "Owner":
    """Reads another run's claim, which need not be well-formed: what is not is unknown.

    Args:
      text: of the claim.
      lease_seconds: the least; used if it has no valid one.
    """
    try:
      said = files.parse_json(text)
    except ValueError:
      said = None
    said = said if isinstance(said, dict) else {}
    valid = {
      field.name: said[field.name]
      for field in dataclasses.fields(cls)
      if type(said.get(field.name)) is field.type
      or (field.type is float and type(said.get(field.name)) is int)
    }
    lease = valid.get("lease_seconds", 0.0)
    if not lease_seconds < lease <= _LONGEST_LEASE_SECONDS:
      lease = lease_seconds
    return cls(**{**valid, "lease_seconds": lease})

  def ended(self) -> bool:
    """Returns whether it has certainly ended, which is known only on the same machine."""
    if not self.machine or self.machine != _machine():
      return False
    if self.ticks <= 0 or not 0 < self.pid <= _LARGEST_PID:
      return False
    ticks = _ticks(self.pid)
    return ticks != self.ticks and (ticks != 0 or not _exists(self.pid))

  def __str__(self) -> str:
    """Returns a description for messages."""
    since = f", since {self.since}" if self.since else ""
    return printable(f"process {self.pid} on {self.host}{since}", newlines=False, longest=300)


def this_process(lease_seconds: float = 0.0) -> Owner:
  """Returns the current process as the owner of a workdir from now on."""
  since = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
  pid = os.getpid()
  return Owner(socket.gethostname(), pid, _ticks(pid), _machine(), since, lease_seconds)


def _machine() -> str:
  try:
    with open("/proc/sys/kernel/random/boot_id") as file:
      return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
  except OSError:
    return ""


def _ticks(pid: int) -> int:
  """Returns when a process started; -1 if it has ended, 0 if that is unknown.

  In the kernel's ticks: a time of day would change with the clock.
  """
  try:
    with open(f"/proc/{pid}/stat", "rb") as file:
      fields = file.read().rpartition(b")")[2].split()  # the name before it may contain anything
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


class Ownership:
  """A run's ownership of a workdir; a context manager, which releases it at the end.

  Process 0 has it. The others only know its number, which is part of the names of their files.

  Attributes:
    number: of the claim; 0 without a claim, as in tests.
    replaced: whether the previous owner neither released the workdir nor is known to be dead.
  """

  def __init__(
    self,
    claims: Claims | None = None,
    number: int = 0,
    *,
    lease_seconds: float = 30.0,
    replaced: bool = False,
  ):
    """Takes a claimed number; `watch` starts to renew it."""
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
    """Starts a thread that renews the claim.

    Args:
      stopping: returns whether this run is about to end, for which another start waits.
      lost: called once with the reason, by the thread that notices first; it should end this
        process.
    """
    self._state, self._lost = lambda: STOPPING if stopping() else RUNNING, lost
    if self._claims is not None:
      self._thread.start()

  def require(self) -> None:
    """Checks that this run still owns the workdir; to be called before each write.

    Raises:
      LostError: another run has taken it over, or the claim has been removed.
      OSError: the claims cannot be read.
    """
    if self._claims is None:
      return
    if self._ended:
      raise LostError("this run has released its workdir")
    numbers = self._claims.numbers()
    if max(numbers, default=0) == self.number:
      return
    with self._losing:  # a second thread that notices waits here while the process ends
      if not self._loss:
        self._loss = self._what_happened(max(numbers, default=0))
        self._lost(self._loss)
    raise LostError(self._loss)

  def settle(self) -> None:
    """Confirms the claim when the run begins: removes what earlier owners have left."""
    self._settled = True
    if self._claims is not None:
      self.require()
      self._claims.remove_others(self.number)

  def end(self) -> None:
    """Releases the workdir; withdraws a claim that was not settled."""
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
      # If storage does not answer, writers fail by themselves.
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
  """Makes this run the owner of a workdir, waiting for another run if necessary.

  It takes a workdir that was released, whose owner is known to be dead, or whose heartbeat has not
  changed for the duration of the lease. A run that still looks alive may be about to end, such as
  the pods of a requeued job; so it waits for it, and then for one more heartbeat.

  Args:
    claims: to the workdir.
    workdir: its name, for messages.
    lease_seconds: after this time without a heartbeat others may take over from this run.
    wait_seconds: how long to wait for another run that is alive.
    ending_seconds: how long to wait for one that is saving before it stops.
    processes: their number.
    say: called once with what it waits for.
    clock: of this machine, in seconds.
    sleep: waits.

  Raises:
    OwnedError: the workdir belongs to another run.
    OSError: the workdir cannot be read or written.
  """
  claim = {**dataclasses.asdict(this_process(lease_seconds)), "processes": processes}
  claim["secret"] = secrets.token_hex(16)  # no other claim has the same text
  me = json.dumps(claim, indent=2) + "\n"
  began = since = clock()
  seen: tuple[int, str] | None = None
  told = False
  while True:
    number = max(claims.numbers(), default=0)
    beat, stamp = claims.read_beat(number) if number else (RELEASED, "")
    owner = Owner.parse(claims.read(number), lease_seconds) if number else Owner()
    moved = False
    if (number, stamp) != seen:
      moved = seen is not None and seen[0] == number
      seen, since = (number, stamp), clock()
    if number >= LAST:
      raise OwnedError(f"{workdir}/{FOLDER}: {number} is not a run's number; remove that file")
    ended = beat.startswith(RELEASED) or owner.ended()
    expired = clock() - since > owner.lease_seconds
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
    patience = ending_seconds if beat.startswith(STOPPING) else wait_seconds
    # At a heartbeat: an owner that was alive when the wait began may have died since.
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
        f"{owner.lease_seconds:g} s if it sends no heartbeat"
      )
    sleep(min(1.0, lease_seconds / BEATS_PER_LEASE / 2))
