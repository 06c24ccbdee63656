"""Starts the processes of one run on a Ray cluster, and merges their logs.

python -m processes.launch.ray --processes=2 [--cpus=1] [--gpus=0] [--restarts=0]
  [--grace_seconds=60] [--wait_seconds=300] [--address=auto] -- .venv/bin/python main.py ...

Each process gets so many CPUs and GPUs, on as many nodes as there are, and sees its GPUs alone. The
command runs in this folder, which every node must see, with this shell's variables of JAX, XLA and
NCCL; its environment needs no Ray. Only this module does (requirements/ray.txt).

When a process fails or its node is lost, the others are ended; --restarts=N starts all of them up
to N more times, after exit code 1, 75 and death by a signal, wherever there is room then. SIGTERM
and Ctrl-C are passed on, so that the run saves; a second Ctrl-C, or --grace_seconds, kills. Exit
codes are those of `python -m processes.launch`; 1 where the cluster is not reached or has no room.
"""

import argparse
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

from processes.launch.options import parse as parse_options
from runtime.exit_codes import DONE, FAILED, REFUSED, STOPPED

# As of `python -m processes.launch`: the others may be about to print their own diagnosis.
OWN_END_SECONDS, AGAIN_SECONDS = 4, 1
PAUSE_SECONDS = 0.1
LOST = 128 + signal.SIGKILL  # the code of a process whose node or Ray worker has died
NOISE = "[Gloo] Rank"
PASSED_ON = ("JAX_", "XLA_", "NCCL_", "MESHWRIGHT_")  # how the names of variables begin


class Member:
  """Runs one process of the run on its node: a Ray actor."""

  def __init__(self):
    """Has no process yet."""
    self._process: subprocess.Popen | None = None

  def address(self) -> tuple[str, str]:
    """Returns the address by which the other nodes reach this one, and a free port as host:port."""
    import ray

    host = ray.util.get_node_ip_address()
    with socket.socket() as free:
      free.bind(("", 0))
      return host, f"{host}:{free.getsockname()[1]}"

  def run(self, command: list[str], folder: str, variables: dict[str, str]) -> Iterator[str | int]:
    """Runs the command; yields its lines as they come, and then its exit code, as in a shell."""
    libc = ctypes.CDLL(None)  # Linux, as Ray's clusters are

    def die_with_the_worker() -> None:
      libc.prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG

    try:
      self._process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=die_with_the_worker,
        encoding="utf-8",
        errors="replace",
      )
    except OSError as error:
      yield f"{error}; every node must have this folder and command"
      yield REFUSED
      return
    for line in self._process.stdout:
      yield line.rstrip("\n")
    code = self._process.wait()
    yield code if code >= 0 else 128 - code

  def terminate(self) -> None:
    """Asks the process to save and stop, if it has begun."""
    if self._process is not None:
      self._process.terminate()


def say(text: str) -> None:
  """Prints a message of the launcher."""
  print(f"launch: {text}", file=sys.stderr, flush=True)


# ------------------------------ one start ------------------------------


class Attempt:
  """One start of all processes, until all have ended; a context manager that leaves none behind."""

  def __init__(self, options: argparse.Namespace, asked: list[tuple[int, float]]):
    """Starts nothing; `asked` grows by (signal, time by the monotonic clock)."""
    self._options, self._asked = options, asked
    self._group, self._members = None, []
    self._lines: dict = {}  # what yields a process's lines -> its index
    self._codes: list[int] = []  # in the order of their ends, without those that were killed
    self._killed: set[int] = set()
    self._terminated, self._kill_at = False, float("inf")

  def __enter__(self) -> "Attempt":
    """Returns itself."""
    return self

  def __exit__(self, *exception) -> None:
    """Kills what is left, and frees the resources."""
    import ray

    for member in self._members:
      ray.kill(member)
    if self._group is not None:
      ray.util.remove_placement_group(self._group)

  def start(self) -> bool:
    """Places and starts the processes; returns whether there was room, or says what is lacking."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    options = self._options
    each = {"CPU": options.cpus, "GPU": options.gpus}
    each = {name: count for name, count in each.items() if count}
    self._group = ray.util.placement_group([each] * options.processes, strategy="SPREAD")
    deadline = time.monotonic() + options.wait_seconds
    while not self._group.wait(PAUSE_SECONDS):
      if time.monotonic() > deadline or self._asked:
        there = {name: ray.cluster_resources().get(name, 0) for name in ("CPU", "GPU")}
        say(
          f"no room for {options.processes} processes of {_counts(each)} within "
          f"--wait_seconds={options.wait_seconds:g}; the cluster has {_counts(there)} in all"
        )
        return False
    for index in range(options.processes):
      place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
      given = {"num_cpus": options.cpus, "num_gpus": options.gpus, "scheduling_strategy": place}
      self._members.append(ray.remote(Member).options(**given, max_concurrency=2).remote())
    found = ray.get([member.address.remote() for member in self._members])
    variables = {name: text for name, text in os.environ.items() if name.startswith(PASSED_ON)}
    variables |= {
      "JAX_COORDINATOR_ADDRESS": found[0][1],
      "JAX_NUM_PROCESSES": str(options.processes),
      "MESHWRIGHT_TOKEN": secrets.token_hex(32),  # signs their messages
      "PYTHONUNBUFFERED": "1",
    }
    hosts = ", ".join(f"{index} on {host}" for index, (host, _) in enumerate(found))
    say(f"started {options.processes} processes: {hosts}; coordinator {found[0][1]}")
    for index, member in enumerate(self._members):
      run = member.run.options(num_returns="streaming")
      lines = run.remote(options.command, os.getcwd(), {**variables, "JAX_PROCESS_ID": str(index)})
      self._lines[lines] = index
    return True

  def wait(self) -> int:
    """Passes on lines and signals until all have ended; returns the exit code."""
    import ray

    while self._lines:
      ready, _ = ray.wait([*self._lines], timeout=PAUSE_SECONDS)
      for lines in ready:
        index = self._lines[lines]
        try:
          news = ray.get(next(lines))
        except (ray.exceptions.RayError, StopIteration) as error:
          if index not in self._killed:
            say(f"process {index} is lost: {(str(error).strip().splitlines() or ['ended'])[0]}")
          news = LOST
        if isinstance(news, int):
          del self._lines[lines]
          self._note_end(index, news)
        elif NOISE not in news:
          print(f"[{index}] {news}", flush=True)
      self._hear()
      if time.monotonic() >= self._kill_at:
        self._kill_at = float("inf")
        self._killed |= {*self._lines.values()}
        for index in self._killed:
          ray.kill(self._members[index])
    return self._verdict()

  def _note_end(self, index: int, code: int) -> None:
    """Notes an exit code; after the first that is not 0, the others have little time left."""
    if index in self._killed:
      return
    self._codes.append(code)
    if code != DONE:
      say(f"process {index} ended: exit code {code}")
      grace = self._options.grace_seconds if code == STOPPED else OWN_END_SECONDS
      self._kill_at = min(self._kill_at, time.monotonic() + grace)

  def _hear(self) -> None:
    """Passes on a request to stop; a second Ctrl-C kills."""
    if self._asked and not self._terminated:
      self._terminated, grace = True, self._options.grace_seconds
      say(f"SIGTERM to all processes, which have {grace:g} s to save; Ctrl-C again kills them")
      self._kill_at = min(self._kill_at, time.monotonic() + grace)
      for index in self._lines.values():
        self._members[index].terminate.remote()
    first = self._asked[0][1] if self._asked else 0
    if any(n == signal.SIGINT and at > first + AGAIN_SECONDS for n, at in self._asked):
      self._kill_at = time.monotonic()

  def _verdict(self) -> int:
    if REFUSED in self._codes:
      return REFUSED
    if failed := [code for code in self._codes if code not in (DONE, STOPPED)]:
      return failed[0]
    if self._killed and self._asked:
      return 128 + self._asked[-1][0]
    return STOPPED if STOPPED in self._codes else DONE


def _counts(resources: dict[str, float]) -> str:
  return ", ".join(f"{count:g} {name}" for name, count in resources.items())


# ------------------------------ the command ------------------------------


OPTIONS = {
  "cpus": (1, "of each; 1"),
  "gpus": (0, "of each; 0"),
  "restarts": (0, "how often at most; 0"),
  "grace_seconds": (60.0, "to save in; 60"),
  "wait_seconds": (300.0, "for room; 300"),
  "address": ("auto", "of the cluster; the one of this node"),
}


def parse(arguments: list[str]) -> argparse.Namespace:
  """Returns the options, with `command`; exits with 2 and one message where they are wrong."""
  options, parser = parse_options(arguments, __doc__, OPTIONS)
  if not options.cpus + options.gpus:
    parser.error("--cpus=0 --gpus=0: a process needs some of either")
  return options


def main(arguments: list[str]) -> int:
  """Runs the command on the cluster, with restarts; returns the exit code."""
  options = parse(arguments)
  try:
    import ray
  except ModuleNotFoundError:
    say(f"{sys.executable} has no ray; `make ray` installs it: .venv-ray/bin/python -m ...")
    return REFUSED
  try:
    ray.init(address=options.address, log_to_driver=False, logging_level="warning")
  except (ConnectionError, ValueError, RuntimeError) as error:
    say(f"--address={options.address}: {str(error).splitlines()[0]}")
    say("`ray start --head` on one node, and `ray start --address=HEAD:6379` on the others")
    return FAILED
  asked: list[tuple[int, float]] = []
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda got, _: asked.append((got, time.monotonic())))
  code = FAILED
  for start in range(options.restarts + 1):
    if start:
      say(f"restart {start} of {options.restarts}")
    with Attempt(options, asked) as attempt:
      code = attempt.wait() if attempt.start() else FAILED
    if asked or not (code in (FAILED, STOPPED) or code > 128):
      break
  ray.shutdown()
  return code


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
