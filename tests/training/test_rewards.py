"""Rewards by real workers: values, and every way in which a call can fail."""

import os
import time

import numpy as np
import psutil
import pytest

from training import rewards
from training.rewards import Rewards, parse

# A function for each way to fail, chosen by the answer; the others are worth their length.
FILE = """
import ctypes, os, random, signal, subprocess, sys, time
CALLS = []

def reward(prompt, answer, row):
  CALLS.append(answer)
  if answer in FAILURES:
    return FAILURES[answer]()
  return len(CALLS) + 10 * row["worth"] + len(answer) / 10

def half(prompt, answer, row):
  return 0.5

def fork_bomb():
  while True:
    os.fork()

def hidden_daemon():
  if os.fork():
    time.sleep(60)
  os.setsid()
  if os.fork():
    os._exit(0)
  time.sleep(60)

def flood():
  while True:
    for number in range(3, 64):
      try:
        os.write(number, b"x" * 10**5)
      except OSError:
        pass

def close_all():
  os.closerange(0, 64)
  time.sleep(60)

def raises():
  raise ValueError("of the file")

FAILURES = {
  "raises": raises,
  "exits": lambda: sys.exit(0),
  "leaves": lambda: os._exit(7),
  "crashes": lambda: ctypes.string_at(0),
  "loops": lambda: [0 for _ in iter(int, 1)],
  "allocates": lambda: bytearray(2**34),
  "bombs": fork_bomb,
  "hides": hidden_daemon,
  "floods": flood,
  "closes": close_all,
  "nan": lambda: float("nan"),
  "text": lambda: "1.0",
  "kills": lambda: os.kill(os.getppid(), signal.SIGKILL),
}
"""
WANTED = {
  "raises": "ValueError at mine.py:39",
  "exits": "SystemExit at mine.py:43",
  "leaves": "exited with code 7",
  "crashes": "was ended by SIGSEGV",
  "loops": "took longer than 0.7 s",
  "allocates": "needed more than 256 MiB",
  "bombs": "had more than 32 processes",
  "hides": "took longer than 0.7 s",
  "floods": "wrote something else than a number",
  "closes": "took longer than 0.7 s",
  "nan": "returned nan",
  "text": "returned str, not a number",
  "kills": "its worker process was lost, and is started again",
}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
  path = tmp_path_factory.mktemp("rewards") / "mine.py"
  path.write_text(FILE)
  return path


def test_all_ways_to_fail_are_named_and_the_others_keep_their_values_and_places(file, monkeypatch):
  text = f"{file}*2,{file}:half*-1"
  good = ["a", "bb", "ccc"]
  answers = [[*WANTED, *good], [*good, *reversed(WANTED)]]
  before = {*psutil.Process().children(recursive=True)}
  mark = f"REWARDS_OF_{os.getpid()}_{time.monotonic_ns()}"
  monkeypatch.setenv(mark, "1")
  with Rewards(text, seconds=0.7, memory_mib=256, processes=2) as made:
    found = made.score(["p", "q"], answers, [{"worth": 1}, {"worth": 2}])
    left = {*psutil.Process().children(recursive=True)} - before
    again = made.score(["p"], [good], [{"worth": 1}])
  assert len(left) <= 2, left  # the workers alone
  failed = np.array([[one in WANTED for one in group] for group in answers])
  np.testing.assert_array_equal(found.failed, failed)
  # Each call is the first of its process, so a value depends on no other answer.
  values = np.add.outer([10, 20], [1.1, 1.2, 1.3])
  np.testing.assert_allclose(found.values[~failed], np.ravel(2 * values - 0.5))
  np.testing.assert_array_equal(again.values[0], found.values[0, -3:])
  wanted = {f"{file}: {what}": 0 for what in WANTED.values()}
  for what in WANTED.values():
    wanted[f"{file}: {what}"] += 2
  assert found.failures == wanted
  assert "26 of 32 answers failed" in found.text()
  assert 'raise ValueError("of the file")' in found.first
  assert found.metrics()["reward_failed"] == 26
  assert found.metrics()[f"reward/{file}:half"] == 0.5
  assert again.text() == again.first == ""
  for process in psutil.process_iter(["environ"]):  # others may compute rewards beside it
    assert mark not in (process.info["environ"] or ()), process


def test_a_call_ends_with_its_run(file):
  """Killed, a run leaves its end of the pipe closed."""
  made = Rewards(str(file), seconds=60, memory_mib=256, processes=1)
  worker = made._idle.get()
  worker._process.stdin.write(b'[0, "p", "loops", {}]\n')
  worker._process.stdin.flush()
  process, until = psutil.Process(worker._process.pid), time.monotonic() + 20
  while not (calls := process.children()):
    assert time.monotonic() < until
  worker._process.stdin.close()
  assert worker._process.wait(timeout=20) == 0
  assert not any(call.is_running() for call in calls)
  made._idle.put(None)
  made.close()


# ------------------------------ what is built in ------------------------------

VERIFIED = [
  ("number", "so it is 1,234.50.", {"answer": "#### 1234.5"}, 1.0),
  ("number", "18 + 24 = 42", {"answer": 42}, 1.0),
  ("number", "first 42, then 43", {"answer": 42}, 0.0),
  ("number", "2/4", {"answer": ".5"}, 1.0),
  ("number", "a minus: -7", {"answer": "7"}, 0.0),
  ("number", "1/0", {"answer": "1"}, 0.0),
  ("number", "none", {"answer": "0"}, 0.0),
  ("exact", " Paris\n", {"answer": "Paris"}, 1.0),
  ("exact", "4", {"answer": ["four", 4]}, 1.0),
  ("exact", "Paris, France", {"answer": "Paris"}, 0.0),
  ("pattern", "yes\nthen 7 ", {"pattern": r"yes.*\d"}, 1.0),
  ("pattern", "oh yes 7", {"pattern": r"yes.*\d"}, 0.0),
  ("tests", "def f(x):\n  return x + 1", {"tests": "assert f(1) == 2"}, 1.0),
  ("tests", "Try\n```python\nf = lambda x: x + 1\n```\nit.", {"tests": "assert f(1) == 2"}, 1.0),
  ("tests", "f = abs", {"tests": "assert f(1) == 2"}, 0.0),
  ("tests", "raise SystemExit(0)", {"tests": "assert f(1) == 2"}, 0.0),
  ("tests", "import os\nos._exit(0)", {"tests": "assert f(1) == 2"}, 0.0),
  ("tests", "while True: print('x' * 10**6)", {"tests": "assert f(1) == 2"}, 0.0),
  ("tests", "f = lambda x: bytearray(2**40)", {"tests": "f(1)"}, 0.0),
]
NO_JUDGEMENT = [
  ("number", "1", {"answer": "one"}, "ValueError at verifiers.py"),
  ("exact", "1", {}, "KeyError at verifiers.py"),
  ("pattern", "1", {"pattern": "("}, "error at verifiers.py"),
  ("pattern", "a" * 40, {"pattern": "(a+)+b"}, "took longer than 1 s"),
  ("tests", "f = abs", {"tests": "assert f("}, "SyntaxError at "),
]


def test_verifiers():
  names = [*dict.fromkeys(name for name, *_ in VERIFIED)]
  assert names == [*rewards.VERIFIERS]
  with Rewards(",".join(names), seconds=1, memory_mib=512, processes=2) as made:
    numbers = {one.name: number for number, one in enumerate(made.rewards)}
    calls = [(numbers[name], "p", *given) for name, *given, _ in (*VERIFIED, *NO_JUDGEMENT)]
    found = [*made._pool.map(made._call, calls)]
  for (*case, wanted), one in zip(VERIFIED, found, strict=False):
    assert one == {"value": wanted}, case
  for (*case, wanted), one in zip(NO_JUDGEMENT, found[len(VERIFIED) :], strict=True):
    assert one["what"].startswith(wanted), (case, one)


# ------------------------------ what is refused ------------------------------


def test_all_that_is_wrong_with_the_text_is_said_at_once(tmp_path):
  (tmp_path / "bad.py").write_text("def reward(:")
  text = f"numbr, exact*0, exact*x, {tmp_path}/none.py, {tmp_path}/bad.py, number, number"
  with pytest.raises(ValueError, match="numbr") as error:
    parse(text)
  lines = str(error.value).splitlines()
  wanted = ["did you mean number?", "weight '0'", "weight 'x'", "No such file", "bad.py:1 is no"]
  for line, said in zip(lines, [*wanted, "'number': it is named twice"], strict=True):
    assert said in line
  with pytest.raises(ValueError, match="no reward is named; take a file, or one of number, exact,"):
    parse(" ")


@pytest.mark.parametrize(
  ("code", "said"),
  [
    ("raise SystemExit(0)", r"mine\.py:1: SystemExit: 0"),
    ("import os\nos._exit(0)", "it has ended"),
    ("rewards = None", r"mine\.py: ValueError: it has no function reward\(prompt, answer, row\)"),
    (
      "def reward(prompt): pass",
      r"reward has to take \(prompt, answer, row\): too many",
    ),
  ],
)
def test_files_that_cannot_be_used_are_refused(tmp_path, code, said):
  (tmp_path / "mine.py").write_text(code)
  with pytest.raises(ValueError, match=f"(?s)the rewards cannot be loaded:.*{said}"):
    Rewards(str(tmp_path / "mine.py"), seconds=1, memory_mib=64, processes=1)
