"""The process that makes the page beside a run: one at a time, and a failure ends nothing."""

import os
import time
import typing

import pytest
from etils import epath

from commands import run_report
from commands.run_report import PageWriter
from runtime import files
from tests.reports import runs
from tests.reports.test_layout_page import Reader


class Fake:
  """A process in place of the one that makes a page."""

  started: typing.ClassVar[list] = []
  slow, code, said = False, 0, b""

  def __init__(self, command, **settings):
    self.command, self.settings, self.killed = command, settings, False
    self.returncode = Fake.code
    Fake.started.append(self)

  def __enter__(self):
    return self

  def __exit__(self, *exception):
    pass

  def kill(self):
    self.killed = True

  def communicate(self, timeout):
    while not self.killed and Fake.slow:
      time.sleep(0.01)
    return b"page %d" % len(Fake.started), Fake.said


@pytest.fixture
def fake(monkeypatch):
  Fake.started, Fake.slow, Fake.code, Fake.said = [], False, 0, b""
  monkeypatch.setattr(run_report.subprocess, "Popen", Fake)
  return Fake


def writer(folder, require=files.always):
  said = []
  return PageWriter(epath.Path(folder), "run.html", require, said.append), said


def wait(made):
  made._thread.join(10)


def test_the_real_process_writes_the_page_of_the_files(tmp_path):
  runs.write(tmp_path)
  made, said = writer(tmp_path)
  made.finish(60)
  assert said == []
  assert "Step 40 of 60" in "".join(Reader((tmp_path / "run.html").read_text()).said)


def test_a_page_that_fails_leaves_the_one_of_before_and_is_reported_once(tmp_path, fake):
  made, said = writer(tmp_path)
  made.finish(10)
  fake.code, fake.said = 1, b"Traceback\nValueError: no metrics.jsonl\n"
  made.finish(10)
  made.finish(10)
  [text] = said
  assert text.endswith("run.html is not written, training continues: ValueError: no metrics.jsonl")
  assert (tmp_path / "run.html").read_text() == "page 1"


def test_a_page_is_not_rewritten_while_one_is_made_nor_right_after(tmp_path, fake, monkeypatch):
  made, said = writer(tmp_path)
  fake.slow = True
  made.request()
  made.request()
  deadline = time.monotonic() + 10
  while not fake.started and time.monotonic() < deadline:
    time.sleep(0.01)
  assert len(fake.started) == 1
  assert fake.started[0].command[-2:] == [os.fspath(tmp_path), str(run_report.NICENESS)]
  fake.slow = False
  wait(made)
  assert (tmp_path / "run.html").read_text() == "page 1"
  made._rests_until = time.monotonic() + 1000.0
  made.request()
  assert len(fake.started) == 1
  made._rests_until = 0.0
  made.request()
  wait(made)
  assert (tmp_path / "run.html").read_text() == "page 2"
  assert said == []


def test_the_end_replaces_the_page_that_is_being_made(tmp_path, fake):
  made, said = writer(tmp_path)
  fake.slow = True
  made.request()
  while not fake.started:
    time.sleep(0.01)
  first = fake.started[0]
  kill = first.kill
  first.kill = lambda: (setattr(Fake, "slow", False), kill())
  made.finish(10)
  assert first.killed
  assert (tmp_path / "run.html").read_text() == "page 2"
  assert fake.started[1].command[-1] == "0"  # nothing trains any more
  assert said == []


def test_an_end_that_takes_too_long_is_given_up(tmp_path, fake):
  made, said = writer(tmp_path)
  fake.slow = True
  made.finish(0.05)
  assert fake.started[0].killed
  [text] = said
  assert text.endswith("it took longer than 0.05 s")
  assert not (tmp_path / "run.html").exists()


def test_who_has_lost_the_workdir_writes_nothing(tmp_path, fake):
  def lost():
    raise RuntimeError("another run has taken it over")

  made, said = writer(tmp_path, lost)
  made.finish(10)
  assert not list(tmp_path.iterdir())
  assert said[0].endswith("another run has taken it over")
