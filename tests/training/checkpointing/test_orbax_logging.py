"""What Orbax and asyncio log about a failed save is recognized by its origin, and left out."""

import asyncio
import gc
import logging
import os
import sys

import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

from training.checkpointing import async_writer

INSIDE = os.path.join(os.path.dirname(ocp.__file__), "somewhere.py")


@pytest.fixture
def unraisable(monkeypatch):
  """Installs the filters beside others; returns what is let through to the hook before."""
  gc.collect()  # what earlier tests have left
  seen = []
  monkeypatch.setattr(sys, "unraisablehook", lambda raised: seen.append(str(raised.exc_value)))
  monkeypatch.setattr(async_writer, "_installed", False)
  loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
  before = [list(logger.filters) for logger in loggers]
  async_writer.quiet_orbax()
  yield seen
  for logger, filters in zip(loggers, before, strict=True):
    logger.filters = filters


def test_a_write_that_ends_after_its_event_loop_is_left_out(unraisable):
  promise, future = ts.Promise.new()

  async def wait():
    await future

  loop = asyncio.new_event_loop()
  task = loop.create_task(wait())
  loop.run_until_complete(asyncio.sleep(0.01))
  loop.close()
  promise.set_result(0)
  assert unraisable == []
  task._log_destroy_pending = False  # it ends with the test

  class Broken:
    def __del__(self):
      raise RuntimeError("Event loop is closed")

  Broken()
  gc.collect()
  assert unraisable == ["Event loop is closed"]


def shown(name, file, code="raise OSError('disk')"):
  """Tells whether an error that this code raises is logged, by a logger and from another file."""
  try:
    exec(compile(code, file, "exec"), {})
  except OSError:
    record = logging.LogRecord(name, logging.ERROR, __file__, 1, "failed", (), sys.exc_info())
  return all(one.filter(record) for one in logging.getLogger(name).filters)


def test_errors_that_orbax_raises_or_logs_are_left_out(unraisable):
  assert not shown("asyncio", INSIDE)
  assert shown("asyncio", "/elsewhere/about_orbax.py")
  for file, wanted in ((INSIDE, False), ("/elsewhere.py", True)):
    record = logging.LogRecord("absl", logging.ERROR, file, 1, "orbax failed", (), None)
    assert all(one.filter(record) for one in logging.getLogger("absl").filters) == wanted
  below = logging.LogRecord("absl", logging.INFO, INSIDE, 1, "saved", (), None)
  assert all(one.filter(below) for one in logging.getLogger("absl").filters)
