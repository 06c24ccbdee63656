"""Limits of this machine and of this process: open files, threads, memory, ports, names."""

import os
import pathlib
import resource
import shutil
import socket
from collections.abc import Iterator, Mapping

import humanize
import psutil

from diagnosis.finding import Finding, ok, warning, wrong
from processes import coordination, listening
from runtime import devices

FILES = 1024  # a checkpoint of many arrays is written to as many files at once
THREADS = 512
GIB = 2**30


def check(hardware: str | None, limits: Mapping[int, int] | None = None) -> Iterator[Finding]:
  """Yields what is found about the limits of this process and the memory of this machine.

  Args:
    hardware: `gpu` or `tpu` if this machine has such.
    limits: limit of `resource` -> its soft value; by default this process'.
  """
  limits = _limits() if limits is None else limits
  yield from _open_files(limits[resource.RLIMIT_NOFILE])
  yield from _threads(limits[resource.RLIMIT_NPROC])
  yield from _address_space(limits[resource.RLIMIT_AS])
  yield from _file_size(limits[resource.RLIMIT_FSIZE])
  yield _memory()
  if hardware == "gpu":
    yield from _shared_memory(pathlib.Path("/dev/shm"))


def _limits() -> dict[int, int]:
  names = (
    *(resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC),
    *(resource.RLIMIT_AS, resource.RLIMIT_FSIZE),
  )
  return {name: resource.getrlimit(name)[0] for name in names}


def _open_files(limit: int) -> Iterator[Finding]:
  if limit == resource.RLIM_INFINITY or limit >= FILES:
    text = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"
    yield ok(f"open files: {text}")
  else:
    yield wrong(
      f"open files: at most {limit:,}; saving a checkpoint may need {FILES:,}",
      "raise the limit: ulimit -n 65536, LimitNOFILE= of a service, or --ulimit of a container",
    )


def _threads(limit: int) -> Iterator[Finding]:
  group = pathlib.Path("/sys/fs/cgroup/pids.max")
  said = group.read_text().strip() if group.exists() else "max"
  least = min(int(said) if said.isdigit() else limit, limit, key=_unlimited_last)
  if least == resource.RLIM_INFINITY or least >= THREADS:
    return
  yield wrong(
    f"threads and processes: at most {least:,}; JAX, Orbax and simulated devices start up to "
    f"{THREADS:,}",
    "raise the limit: ulimit -u, TasksMax= of a service, or --pids-limit of a container",
  )


def _unlimited_last(limit: int) -> float:
  return float("inf") if limit == resource.RLIM_INFINITY else limit


def _address_space(limit: int) -> Iterator[Finding]:
  if limit != resource.RLIM_INFINITY:
    yield warning(
      f"address space: at most {_size(limit)}; libraries reserve far more than they use",
      "set ulimit -v unlimited",
    )


def _file_size(limit: int) -> Iterator[Finding]:
  if limit != resource.RLIM_INFINITY:
    yield wrong(
      f"size of a file: at most {_size(limit)}; files of checkpoints and data may be larger",
      "set ulimit -f unlimited",
    )


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
    yield from _loopback()
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
  if index == 0 and (why := _taken(host, port)):
    yield wrong(
      f"{coordination.ADDRESS}={address}: the port cannot be used: {why}",
      "choose another port, or end the program that uses it (ss -ltnp shows which)",
    )
    return
  what = f"process {index} of {count}, coordinator {address}"
  yield ok(what + (": the port is free" if index == 0 else ": its name resolves"))


def _taken(host: str, port: int) -> str:
  """Returns why process 0 cannot listen at a port; "" where it can."""
  for ip in listening.addresses(host) or ["0.0.0.0"]:
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family) as tried:
      tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
      try:
        tried.bind((ip, port))
      except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)
  return ""


def _loopback() -> Iterator[Finding]:
  try:
    with socket.socket() as server, socket.socket() as client:
      server.bind(("localhost", 0))
      server.listen()
      client.settimeout(5)
      client.connect(server.getsockname())
  except OSError as error:
    yield wrong(
      f"localhost: no connection of this machine to itself ({error})",
      "see to it that localhost resolves to 127.0.0.1 and that lo is up",
    )
  else:
    yield ok("one process; connections to localhost work")
