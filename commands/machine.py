"""Checks of this machine that need no JAX: limits, packages, folders, clocks.

Limits of the machine and of this process are open files, threads, memory, ports and names. Packages
are compared with those of the lock files, and with one another. Folders and buckets are written,
read and renamed.
"""

import dataclasses
import importlib.metadata
import os
import pathlib
import platform
import re
import resource
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping

import humanize
import psutil
from etils import epath
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from processes import coordination, listening
from processes.coordination import Group
from runtime import devices, files
from runtime.printable import few

# ------------------------------ what a check has found ------------------------------

OK, WARNING, WRONG = "ok", "warning", "wrong"


@dataclasses.dataclass(frozen=True)
class Finding:
  """One result of a check.

  Attributes:
    status: `OK`; `WARNING`: runs work, but not as they should; `WRONG`: runs fail, or some do.
    what: was found, with the numbers.
    fix: what to do about it; "" where all is well, or where `what` says it.
  """

  status: str
  what: str
  fix: str = ""


def ok(what: str) -> Finding:
  return Finding(OK, what)


def warning(what: str, fix: str) -> Finding:
  return Finding(WARNING, what, fix)


def wrong(what: str, fix: str = "") -> Finding:
  return Finding(WRONG, what, fix)


def by_share(text: str, share: float, low: float, broken: float, fix: str) -> Finding:
  """Returns the finding about a share of what a data sheet says, by its two thresholds."""
  if share < broken:
    return wrong(text, fix)
  return warning(text, fix) if share < low else ok(text)


# ------------------------------ limits ------------------------------

GIB = 2**30
_UNLIMITED = float("inf")
# (limit of `resource`, its least, status below it, what is limited, why, fix)
_LIMITS = (
  (
    *(resource.RLIMIT_NOFILE, 1024, "wrong", "open files: at most {}"),
    "saving a checkpoint of many arrays may need 1,024",
    "raise the limit: ulimit -n 65536, LimitNOFILE= of a service, or --ulimit of a container",
  ),
  (
    *(resource.RLIMIT_NPROC, 512, "wrong", "threads and processes: at most {}"),
    "JAX, Orbax and simulated devices start up to 512",
    "raise the limit: ulimit -u, TasksMax= of a service, or --pids-limit of a container",
  ),
  (
    *(resource.RLIMIT_AS, _UNLIMITED, "warning", "address space: at most {}"),
    "libraries reserve far more than they use",
    "set ulimit -v unlimited",
  ),
  (
    *(resource.RLIMIT_FSIZE, _UNLIMITED, "wrong", "size of a file: at most {}"),
    "files of checkpoints and data may be larger",
    "set ulimit -f unlimited",
  ),
)


def check_limits(
  hardware: str | None, limits: Mapping[int, int] | None = None
) -> Iterator[Finding]:
  """Yields what is found about the limits of this process and the memory of this machine.

  Args:
    hardware: `gpu` or `tpu` if this machine has such.
    limits: limit of `resource` -> its soft value; by default this process'.
  """
  for which, least, status, what, why, fix in _LIMITS:
    limit = resource.getrlimit(which)[0] if limits is None else limits[which]
    limit = _UNLIMITED if limit == resource.RLIM_INFINITY else limit
    if which == resource.RLIMIT_NPROC:
      limit = min(limit, _most_tasks())
    if limit < least:
      shown = _size(limit) if least == _UNLIMITED else f"{limit:,}"
      yield Finding(status, f"{what.format(shown)}; {why}", fix)
    elif which == resource.RLIMIT_NOFILE:
      yield ok(f"open files: {'unlimited' if limit == _UNLIMITED else f'{limit:,}'}")
  yield _memory()
  if hardware == "gpu":
    yield from _shared_memory(pathlib.Path("/dev/shm"))


def _most_tasks() -> float:
  """Returns how many threads and processes this container may have."""
  group = pathlib.Path("/sys/fs/cgroup/pids.max")
  said = group.read_text().strip() if group.exists() else "max"
  return int(said) if said.isdigit() else _UNLIMITED


def _memory() -> Finding:
  total = devices.memory_bytes(devices.Devices("cpu", True, {}))
  free = min(psutil.virtual_memory().available, total)
  text = f"memory of this machine: {_size(total)}, of which {_size(free)} free"
  if free < GIB:
    return wrong(text, "end other programs, or use a machine with more memory")
  return ok(text)


def _shared_memory(folder: pathlib.Path) -> Iterator[Finding]:
  if not folder.exists():
    return
  total = shutil.disk_usage(folder).total
  if total < GIB:
    yield warning(
      f"{folder} has {_size(total)}; NCCL exchanges data between GPUs of a machine there",
      "start the container with --shm-size=8g",
    )


def _size(count: float) -> str:
  return humanize.naturalsize(count, binary=True)


def check_network() -> Iterator[Finding]:
  """Yields whether the other processes can be reached: variables, names, the coordinator's port."""
  try:
    found = coordination.who()
  except ValueError as error:
    yield wrong(str(error), "set all three, or none for a single process (docs/running.md)")
    return
  if found is None or found[1] == 1:
    yield ok("one process")
    return
  address, count, index = found
  host, port = listening.split(address)
  try:
    socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
  except OSError as error:
    yield wrong(
      f"{coordination.ADDRESS}={address}: the name {host} cannot be resolved ({error})",
      "use a name or an address of process 0's machine that this machine can resolve",
    )
    return
  try:
    if index == 0:
      listening.listen(address).close()
  except OSError as error:
    yield wrong(
      f"{coordination.ADDRESS}={address}: the port cannot be used: {os.strerror(error.errno)}",
      "choose another port, or end the program that uses it (ss -ltnp shows which)",
    )
    return
  what = f"process {index} of {count}, coordinator {address}"
  yield ok(what + (": the port is free" if index == 0 else ": its name resolves"))


# ------------------------------ installed packages ------------------------------

ROOT = pathlib.Path(__file__).resolve().parents[1]
OLDEST_PYTHON = (3, 11)
_PLUGIN = re.compile(r"jax-(cuda\d+|rocm\d+)-(?:plugin|pjrt)")
_MOST = 6  # packages that a finding names


def installed() -> dict[str, str]:
  """Returns name -> version of the packages of this Python; of two, the one that is imported."""
  found: dict[str, str] = {}
  for each in importlib.metadata.distributions():  # in the order of sys.path
    if each.name:
      found.setdefault(canonicalize_name(each.name), each.version)
  return found


def pins(file: pathlib.Path) -> dict[str, str]:
  """Returns name -> version that a lock file or a requirements file pins for this Python."""
  lines = re.sub(r"\\\n", " ", file.read_text()).splitlines()
  entries = (line.split(" --hash=")[0].strip() for line in lines)
  found = (Requirement(entry) for entry in entries if entry and entry[0] not in "#-")
  return {
    canonicalize_name(each.name): str(each.specifier).removeprefix("==")
    for each in found
    if each.marker is None or each.marker.evaluate()
  }


def check_versions(
  hardware: str | None, there: Mapping[str, str] | None = None, root: pathlib.Path = ROOT
) -> Iterator[Finding]:
  """Yields what is found about Python and the packages.

  Args:
    hardware: `gpu` or `tpu` if this machine has such; the packages for it must be there.
    there: name -> version of what is installed; by default of this Python.
    root: of the project, with its lock files.
  """
  there = installed() if there is None else there
  lock, locks = "requirements/locks/base.txt", root / "requirements" / "locks"
  locked, pinned = pins(locks / "base.txt"), pins(locks / "tpu.txt")["libtpu"]
  install = f"run `make setup`, or pip install --require-hashes -r {lock}"
  missing = [name for name in pins(root / "requirements.txt") if name not in there]
  others = [
    f"{name} {there[name]} ({version})"
    for name, version in locked.items()
    if there.get(name, version) != version
  ]
  jax, jaxlib, libtpu = (there.get(name, "") for name in ("jax", "jaxlib", "libtpu"))
  plugins = {name: version for name, version in there.items() if _PLUGIN.fullmatch(name)}
  kinds = sorted({_PLUGIN.fullmatch(name)[1] for name in plugins})
  uneven = [f"{name} {version}" for name, version in plugins.items() if version != jaxlib]
  as_locked, wanted = jax == locked["jax"], locked["jax"]
  python = f"Python {platform.python_version()}"
  problems = (
    (
      *(sys.version_info < OLDEST_PYTHON, WRONG, f"{python}: too old"),
      f"use {'.'.join(map(str, OLDEST_PYTHON))} or newer",
    ),
    (missing, WRONG, f"missing packages: {few(missing, _MOST)}", install),
    (
      *(others, WARNING),
      f"{len(others)} packages differ from {lock} (in brackets): {few(others, _MOST)}",
      install,
    ),
    (
      *(jax and jaxlib and jax != jaxlib, WRONG, f"jax {jax} and jaxlib {jaxlib} do not match"),
      f"install the same version of both: pip install jax=={wanted} jaxlib=={wanted}",
    ),
    (
      *(len(kinds) > 1, WRONG),
      f"plugins of several kinds of GPU software are installed: {', '.join(sorted(plugins))}",
      f"uninstall all but those of one, such as {', '.join(kinds[:1])}",
    ),
    (
      *(uneven, WRONG, f"{', '.join(uneven)} do not match jaxlib {jaxlib}"),
      "run `make setup ACCELERATOR=gpu`, or install them in jaxlib's version",
    ),
    (
      *(hardware == "gpu" and not plugins, WRONG),
      "this machine has a GPU, and JAX has no plugin for it",
      "run `make setup ACCELERATOR=gpu`",
    ),
    (
      *(hardware == "tpu" and not libtpu, WRONG),
      "this machine has a TPU, and libtpu is not installed",
      "run `make setup ACCELERATOR=tpu`",
    ),
    (
      *(libtpu and not as_locked, WARNING),
      f"libtpu {libtpu}: known to match is {pinned} with jax {wanted} alone",
      f"install jax[tpu]=={jax}, which brings the libtpu that it is made for",
    ),
    (
      *(libtpu and as_locked and libtpu.split(".")[:3] != pinned.split(".")[:3], WRONG),
      f"libtpu {libtpu} does not match jax {wanted}: programs that it compiles cannot be read",
      f"pip install libtpu=={pinned}",
    ),
  )
  yield ok(f"{python}, {platform.system()} {platform.machine()}; jax {jax}, jaxlib {jaxlib}")
  if not missing and not others:
    yield ok(f"{len(locked)} packages as in {lock}")
  yield from (Finding(status, what, fix) for is_so, status, what, fix in problems if is_so)


# ------------------------------ folders and buckets ------------------------------

_LEAST_BYTES = 2**30
_CLOCK_SECONDS, _FAR_FOLDER_SECONDS = 5.0, 300.0
_CONTENT = b"meshwright doctor\n" * 4096


def existing(folder: epath.Path) -> epath.Path:
  """Returns a folder, or the nearest one above it that exists; a bucket's folder as it is."""
  if not files.is_local(folder):
    return folder
  path = pathlib.Path(folder).expanduser().absolute()
  return epath.Path(next(one for one in (path, *path.parents) if os.path.lexists(one)))


def check_folder(folder: epath.Path, what: str, needed: int = _LEAST_BYTES) -> Iterator[Finding]:
  """Yields whether a folder can be used: writes, reads, renames and deletes a file there.

  A folder that does not exist is not made: the nearest one above is used.

  Args:
    folder: on a disk, or in a bucket.
    what: it is for, such as `workdir`.
    needed: bytes that should be free.
  """
  named = f"{what} {folder}"
  at, fix = existing(folder), f"choose another folder for the {what}, or its permissions"
  if files.is_local(at) and not at.is_dir():
    yield wrong(f"{named}: {at} is a file, not a folder", fix)
    return
  try:
    away = _use_folder(at)
  except Exception as error:  # buckets' libraries raise errors of their own
    said = f"{type(error).__name__}: {error}"
    yield wrong(f"{named}: cannot be used ({said})", _advice(folder, error) or fix)
    return
  yield from space(at, named, needed)
  yield ok(f"{named}: written, read, renamed, deleted")
  yield from _folder_clock(away, named)


def _use_folder(at: epath.Path) -> float:
  """Writes, reads, renames and deletes a file; returns how far its time is ahead of ours.

  Raises:
    OSError: something of it fails.
  """
  token = secrets.token_hex(8)
  first, second = at / f".doctor-{token}", at / f".doctor-{token}-renamed"
  content = token.encode() + _CONTENT
  before = time.time()
  try:
    first.write_bytes(content)
    after = time.time()
    written = first.stat().mtime
    if first.read_bytes() != content:
      raise OSError(f"{first}: another content is read than was written")
    first.rename(second)
    if first.exists() or second.read_bytes() != content:
      raise OSError(f"{first}: is still there after it was renamed, or its content is another")
  finally:
    for path in (first, second):
      path.unlink(missing_ok=True)
  written = written.timestamp() if hasattr(written, "timestamp") else float(written)
  return written - min(max(written, before), after)


def space(at: epath.Path, named: str, needed: int) -> Iterator[Finding]:
  """Yields a finding where a folder's disk has less space than needed; nothing of a bucket.

  Args:
    at: exists.
    named: how the finding calls it.
    needed: bytes.
  """
  if not files.is_local(at):
    return
  free = shutil.disk_usage(at).free
  if free < needed:
    texts = (humanize.naturalsize(n, binary=True) for n in (free, needed))
    yield wrong(
      "{}: {} free, and {} should be".format(named, *texts), "free some space, or use another disk"
    )


def _folder_clock(away: float, named: str) -> Iterator[Finding]:
  text = f"{named}: its clock is {abs(away):.0f} s {'ahead of' if away > 0 else 'behind'} this one"
  if abs(away) > _FAR_FOLDER_SECONDS:
    yield wrong(text, "synchronize the clocks (NTP): certificates and tokens are refused so")
  elif abs(away) > _CLOCK_SECONDS:
    yield warning(text, "synchronize the clocks (NTP); times of files and logs do not agree")


def _advice(folder: epath.Path, error: Exception) -> str:
  """Returns the fix for a bucket; "" for a folder."""
  if files.is_local(folder):
    return ""
  if missing := files.missing_library(folder):
    return f"{missing[1]}: small files of a run go through {missing[0]}"
  return (
    "check that the bucket exists and that the credentials may write to it (gs://: gcloud auth "
    "application-default login, or the machine's service account)"
  )


# ------------------------------ clocks of the processes ------------------------------

_APART_SECONDS, _FAR_CLOCK_SECONDS = 1.0, 300.0


def check_clocks(
  group: Group, *, timeout_seconds: float, clock: Callable[[], float] = time.time
) -> Iterator[Finding]:
  """Yields how far the clocks are apart: read as a barrier opens, within some milliseconds.

  Args:
    group: the processes; all call this.
    timeout_seconds: how long the slowest may take to arrive.
    clock: seconds since 1970.
  """
  if group.alone:
    return
  group.wait("clocks", timeout_seconds=timeout_seconds)
  seen = group.gather("clocks read", {"clock": clock()}, timeout_seconds=timeout_seconds)
  times = [each["clock"] for each in seen]
  apart = max(times) - min(times)
  if apart <= _APART_SECONDS:
    yield ok(f"clocks of {group.count} processes: {apart:.2f} s apart")
    return
  first, last = (times.index(find(times)) for find in (min, max))
  text = f"process {last}'s clock is {apart:,.0f} s ahead of process {first}'s"
  if apart > _FAR_CLOCK_SECONDS:
    yield wrong(text, "synchronize the machines' clocks (NTP): buckets refuse tokens of such times")
  else:
    yield warning(text, "synchronize the machines' clocks (NTP); logs cannot be put in order so")
