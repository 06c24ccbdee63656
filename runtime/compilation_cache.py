"""JAX's persistent compilation cache, without truncated entries.

JAX writes an entry in place (`LRUCache.put` of jax 0.10.2 and 0.12.0; see jax#39880 for other
consequences). If the process is killed while it writes, or the disk is full, a partial entry
remains. Every later start then fails to read it, warns, compiles, and leaves it, because JAX never
replaces an entry. So entries that were written since the last start are decompressed before JAX
reads them, and truncated ones are removed. In a bucket nothing is checked: objects appear complete.
"""

import contextlib
import os
import pathlib
import sys
import time
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

_ENTRIES = "-cache"  # ends the name of an entry's file
_CHECKED = ".checked"  # a file that is as old as the last check
# The clocks of machines that share the folder may differ by this much.
_SKEW_SECONDS = 60.0
# Another process may be writing an entry: it must not have changed for this long.
_SETTLED_SECONDS = 1.0
_ZSTD_BEGINS = bytes.fromhex("28b52ffd")
_MOST_BYTES = 2**32  # of an entry


def use(folder: str) -> None:
  """Makes JAX cache compiled programs in a folder, after removing truncated entries.

  Args:
    folder: of this machine or shared; `~` is the home folder.

  Raises:
    ValueError: the path is not a folder.
  """
  path = epath.Path(folder).expanduser()
  if path.exists() and not path.is_dir():
    raise ValueError(f"compilation_cache_dir={folder}: it is not a folder; name another one")
  if files.is_local(path) and path.exists() and os.access(path, os.W_OK):
    _repair(pathlib.Path(path))
  jax.config.update("jax_compilation_cache_dir", str(path))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def _repair(folder: pathlib.Path) -> None:
  """Removes truncated entries among those written since the last check."""
  checked = folder / _CHECKED
  since = checked.stat().st_mtime - _SKEW_SECONDS if checked.exists() else 0.0
  with contextlib.suppress(OSError):  # the disk is still full
    files.replace(checked, b"", shared=True)  # before the entries are listed: later ones come next
  entries = [path for path in folder.glob(f"*{_ENTRIES}") if _written(path) >= since]
  torn = {path: content for path in entries if (content := _torn(path)) is not None}
  if torn:
    time.sleep(_SETTLED_SECONDS)
  removed = []
  for path, content in torn.items():
    if _torn(path) == content:
      try:
        path.unlink()
      except OSError:  # another process of this run has removed it
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


def _written(path: pathlib.Path) -> float:
  try:
    return path.stat().st_mtime
  except OSError:  # gone meanwhile
    return -1.0


def _torn(path: pathlib.Path) -> bytes | None:
  """Returns the content of a truncated entry, else None."""
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
