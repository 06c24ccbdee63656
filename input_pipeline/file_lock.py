"""A file lock: one process does the work, the others wait for it."""

import contextlib
import hashlib
import pathlib
import tempfile

import filelock
from absl import logging


@contextlib.contextmanager
def locked(path):
  """Acquires the lock of `path` (an epath.Path), waiting as long as necessary.

  The operating system releases the lock when its holder dies, so a killed process blocks no other.
  Object storage (gs://) has no locks: the lock then excludes only processes of this machine, and
  two machines that do the same work at once both finish it, with the same result.
  """
  name = str(path)
  if "://" in name:
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    lock_path = pathlib.Path(tempfile.gettempdir()) / f"meshwright-{digest}.lock"
  else:
    lock_path = pathlib.Path(f"{name}.lock")
  lock_path.parent.mkdir(parents=True, exist_ok=True)
  lock = filelock.FileLock(lock_path)
  try:
    lock.acquire(timeout=2)
  except filelock.Timeout:
    logging.warning("waiting for another process that prepares %s (lock file %s)", path, lock_path)
    lock.acquire()
  try:
    yield
  finally:
    lock.release()
