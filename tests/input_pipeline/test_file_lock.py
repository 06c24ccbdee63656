"""One process does the work, the others wait; a process that dies frees the lock."""

import os
import signal
import threading

from etils import epath

from input_pipeline.store import locked


def test_a_second_one_waits_for_the_first(tmp_path):
  order = []
  path = epath.Path(tmp_path / "sets" / "digits")

  def second():
    with locked(path):
      order.append("second")

  with locked(path):
    thread = threading.Thread(target=second)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    order.append("first")
  thread.join(30)
  assert order == ["first", "second"]


def test_a_killed_process_blocks_no_other(tmp_path):
  path = epath.Path(tmp_path / "digits")
  read, write = os.pipe()
  child = os.fork()
  if child == 0:
    with locked(path):
      os.write(write, b"x")
      signal.pause()
  assert os.read(read, 1) == b"x"
  os.kill(child, signal.SIGKILL)
  os.waitpid(child, 0)
  os.close(read)
  os.close(write)
  with locked(path):
    pass


def test_a_bucket_is_locked_on_this_machine(tmp_path, monkeypatch):
  monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
  with locked(epath.Path("gs://bucket/sets/digits")):
    [lock] = tmp_path.iterdir()
  assert lock.name.startswith("meshwright-")
