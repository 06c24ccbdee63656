"""The rewards that are built in: 1.0 for an answer that is right, 0.0 for one that is not.

A row without what a verifier needs is an error, and so a failed reward. Workers load this file by
its path, as they load a user's: it imports nothing of ours.
"""

import contextlib
import fractions
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:\s?/\s?\d+)?|[-+]?\.\d+")
_CODE = re.compile(r"```(?:python|py)?[^\S\n]*\n(.*?)(?:```|\Z)", re.DOTALL)

Row = Mapping[str, Any]


def number(prompt: str, answer: str, row: Row) -> float:
  """Returns whether the last number of an answer equals the last one of `row["answer"]`.

  Compared are the values: 1,234.50 is 1234.5, and 2/4 is 0.5.

  Raises:
    ValueError: the row's answer has no number.
  """
  if (wanted := _last_number(str(row["answer"]))) is None:
    raise ValueError(f"no number is in row['answer']: {row['answer']!r}")
  return float(_last_number(answer) == wanted)


def _last_number(text: str) -> fractions.Fraction | None:
  for found in reversed(_NUMBER.findall(text)):
    above, _, below = re.sub(r"[,\s]", "", found).partition("/")
    if not below or int(below):
      return fractions.Fraction(above) / int(below or 1)
  return None


def exact(prompt: str, answer: str, row: Row) -> float:
  """Returns whether an answer is `row["answer"]`, or one of them; spaces at the ends aside."""
  wanted = row["answer"]
  wanted = wanted if isinstance(wanted, list) else [wanted]
  return float(answer.strip() in {str(one).strip() for one in wanted})


def pattern(prompt: str, answer: str, row: Row) -> float:
  """Returns whether the regular expression `row["pattern"]` matches all of an answer.

  Spaces at the ends of the answer are not compared, and a dot matches a newline too.
  """
  return float(re.fullmatch(row["pattern"], answer.strip(), re.DOTALL) is not None)


def tests(prompt: str, answer: str, row: Row) -> float:
  """Returns whether the code of an answer passes the tests of `row["tests"]`, by Python.

  The code is the answer's last block between ``` marks, or all of it. The tests are statements
  that raise where something is wrong (`assert add(1, 2) == 3`). Both run in a process of their own.
  An answer that ends it before the tests are done has not passed them, nor has one that takes
  longer than 0.8 of the time that the reward has.

  Raises:
    SyntaxError: the tests are no Python.
  """
  compile(row["tests"], "tests", "exec")
  code, done = [answer, *_CODE.findall(answer)][-1], secrets.token_bytes(16)
  passed, written = os.pipe()
  program = (
    "import os\nspace = {'__name__': 'answer'}\n"
    f"exec(compile({code!r}, 'answer', 'exec'), space)\n"
    f"exec(compile({row['tests']!r}, 'tests', 'exec'), space)\n"
    f"os.write({written}, {done!r})\n"
  )
  with contextlib.suppress(subprocess.TimeoutExpired):
    subprocess.run(
      [sys.executable, "-I", "-"],
      input=program.encode(errors="replace"),
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
      pass_fds=[written],
      timeout=0.8 * float(os.environ["REWARD_SECONDS"]),
      check=False,
    )
  os.set_blocking(passed, False)
  with contextlib.suppress(BlockingIOError):  # nothing was written
    return float(os.read(passed, 2**16) == done)
  return 0.0
