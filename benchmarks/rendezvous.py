"""The time of a rendezvous of many processes, on one machine.

python -m benchmarks.rendezvous [--counts=2,64,1024,4096] [--drivers=8]

This process is process 0, and makes the calls of a run. The others are threads of a few driver
processes, each with its own socket and the calls of a run, since no single machine can run
thousands of processes. So the numbers are those of the rendezvous without starting any process;
they include the cost of the other side, on the same cores. It prints the seconds from when the
others begin until the last has its answer.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import resource
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from processes import listening, rendezvous, tokens
from processes.listening import free_port

ROOT = pathlib.Path(__file__).resolve().parents[1]
TIMEOUT_SECONDS = 120.0
_STACK_BYTES = 2**18


@dataclasses.dataclass(frozen=True)
class Meeting:
  """The time and the errors of a rendezvous.

  Attributes:
    seconds: from when the others began until all had their answer.
    wrong: index -> what it raised.
    keys: that the processes have received; a single one in case of success.
  """

  seconds: float
  wrong: dict[int, str]
  keys: frozenset[str]


def meet(
  count: int,
  *,
  drivers: int = 8,
  late: Sequence[int] = (),
  late_seconds: float = 0.0,
  mute: int = 0,
) -> Meeting:
  """Runs a rendezvous of `count` processes, and returns its result.

  Args:
    count: number of processes.
    drivers: the processes that simulate all except process 0.
    late: indices of those that arrive late.
    late_seconds: their delay.
    mute: number of further connections that send nothing.
  """
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
  os.environ[tokens.VARIABLE] = secrets.token_hex(32)
  address = f"localhost:{free_port()}"
  plays = [range(1, count)[driver::drivers] for driver in range(min(drivers, count - 1))]
  started = [
    subprocess.Popen(
      [sys.executable, "-m", "benchmarks.rendezvous", "--play"],
      cwd=ROOT,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )
    for _ in plays
  ]
  try:
    for driver, indices in zip(started, plays, strict=True):
      asked = {"address": address, "count": count, "indices": [*indices]}
      asked |= {"late": [*late], "late_seconds": late_seconds}
      driver.stdin.write(json.dumps(asked) + "\n")
      driver.stdin.flush()
      assert driver.stdout.readline() == "ready\n"
    begin = time.monotonic() + 0.2  # of the whole machine
    for driver in started:
      driver.stdin.write(f"{begin}\n")
      driver.stdin.flush()
    time.sleep(max(0.0, begin - time.monotonic()))
    silent = threading.Thread(target=_say_nothing, args=[address, mute, over := threading.Event()])
    silent.start()
    try:
      wrong, keys = _play(address, count, [0])
    finally:
      over.set()
      silent.join()
    ends = [time.monotonic()]
    for driver in started:
      answer = json.loads(driver.stdout.readline())
      ends.append(answer["end"])
      wrong |= {int(index): text for index, text in answer["wrong"].items()}
      keys |= {*answer["keys"]}
  finally:
    for driver in started:
      driver.kill()
      driver.wait()
      driver.stdin.close()
      driver.stdout.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
  return Meeting(max(ends) - begin, wrong, frozenset(keys))


def _play(
  address: str, count: int, indices: Sequence[int], late=frozenset(), late_seconds: float = 0.0
) -> tuple[dict[int, str], set[str]]:
  """Simulates several processes; returns the errors of those that failed, and their keys."""
  wrong, keys = {}, set()

  def one(index: int) -> None:
    if index in late:
      time.sleep(late_seconds)
    try:
      token = tokens.Token(None, address)
      key = rendezvous.call(address, count, index, token=token, timeout_seconds=TIMEOUT_SECONDS)
      keys.add(key.decode())
    except (OSError, RuntimeError) as error:
      wrong[index] = f"{type(error).__name__}: {error}"

  threads = [threading.Thread(target=one, args=[index]) for index in indices]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  return wrong, keys


def _say_nothing(address: str, mute: int, over: threading.Event) -> None:
  """Keeps connections open to the end; every other one has sent half a line."""
  host, port = listening.split(address)
  held: list[socket.socket] = []
  while len(held) < mute and not over.is_set():
    try:
      held.append(socket.create_connection((host, port), timeout=5))
      if len(held) % 2:
        held[-1].sendall(b"0" * 30)
    except OSError:  # nothing listens yet
      over.wait(0.01)
  over.wait()
  for one in held:
    one.close()


def _driver() -> None:
  threading.stack_size(_STACK_BYTES)
  asked = json.loads(sys.stdin.readline())
  print("ready", flush=True)
  time.sleep(max(0.0, float(sys.stdin.readline()) - time.monotonic()))
  wrong, keys = _play(
    asked["address"], asked["count"], asked["indices"], {*asked["late"]}, asked["late_seconds"]
  )
  print(json.dumps({"end": time.monotonic(), "wrong": wrong, "keys": [*keys]}), flush=True)


def main() -> None:
  """Prints a line for each number of processes."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--counts", default="2,64,1024,4096")
  parser.add_argument("--drivers", type=int, default=8)
  parser.add_argument("--play", action="store_true", help=argparse.SUPPRESS)
  options = parser.parse_args()
  if options.play:
    _driver()
    return
  for count in map(int, options.counts.split(",")):
    found = meet(count, drivers=options.drivers)
    assert not found.wrong, found.wrong
    assert len(found.keys) == 1
    print(f"{count:6} processes: {found.seconds:7.3f} s", flush=True)


if __name__ == "__main__":
  main()
