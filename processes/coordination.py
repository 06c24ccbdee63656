"""The group of processes of a run: a key-value store, barriers, joining and leaving.

A single process is a group as well: its store is a dict, its barriers return at once, and of what
connects several processes it imports nothing.
"""

import collections
import contextlib
import dataclasses
import gc
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from etils import epath, epy

from processes import preemption
from processes.preemption import StopRequest
from runtime import exit_codes
from runtime.printable import few, printable

with epy.lazy_imports():  # a single process, or a command line that is refused, needs none of it
  import jax

  # Nothing else lets go of a backend, so that the next one has the devices of the new group.
  import jax.extend.backend

  from processes import crash_output, jax_internals, listening, rendezvous, tokens

# The coordinator's host:port, the number of processes and the index of this one, as set by
# `python -m processes.launch`, by processes/launch/jobset.yaml, or manually on each host.
ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
# A name, an IPv4 address, or an IPv6 one in brackets, and a port.
_ADDRESS = re.compile(r"([^][:\s]+|\[[^][\s]*:[^][\s]*\]):(?P<port>[0-9]{1,5})")
# Variables of launchers: the number of processes, and the index of this one.
RANKS = (
  ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
  ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
  ("PMI_SIZE", "PMI_RANK"),
)
# If it is 1, a process uses all GPUs of its host. JAX's default is one GPU per process.
PER_HOST = ("SLURM_STEP_TASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE")
_SHUTDOWN_SECONDS = 300
# Only the first few processes watch all others: N watching N would be N * N reads.
WATCHERS = 8
_MOST_UNSIGNED = 1000
_POLL_SECONDS = 0.05
_CLOSING_SECONDS = 1.0  # for gloo to close connections that were ended
_PARTING_SECONDS = 2.0  # in which the others leave the service that process 0 runs
# Never reached: before that, the watchdog ends a run that hangs, and names who is behind.
_FOR_EVER_SECONDS = 7 * 24 * 3600


class NotTogetherError(exit_codes.RetryableError):
  """Not all processes reached a barrier."""


class LocalStore:
  """The store of a single process, with the methods of JAX's client that are used here."""

  def __init__(self):
    self._values: dict[str, str] = {}
    self._changed = threading.Lock()

  def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
    del allow_overwrite
    with self._changed:
      self._values[key] = value

  def key_value_try_get(self, key: str) -> str:
    with self._changed:
      if key not in self._values:
        raise jax.errors.JaxRuntimeError(f"NOT_FOUND: {key}")
      return self._values[key]

  def key_value_dir_get(self, prefix: str) -> list[tuple[str, str]]:
    with self._changed:
      return [(key, value) for key, value in self._values.items() if key.startswith(prefix)]

  def key_value_delete(self, key: str) -> None:
    with self._changed:
      for name in [n for n in self._values if n == key or n.startswith(f"{key}/")]:
        del self._values[name]

  def wait_at_barrier(self, name: str, timeout_in_ms: int) -> None:
    """Returns at once: there is no other process."""


@dataclasses.dataclass
class Group:
  """The processes of a run, as one of them sees it.

  Attributes:
    index: of this process; process 0 prints and writes.
    count: number of processes.
    heartbeat_seconds: JAX considers a process dead after this time without a heartbeat, and ends
      all others.
    store: the key-value store of JAX's coordination service.
    key: secret of this start of the run, known only to its processes. Anyone who reaches the
      service can write to it, so values are signed together with their name, and unsigned ones are
      ignored.
    unsigned: names of ignored values.
    address: the coordinator's host:port; "" of a single process.
  """

  index: int = 0
  count: int = 1
  heartbeat_seconds: float = 100.0
  store: Any = dataclasses.field(default_factory=LocalStore)
  key: bytes = dataclasses.field(default=b"", repr=False)
  unsigned: set[str] = dataclasses.field(default_factory=set)
  address: str = ""
  _meetings: collections.Counter = dataclasses.field(default_factory=collections.Counter)

  @property
  def alone(self) -> bool:
    """Returns whether there is no other process."""
    return self.count == 1

  @property
  def first(self) -> bool:
    """Returns whether this is the process that prints and writes."""
    return self.index == 0

  def put(self, name: str, value: Mapping[str, Any]) -> None:
    """Publishes a value to all processes, replacing an earlier one with this name."""
    text = json.dumps(value)
    if not self.alone:
      text = f"{tokens.sign(self.key, 'shown', name, text)} {text}"
    self.store.key_value_set(name, text, allow_overwrite=True)

  def get(self, name: str) -> dict[str, Any] | None:
    """Returns the value with a name; None if there is none."""
    try:
      return self._value(name, self.store.key_value_try_get(name))
    except jax.errors.JaxRuntimeError as error:
      if "NOT_FOUND" in str(error):
        return None
      raise

  def list(self, folder: str) -> dict[str, dict[str, Any]]:
    """Returns name -> value of the values below `folder/`."""
    found = self.store.key_value_dir_get(f"{folder}/")
    values = {key.rpartition("/")[2]: self._value(key, text) for key, text in found}
    return {name: value for name, value in values.items() if value is not None}

  def _value(self, name: str, shown: str) -> dict[str, Any] | None:
    """Returns a value that is signed by a process of this run; counts others, and returns None."""
    if self.alone:
      return json.loads(shown)
    signature, _, text = shown.partition(" ")
    if tokens.signed(self.key, signature, "shown", name, text):
      return json.loads(text)
    if len(self.unsigned) < _MOST_UNSIGNED:
      self.unsigned.add(name)
    return None

  def unsigned_text(self) -> str:
    """Returns the end of a message, on ignored values; "" if there were none."""
    if not self.unsigned:
      return ""
    return (
      f"; {len(self.unsigned)} entries of the coordination service were ignored, which no process "
      f"of this run has signed (such as {printable(min(self.unsigned), newlines=False)})"
    )

  def delete(self, folder: str) -> None:
    """Removes the values below `folder/`."""
    self.store.key_value_delete(folder)

  def wait(self, point: str, *, timeout_seconds: float, shown: str = "") -> None:
    """A barrier: returns when all processes have called it as often as this one.

    Args:
      point: its name.
      timeout_seconds: how long the slowest may take to arrive.
      shown: a folder below which each process has published a value, under its index, before it
        came here: then the first few processes name those that are missing.

    Raises:
      NotTogetherError: a process did not reach it in time.
    """
    try:
      self.store.wait_at_barrier(point, int(timeout_seconds * 1000))
    except jax.errors.JaxRuntimeError as error:
      if not shown:
        first_line = str(error).partition("\n")[0]
        raise NotTogetherError(f"waiting for all processes at {point!r}: {first_line}") from error
      names = ""
      if self.index < WATCHERS:
        there = self.list(shown)
        missing = [str(index) for index in range(self.count) if str(index) not in there]
        names = few(missing)
      raise NotTogetherError(
        f"process {names or 'another'} of {self.count} has not reached {point!r} within "
        f"{timeout_seconds:.3g} s (processes.start_timeout_seconds){self.unsigned_text()}"
      ) from error

  def all_true(self, point: str, value: bool, *, timeout_seconds: float) -> bool:
    """Returns whether `value` is true on every process, at the n-th barrier at a point.

    Raises:
      NotTogetherError: a process did not reach it in time.
    """
    self._meetings[point] += 1
    folder = f"false/{point}/{self._meetings[point]}"
    if not value:  # before the barrier, so that all see it after the barrier
      # A single entry: all may be false at once, and all read every entry.
      self.put(f"{folder}/false", {})
    self.wait(point, timeout_seconds=timeout_seconds)
    return not self.list(folder)

  def gather(
    self, point: str, value: Mapping[str, Any], *, timeout_seconds: float, sparse: bool = False
  ) -> Sequence[dict[str, Any]]:
    """Returns the value of each process, in their order, at the n-th barrier at a point.

    Args:
      point: name of the barrier.
      value: of this process.
      timeout_seconds: how long the slowest may take to arrive.
      sparse: most are empty, and not published, since all processes read every entry.

    Raises:
      NotTogetherError: naming those that did not reach it in time, unless they are sparse.
    """
    self._meetings[point] += 1
    folder = f"gathered/{point}/{self._meetings[point]}"
    if value or not sparse:
      self.put(f"{folder}/{self.index}", value)
    self.wait(point, timeout_seconds=timeout_seconds, shown="" if sparse else folder)
    found, names = self.list(folder), map(str, range(self.count))
    return [found.get(name, {}) if sparse else found[name] for name in names]


class Lockstep:
  """The barrier before each step of training, and before each batch of evaluation.

  A process that waits in a collective for one that never arrives cannot recover: its state was
  donated to a step that does not end. So there is a barrier outside JAX's computations, where a
  process still has the state of the last step.
  """

  def __init__(self, group: Group, stop: StopRequest):
    """Takes the processes, and this one's stop request."""
    self._group, self._stop = group, stop

  @property
  def stopping(self) -> bool:
    """Returns whether this process is asked to stop; the others may not know yet."""
    return bool(self._stop)

  def enter(self) -> bool:
    """A barrier; returns whether all processes take the next step, the same on all of them.

    All call it before every step, in the same order. A stop that any process knows of is known to
    all after the barrier.
    """
    if self._group.alone:
      return not self.stopping
    return self._group.all_true("step", not self.stopping, timeout_seconds=_FOR_EVER_SECONDS)


# ------------------------------ joining ------------------------------

_current = Group()
_called = False  # whether a rendezvous has begun, in which the others are told of an error


def current() -> Group:
  """Returns the group of this run; before `connect`, a single process."""
  return _current


def who() -> tuple[str, int, int] | None:
  """Returns (coordinator's host:port, number of processes, index), from three variables.

  If only the address is set, number and index may come from MPI's or Slurm's variables. With the
  number set to 1 the process is alone, wherever it runs.

  Raises:
    ValueError: only some of the three are set, or they are not valid numbers.
  """
  values = {name: os.environ.get(name, "") for name in (ADDRESS, COUNT, INDEX)}
  if not any(values.values()):
    return None
  if values[COUNT] == "1":
    return "", 1, 0
  if not values[COUNT] and not values[INDEX] and (ranked := _ranked()):
    values.update(zip((COUNT, INDEX), map(str, ranked), strict=True))
  if not all(values.values()):
    missing = " and ".join(name for name, value in values.items() if not value)
    raise ValueError(f"of the three variables {', '.join(values)}, {missing} is not set")
  try:
    count, index = int(values[COUNT]), int(values[INDEX])
    if not 0 < int(_ADDRESS.fullmatch(values[ADDRESS])["port"]) < 2**16:
      raise ValueError
  except (TypeError, ValueError):
    raise ValueError(
      f"{_text(values)}: expected a host:port and two numbers, such as 10.0.0.1:8476 or "
      f"[::1]:8476, 2 and 0"
    ) from None
  if not 0 <= index < count:
    raise ValueError(f"{_text(values)}: the index must be 0 or more and below the number")
  return values[ADDRESS], count, index


def _ranked() -> tuple[int, int] | None:
  """Returns (number, index) from a launcher's variables; None without a launcher.

  Raises:
    ValueError: its variables are not numbers.
  """
  for names in RANKS:
    values = {name: os.environ.get(name, "") for name in names}
    try:
      numbers = [int(value) for value in values.values() if value]
    except ValueError:
      raise ValueError(f"{_text(values)}: expected two numbers") from None
    if len(numbers) == 2:
      return numbers[0], numbers[1]
  return None


def _text(values: Mapping[str, str]) -> str:
  return ", ".join(f"{name}={value}" for name, value in values.items())


def connect(
  *,
  start_timeout_seconds: float,
  heartbeat_seconds: float,
  on_tpu: bool = False,
  workdir: epath.Path | None = None,
) -> Group:
  """Joins the other processes of the run, if there are any; before JAX's backend starts.

  Args:
    start_timeout_seconds: how long the others may take to arrive.
    heartbeat_seconds: a process is considered dead after this time without a heartbeat.
    on_tpu: this machine has TPUs: JAX's cluster detection is used.
    workdir: where process 0 publishes the run's token, if the environment has none.

  Raises:
    ValueError: the variables are wrong, or there are several processes and no address.
    RollCallError: processes are missing or too many.
    OSError: there is no token in the environment, and the workdir cannot be written.
  """
  global _current, _called
  address, count, index = _find(start_timeout_seconds, on_tpu)
  if count == 1:
    return _current
  _called = True
  key = rendezvous.call(
    address,
    count,
    index,
    token=tokens.Token(workdir, address),
    timeout_seconds=start_timeout_seconds,
  )
  crash_output.divert("" if workdir is None else str(workdir), index, label(index))
  # SIGTERM is handled by `preemption`: JAX's own service would replace the handler.
  jax.config.update("jax_enable_preemption_service", False)
  if replaceable():  # else the death of one process ends all others
    jax.config.update("jax_enable_recoverability", True)
  if index:  # gRPC asks a service that is not there yet again after a second
    _wait_for_service(address, start_timeout_seconds)
  alone_here = any(os.environ.get(n, "").partition("(")[0] == "1" for n in PER_HOST)
  jax.distributed.initialize(
    address,
    count,
    index,
    local_device_ids=[] if alone_here or who() else None,
    initialization_timeout=int(start_timeout_seconds) + 60,
    heartbeat_timeout_seconds=int(heartbeat_seconds),
    shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
    coordinator_bind_address=listening.bind_address(address),
  )
  _current = Group(index, count, heartbeat_seconds, jax_internals.client(), key, address=address)
  return _current


def _wait_for_service(address: str, timeout_seconds: float) -> None:
  """Returns when JAX's coordination service listens; if it does not in time, JAX says so."""
  until = time.monotonic() + timeout_seconds
  while time.monotonic() < until:
    with (
      contextlib.suppress(OSError),
      socket.create_connection(listening.split(address), timeout=_POLL_SECONDS),
    ):
      return
    time.sleep(_POLL_SECONDS)


def _find(timeout_seconds: float, on_tpu: bool) -> tuple[str, int, int]:
  """Returns (coordinator's host:port, number, index) from the variables or JAX's detection."""
  if found := who():
    return found
  ranked = _ranked()
  number = ranked[0] if ranked else 1
  in_job = "JOB_COMPLETION_INDEX" in os.environ
  if number == 1 and not on_tpu and not in_job:
    return "", 1, 0
  address, count, index = jax_internals.detect(int(timeout_seconds))
  if address is not None:
    return address, count, index
  if number > 1 or in_job:
    what = f"{number} processes were started" if number > 1 else "this is a Kubernetes Job"
    raise ValueError(
      f"{what}, and JAX cannot detect where process 0 is; set {ADDRESS}=HOST:PORT for all of "
      f"them{'' if ranked else f', {COUNT} and {INDEX}'}, or {COUNT}=1 if each is a separate run"
    )
  return "", 1, 0


def refuse(text: str, workdir: epath.Path | None = None) -> None:
  """Notifies the others, who may be waiting for this process, that it does not join."""
  if _called:
    return
  with contextlib.suppress(ValueError, OSError, RuntimeError):
    found = who()
    if found and found[1] > 1:
      token = tokens.Token(workdir, found[0])
      if workdir is None and not token.given:
        return  # without a token it would not be trusted
      rendezvous.call(*found, token=token, timeout_seconds=5, refused=text)


def of_processes() -> int:
  """Returns how many processes the run has when none is missing."""
  return max(_current.count, int(os.environ.get(preemption.OF_PROCESSES) or 0))


# ------------------------------ leaving ------------------------------


def part() -> None:
  """Disconnects at the end of a successful run, waiting for processes that are behind."""
  if _current.alone:
    return
  if replaceable():  # then JAX does not wait for them
    _current.wait("parting", timeout_seconds=_SHUTDOWN_SECONDS)
    if _current.first:
      time.sleep(_PARTING_SECONDS)
  jax.distributed.shutdown()


# ------------------------------ after the death of another process ------------------------------


def replaceable() -> bool:
  """Returns whether a process that dies is replaced, and the others resume with the new one."""
  return bool(os.environ.get(preemption.REPLACEABLE))


class _NoStore:
  """The store of a group that this process has left, for threads that do not know it yet."""

  def __getattr__(self, name: str) -> Any:
    raise jax.errors.JaxRuntimeError(f"CANCELLED: {name}: this process has left the group")


_cut: dict[int, int] = {}  # number -> inode of the connections that were ended


def cut() -> None:
  """Ends the connections to the other processes, from any thread: whatever waits for them raises.

  Those of the coordination service stay: JAX ends a process that loses it before it has left.
  """
  _current.store = _NoStore()
  with contextlib.suppress(jax.errors.JaxRuntimeError):
    jax_internals.client().shutdown()
  service = listening.split(_current.address)[1]
  for name in os.listdir("/dev/fd"):  # psutil does not list those whose other end has died
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
      tcp = connection.type == socket.SOCK_STREAM and connection.family != socket.AF_UNIX
      if tcp and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        ports = [connection.getsockname()[1]]
        with contextlib.suppress(OSError):  # it has no other end any more
          ports.append(connection.getpeername()[1])
        if service not in ports:
          _cut[int(name)] = os.fstat(int(name)).st_ino
          connection.shutdown(socket.SHUT_RDWR)


def abandon() -> None:
  """Leaves the group without the others, with all arrays and programs; `connect` joins again.

  Nothing may refer to an array any more, or its memory stays in use.
  """
  global _current, _called
  cut()
  with contextlib.suppress(jax.errors.JaxRuntimeError):
    jax.distributed.shutdown()
  jax_internals.forget_client()
  _current, _called, preemption.joined = Group(), False, time.monotonic()
  jax.clear_caches()
  jax.extend.backend.clear_backends()
  gc.collect()
  closing = threading.Timer(_CLOSING_SECONDS, _close_rest, [dict(_cut)])
  closing.daemon = True
  closing.start()
  _cut.clear()


def _close_rest(connections: Mapping[int, int]) -> None:
  """Closes what is left of ended connections, so that their numbers stay in use.

  Gloo keeps those on which something arrives that no collective waits for any more, and its thread
  then asks for their state without a pause, as long as the process runs.
  """
  for number, inode in connections.items():
    with contextlib.suppress(OSError), open(os.devnull) as nowhere:
      if os.fstat(number).st_ino == inode:
        os.dup2(nowhere.fileno(), number, inheritable=False)


_last_things: list[Callable[[], None]] = []


def before_leaving(do: Callable[[], None]) -> None:
  """Registers a function that `leave` calls just before this process ends; it has two seconds."""
  _last_things.append(do)


def leave(code: int, *, patience_seconds: float = 10.0) -> NoReturn:
  """Ends this process at once, with an exit code, from any thread; does not return.

  It waits briefly for the others: process 0 runs the coordination service, and JAX aborts all
  processes that lose it.
  """
  preemption.clean_up()
  if not _current.alone and patience_seconds:
    with contextlib.suppress(NotTogetherError):
      _current.wait("leaving", timeout_seconds=patience_seconds)
    if _current.first:
      time.sleep(0.5)
  for do in _last_things:
    thread = threading.Thread(target=do, daemon=True)  # storage may not answer
    thread.start()
    thread.join(2)
  os._exit(code)


def label(index: int | None = None) -> str:
  """Returns `process 1 (host): ` for messages; "" if there is only one process."""
  if index is None and _current.alone:
    return ""
  return f"process {_current.index if index is None else index} ({socket.gethostname()}): "
