"""A command line that is parsed in this process, and forgotten after the test."""

import absl.flags
import pytest

from commands import flags


@pytest.fixture
def parse():
  """Returns a function from words behind main.py to what `flags.parse` returns."""

  def parsed(*words):
    flags._typed[:] = words
    return flags.parse(words)

  yield parsed
  absl.flags.FLAGS.unparse_flags()
  absl.flags.FLAGS.mark_as_parsed()
  for flag in (flags.CONFIG, flags.AGAINST):
    flag.read("", [])
