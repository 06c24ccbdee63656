"""Digests of the files of a save, computed while other files are still being written.

TensorStore appends to a file of arrays until it has its final size, and never writes to it again:
some files under a name that ends with `.__lock`, others under their own. So a file is read once its
size has stopped growing, and its digest counts only where as many bytes were read as the file has
in the end; else the file is read again, later. Digests are looked up by the file's random name,
since the folders above it are renamed when the save is complete. This uses the time in which the
save waits for the disk.
"""

import concurrent.futures
import contextlib
import glob
import os
import threading

from etils import epath

from checkpointing import checksums

_LOCK = ".__lock"
_LEAST_BYTES = 2**20  # smaller files are read quickly, later
_PAUSE_SECONDS = 0.01


class Ahead:
  """A context manager that reads the files of one process as they appear.

  A file that cannot be read, or is renamed at that moment, is left for later.
  """

  def __init__(self, making: epath.Path, process: int):
    """Takes the folder of the step (Orbax adds to its name) and the process that writes."""
    self._pattern = os.path.join(
      f"{glob.escape(str(making))}*", "*", f"ocdbt.process_{process}", "d", "*"
    )
    self._reading: dict[str, concurrent.futures.Future] = {}
    self._sizes: dict[str, int] = {}  # at the last look
    self._over = threading.Event()
    self._pool = concurrent.futures.ThreadPoolExecutor(checksums.THREADS)
    self._thread = threading.Thread(target=self._watch, name="digests")

  def __enter__(self) -> "Ahead":
    """Begins."""
    self._thread.start()
    return self

  def __exit__(self, *error) -> None:
    """Stops looking for files; finishes those being read."""
    self._over.set()
    self._thread.join()
    self._pool.shutdown(wait=False)

  def sha256(self, name: str, size: int) -> str:
    """Returns the digest of a file by its name; "" if it was not read with this size."""
    if name not in self._reading:
      return ""
    with contextlib.suppress(OSError):
      found, value = self._reading[name].result()
      if found == size:
        return value
    return ""

  def _watch(self) -> None:
    while not self._over.wait(_PAUSE_SECONDS):
      self._look()

  def _look(self) -> None:
    """Begins to read the files that have not grown since the last look."""
    for path in glob.iglob(self._pattern):
      name = os.path.basename(path)
      if name in self._reading or name.endswith(_LOCK):
        continue
      with contextlib.suppress(OSError):
        before, self._sizes[name] = self._sizes.get(name), os.path.getsize(path)
        if before == self._sizes[name] >= _LEAST_BYTES:
          self._reading[name] = self._pool.submit(checksums.read_through, epath.Path(path))
