"""JAX's cache of compiled programs, whose entries a kill may cut short.

JAX writes an entry in place. Where the process is killed meanwhile, or the disk is full, a part of
it stays; every later start fails to read it, warns, compiles, and leaves it there, because JAX
never replaces an entry. Looking through all entries at each start would cost more than it is worth,
and how JAX writes is its own affair. So when JAX says that it could not read one, and before it
compiles, the entries that are not whole are removed: then JAX writes a whole one.
"""

import sys
import time
import warnings
import zlib

import jax
from etils import epath

from runtime import files

try:  # as JAX chooses
  from compression import zstd  # Python 3.14
except ImportError:
  try:
    import zstandard as zstd
  except ImportError:
    zstd = None

# What JAX warns with, of its public category UserWarning, and how it names an entry's file.
_READING = "Error reading persistent compilation cache entry"
_ENTRIES = "*-cache"
_ZSTD_BEGINS = bytes.fromhex("28b52ffd")
# Another process may just be writing an entry: for so long it must not change.
_SETTLED_SECONDS = 1.0
_MOST_BYTES = 2**32  # of an entry


def use(folder: str) -> None:
  """Makes JAX keep compiled programs in a folder, and repairs it when an entry cannot be read.

  Args:
    folder: of this machine or shared; `~` stands for the home.

  Raises:
    ValueError: something else stands there.
  """
  path = epath.Path(folder).expanduser()
  if path.exists() and not path.is_dir():
    raise ValueError(f"compilation_cache_dir={folder}: it is no folder; name another one")
  jax.config.update("jax_compilation_cache_dir", str(path))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
  warnings.filterwarnings("always", message=_READING)
  before = warnings.showwarning

  def show(message, category, filename, lineno, file=None, line=None) -> None:
    if not (str(message).startswith(_READING) and _repair(path)):
      before(message, category, filename, lineno, file, line)

  warnings.showwarning = show


def _repair(folder: epath.Path) -> bool:
  """Removes the entries that are not whole; returns whether there were any."""
  torn = {path: content for path in folder.glob(_ENTRIES) if (content := _torn(path)) is not None}
  if not torn:
    return False
  time.sleep(_SETTLED_SECONDS)
  removed = []
  for path, content in torn.items():
    if _torn(path) == content:
      try:
        path.unlink()
      except OSError:  # another process of this run, which has seen the same, was faster
        continue
      removed.append(path.name.partition("-")[0])  # the function's name, without the key
  if removed:
    entries = "entry" if len(removed) == 1 else "entries"
    print(
      f"WARNING: removed {len(removed)} {entries} of the compilation cache {folder} that a kill or "
      f"a full disk has cut short: {', '.join(sorted(removed))}; compiling again",
      file=sys.stderr,
      flush=True,
    )
  return True


def _torn(path: epath.Path) -> bytes | None:
  """Returns the content of an entry that is not whole, else None."""
  try:
    content = files.read_bytes(path, most_bytes=_MOST_BYTES, follow=True)
  except OSError:  # gone meanwhile, or no plain file
    return None
  decompress, error = zlib.decompress, zlib.error
  if zstd is not None and content.startswith(_ZSTD_BEGINS):
    decompress, error = zstd.decompress, zstd.ZstdError
  try:
    decompress(content)
  except error:
    return content
  return None
