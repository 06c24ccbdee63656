"""A run's lines on a full disk: none is lost, none is torn, and nothing waits for ever."""

import contextlib
import json
import os
import pathlib
import resource
import struct
import subprocess
import sys
import threading

import pytest
from etils import epath
from tensorboardX.proto import event_pb2

from runtime import files
from training.metrics import log_lines
from training.metrics.log_lines import LogFile, MetricsWriter

TIMES = {"goodput": 0.5, "seconds": {}, "time": 1.0, "done": False}


@contextlib.contextmanager
def full_disk(size):
  """Lets this process write no more than so many bytes to a file."""
  _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


@pytest.fixture
def path(tmp_path):
  """Returns the path of a file that is not there yet."""
  return epath.Path(tmp_path / "lines")


def test_what_a_full_disk_does_not_take_is_written_later_in_order(path):
  lines = LogFile(path)
  lines.append(b"one\n")
  with full_disk(10):
    for text in (b"two, which is long\n", b"three\n"):
      lines.append(text)
      assert lines.waiting == f"{path} cannot be written: File too large"
      assert path.read_text() == "one\n"  # no part of a line either
    assert lines.read() == b"one\ntwo, which is long\nthree\n"
  lines.append(b"four\n")
  assert not lines.waiting
  assert path.read_bytes() == lines.read() == b"one\ntwo, which is long\nthree\nfour\n"


def test_a_new_content_waits_too(path):
  lines = LogFile(path)
  lines.append(b"one\n")
  with full_disk(10):
    lines.replace([b"first, which is long\n", b"second\n"])
    lines.append(b"third\n")
    assert lines.waiting
    assert path.read_text() == "one\n"
    assert [child.name for child in path.parent.iterdir()] == ["lines"]
  lines.flush()
  assert not lines.waiting
  assert path.read_text() == "first, which is long\nsecond\nthird\n"


def test_other_errors_are_raised(path):
  path.mkdir()
  with pytest.raises(files.NotPlainError, match="it is a directory, not a plain file"):
    LogFile(path).append(b"one\n")


def scalars(folder) -> list[tuple[int, str]]:
  """Returns (step, name) of all scalars in the event files of a folder, up to a torn one."""
  found = []
  for path in sorted(folder.glob("events.out.tfevents.*"), key=lambda p: p.stat().st_mtime_ns):
    content = path.read_bytes()
    while len(content) > 8:
      [size] = struct.unpack("<Q", content[:8])
      if len(content) < 16 + size:
        break
      event = event_pb2.Event.FromString(content[12 : 12 + size])
      found += [(event.step, value.tag) for value in event.summary.value]
      content = content[16 + size :]
  return found


def test_a_run_writes_its_numbers_once_there_is_space(tmp_path):
  with MetricsWriter(epath.Path(tmp_path), step=0, tensorboard=True) as writer:
    writer.write(1, {"loss": 1.0})
    with full_disk(40):
      for step in range(2, 40):  # TensorBoard's own queue has ten places
        writer.write(step, {"loss": 1.0})
      writer.write_times(39, {**TIMES, "goodput": 0.5})
      writer.write_times(39, {**TIMES, "goodput": 0.25})
      assert "metrics.jsonl cannot be written" in writer.waiting
      assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 1
    writer.write(40, {"loss": 1.0})
    assert not writer.waiting
  lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
  assert [line["step"] for line in lines] == [*range(1, 40), 39, 40]
  assert [line["goodput"] for line in lines if "goodput" in line] == [0.25]
  found = scalars(tmp_path)
  assert {(step, "loss") for step in range(2, 41)} <= set(found)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_that_only_tensorboard_meets_stops_nothing(tmp_path):
  # Its files grow faster than ours: its thread dies, and nobody empties its queue any more.
  def write():
    with MetricsWriter(epath.Path(tmp_path), step=0, tensorboard=True) as writer:
      for step in range(1, 101):
        writer.write(step, dict.fromkeys("abcdefgh", 1.0))

  with full_disk(16_000):
    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(60)
  assert not thread.is_alive()
  assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 100
  assert len(scalars(tmp_path)) < 800


def test_numbers_for_tensorboard_do_not_import_pytorch(tmp_path):
  """A second copy of CUDA's libraries ended a run on a GPU."""
  (tmp_path / "torch.py").write_text("raise SystemExit('imported')")
  lines = [
    "import sys, pathlib",
    "from training.metrics import log_lines",
    "print(log_lines._summary_writer().__name__, 'torch' in sys.modules)",
  ]
  done = subprocess.run(
    [sys.executable, "-c", "\n".join(lines)],
    env={**os.environ, "PYTHONPATH": str(tmp_path)},
    cwd=pathlib.Path(log_lines.__file__).parents[2],
    capture_output=True,
    text=True,
  )
  assert (done.stdout, done.returncode) == ("SummaryWriter False\n", 0), done.stderr
