"""Rows 27 and 28: messages of outsiders, and the rendezvous of up to thousands."""

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from unittest import mock

from benchmarks import rendezvous
from processes import tokens
from processes.heartbeat import Exchange
from processes.listening import free_port
from processes.rendezvous import call as join
from tests.faults import same
from tests.faults.frame import Attempt, row
from tests.faults.harness import Run
from tests.processes import hostile
from tests.processes.stores import SharedStore, groups_of, together

STEPS = 20
# Every so many trials a whole run is attacked; in the others its two parts that listen.
WHOLE_EVERY = 10
MESSAGES = 120
ENTRIES = 200


@row(
  27,
  fault="hostile messages at the rendezvous and in the key-value store: a seeded fuzz",
  passes="the run is unaffected: Same, exit 0; every process meets the others and receives their "
  "messages, and none from outside",
  trials=40,
  seconds=4,
  note="Every tenth trial attacks the port of a whole run of 2 processes until it ends; the "
  "others send 120 messages to a rendezvous of 4 processes, or 200 entries to the coordination "
  "service of 3.",
)
def hostile_messages(attempt: Attempt) -> None:
  """Sends what an outsider can, to the rendezvous and to the exchange."""
  if attempt.number % WHOLE_EVERY == 0:
    attempt.does = "a whole run of 2 processes, whose port is sent messages until it ends"
    _whole_run(attempt)
  elif attempt.number % 2:
    attempt.does = f"{MESSAGES} messages at a rendezvous of 4"
    _rendezvous(attempt)
  else:
    attempt.does = f"{ENTRIES} entries in the coordination service of 3"
    _exchange(attempt)


@contextlib.contextmanager
def _attacks(port: int, chance: random.Random, count: int) -> Iterator[list[int]]:
  """Sends messages to a port until the block ends; gives a list that grows by one for each."""
  over, sent = threading.Event(), []

  def attack() -> None:
    while not over.is_set():
      with contextlib.suppress(OSError):
        _send(port, hostile.message(chance, count))
        sent.append(1)
      over.wait(0.02)

  thread = threading.Thread(target=attack, daemon=True)
  thread.start()
  try:
    yield sent
  finally:
    over.set()
    thread.join()


def _send(port: int, data: bytes) -> None:
  """Sends something to whoever listens."""
  with socket.create_connection(("localhost", port), timeout=1) as connection:
    connection.sendall(data)


def _whole_run(attempt: Attempt) -> None:
  clean = attempt.clean(2, same.KEPT, steps=STEPS)
  with Run(attempt.workdir, steps=STEPS, flags=same.KEPT) as run:
    with _attacks(run.port, attempt.chance, 2) as sent:
      run.end()
    attempt.seen.append(f"{len(sent)} messages")
    run.ends(0)
    assert len(sent) > 20, "nothing was sent"
  same.check(attempt.workdir, clean.record)


def _rendezvous(attempt: Attempt) -> None:
  """Attacks a rendezvous before its processes come, and while they do."""
  port, gone, chance = free_port(), threading.Event(), attempt.chance
  with mock.patch.dict(os.environ, {tokens.VARIABLE: chance.randbytes(16).hex()}):
    token = tokens.Token(None, "")

  def call(index: int) -> bytes:
    if index:
      gone.wait(60)
    return join(f"localhost:{port}", 4, index, token=token, timeout_seconds=60)

  def attacks() -> None:
    for number in range(MESSAGES):
      if number == MESSAGES // 2:
        gone.set()
      with contextlib.suppress(ConnectionRefusedError):  # the rendezvous is over
        if number < MESSAGES // 2:
          hostile.attack(port, chance, 4)
        else:
          _send(port, hostile.message(chance, 4))

  def attack() -> None:
    with contextlib.suppress(ConnectionError, TimeoutError):
      attacks()
    gone.set()

  *results, _ = together(*[lambda index=index: call(index) for index in range(4)], attack)
  assert all(isinstance(result, bytes) for result in results), results
  assert len({*results}) == 1, "the processes have different keys"


def _exchange(attempt: Attempt) -> None:
  """Fills the coordination service with entries of outsiders, while the processes talk."""
  chance, store = attempt.chance, SharedStore(3)
  groups = groups_of(3, store, key=chance.randbytes(32).hex().encode())
  heard: dict[int, list[tuple[str, str]]] = {index: [] for index in range(3)}
  exchanges = [
    Exchange(
      group,
      lambda: (1, "a", 5.0),
      lambda what, index, notice, own=group.index: heard[own].append((what, index)),
    )
    for group in groups
  ]
  for one in exchanges:
    one.start()
  for _ in range(ENTRIES):
    what = chance.choice(["stop", "left", "failed", "refused", "", "\x1b[2J"])
    names = [f"notice/{what}-{chance.choice(['0', '1', '2', '9', 'x', ''])}"]
    names += [f"progress/{chance.randrange(5)}", "behind", f"gathered/a/1/{chance.randrange(5)}"]
    name = chance.choice(names)
    store.key_value_set(name, hostile.entry(chance, groups[0].key, name), allow_overwrite=True)
    time.sleep(0.002)
  exchanges[2].tell("failed", "ValueError: x")
  until = time.monotonic() + 20
  while not (heard[0] and heard[1]) and time.monotonic() < until:
    time.sleep(0.01)
  alive = [one._thread.is_alive() for one in exchanges]
  for one in exchanges:
    one.close()
  assert alive == [True] * 3, f"exchanges that have ended: {alive}"
  assert heard == {0: [("failed", "2")], 1: [("failed", "2")], 2: []}, heard
  assert groups[0].unsigned, "nothing was left out"
  attempt.seen.append(f"{len(groups[0].unsigned)} names left out by process 0")


# ------------------------------ numbers of processes ------------------------------

COUNTS = (2, 3, 16, 64, 256, 1024, 2048, 4096)
MUTE = 40
LATE_SECONDS = 3.0


@row(
  28,
  fault="a rendezvous of 2 to 4,096 processes, some late, with silent connections beside them",
  passes="all meet within 30 s of the last one's arrival",
  trials=16,
  seconds=8,
  note="Each process has its own socket; they are threads of four processes. 2, 3, 16, 64, 256, "
  "1,024, 2,048 and 4,096 of them in turn.",
)
def meeting_of_thousands(attempt: Attempt) -> None:
  """Lets 2 to 4,096 processes meet, of which some come late, beside connections that are silent."""
  count = COUNTS[attempt.number % len(COUNTS)]
  late = attempt.chance.sample(range(1, count), min(count - 1, attempt.chance.randrange(1, 9)))
  attempt.does = f"{count} processes, {len(late)} late by {LATE_SECONDS:g} s, {MUTE} silent"
  found = rendezvous.meet(count, drivers=4, late=late, late_seconds=LATE_SECONDS, mute=MUTE)
  attempt.seen.append(f"{found.seconds:.1f} s")
  assert not found.wrong, next(iter(found.wrong.items()))
  assert len(found.keys) == 1, "the processes have different keys"
  assert found.seconds < LATE_SECONDS + 30, f"{found.seconds:.1f} s"
