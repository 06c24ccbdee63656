"""Digests of the files of a save, computed while others of its files are still being written.

A file of arrays has its final name once it is complete: TensorStore writes it under another one,
which ends with `.__lock`, syncs it and renames it. It is not written to again; the folders above it
are renamed when the save is complete. So what is read here by a file's own name, which is random,
is looked up by that name and its size later, and the disk's waiting time is used.
"""

import concurrent.futures
import contextlib
import glob
import os
import threading

from etils import epath

from checkpointing import checksums

_LOCK = ".__lock"
_LEAST_BYTES = 2**20  # smaller files are read in no time, later
_PAUSE_SECONDS = 0.01


class Ahead:
  """Reads the files of one process from when they appear; a context manager, which ends that.

  A file that cannot be read, or is renamed at that moment, is left to be read later.
  """

  def __init__(self, making: epath.Path, process: int):
    """Takes the folder of the step (Orbax adds to its name) and the process that writes."""
    self._pattern = os.path.join(
      f"{glob.escape(str(making))}*", "*", f"ocdbt.process_{process}", "d", "*"
    )
    self._reading: dict[str, concurrent.futures.Future] = {}
    self._over = threading.Event()
    self._pool = concurrent.futures.ThreadPoolExecutor(checksums.THREADS)
    self._thread = threading.Thread(target=self._watch, name="digests")

  def __enter__(self) -> "Ahead":
    """Begins."""
    self._thread.start()
    return self

  def __exit__(self, *error) -> None:
    """Looks for no more files; what has been begun is read to its end."""
    self._over.set()
    self._thread.join()
    self._pool.shutdown(wait=False)

  def sha256(self, name: str, size: int) -> str:
    """Returns the digest of a file by its own name, "" where it was not read in this size."""
    if name not in self._reading:
      return ""
    with contextlib.suppress(OSError):
      found, value = self._reading[name].result()
      if found == size:
        return value
    return ""

  def _watch(self) -> None:
    while not self._over.wait(_PAUSE_SECONDS):
      for path in glob.iglob(self._pattern):
        name = os.path.basename(path)
        if name in self._reading or name.endswith(_LOCK):
          continue
        with contextlib.suppress(OSError):
          if os.path.getsize(path) >= _LEAST_BYTES:
            self._reading[name] = self._pool.submit(checksums.read_through, epath.Path(path))
