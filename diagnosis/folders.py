"""Folders and buckets: written, read, renamed, and how their clock goes."""

import os
import pathlib
import secrets
import shutil
import time
from collections.abc import Iterator

import humanize
from etils import epath

from diagnosis.finding import Finding, ok, warning, wrong
from runtime import files

_LEAST_BYTES = 2**30
_CLOCK_SECONDS, _FAR_SECONDS = 5.0, 300.0
_CONTENT = b"meshwright doctor\n" * 4096


def existing(folder: epath.Path) -> epath.Path:
  """Returns a folder, or the nearest one above it that exists; a bucket's folder as it is."""
  if not files.is_local(folder):
    return folder
  path = pathlib.Path(folder).expanduser().absolute()
  return epath.Path(next(one for one in (path, *path.parents) if os.path.lexists(one)))


def check(folder: epath.Path, what: str, needed: int = _LEAST_BYTES) -> Iterator[Finding]:
  """Yields whether a folder can be used: writes, reads, renames and deletes a file there.

  A folder that does not exist is not made: the nearest one above is used.

  Args:
    folder: on a disk, or in a bucket.
    what: it is for, such as `workdir`.
    needed: bytes that should be free.
  """
  named = f"{what} {folder}"
  at, fix = existing(folder), f"choose another folder for the {what}, or its permissions"
  if files.is_local(at) and not at.is_dir():
    yield wrong(f"{named}: {at} is a file, not a folder", fix)
    return
  try:
    away = _use(at)
  except Exception as error:  # buckets' libraries raise errors of their own
    said = f"{type(error).__name__}: {error}"
    yield wrong(f"{named}: cannot be used ({said})", _advice(folder, error) or fix)
    return
  yield from space(at, named, needed)
  yield ok(f"{named}: written, read, renamed, deleted")
  yield from _clock(away, named)


def _use(at: epath.Path) -> float:
  """Writes, reads, renames and deletes a file; returns how far its time is ahead of ours.

  Raises:
    OSError: something of it fails.
  """
  token = secrets.token_hex(8)
  first, second = at / f".doctor-{token}", at / f".doctor-{token}-renamed"
  content = token.encode() + _CONTENT
  before = time.time()
  try:
    first.write_bytes(content)
    after = time.time()
    written = first.stat().mtime
    if first.read_bytes() != content:
      raise OSError(f"{first}: another content is read than was written")
    first.rename(second)
    if first.exists() or second.read_bytes() != content:
      raise OSError(f"{first}: is still there after it was renamed, or its content is another")
  finally:
    for path in (first, second):
      path.unlink(missing_ok=True)
  written = written.timestamp() if hasattr(written, "timestamp") else float(written)
  return written - min(max(written, before), after)


def space(at: epath.Path, named: str, needed: int) -> Iterator[Finding]:
  """Yields a finding where a folder's disk has less space than needed; nothing of a bucket.

  Args:
    at: exists.
    named: how the finding calls it.
    needed: bytes.
  """
  if not files.is_local(at):
    return
  free = shutil.disk_usage(at).free
  if free < needed:
    texts = (humanize.naturalsize(n, binary=True) for n in (free, needed))
    yield wrong(
      "{}: {} free, and {} should be".format(named, *texts), "free some space, or use another disk"
    )


def _clock(away: float, named: str) -> Iterator[Finding]:
  text = f"{named}: its clock is {abs(away):.0f} s {'ahead of' if away > 0 else 'behind'} this one"
  if abs(away) > _FAR_SECONDS:
    yield wrong(text, "synchronize the clocks (NTP): certificates and tokens are refused so")
  elif abs(away) > _CLOCK_SECONDS:
    yield warning(text, "synchronize the clocks (NTP); times of files and logs do not agree")


def _advice(folder: epath.Path, error: Exception) -> str:
  """Returns the fix for a bucket; "" for a folder."""
  if files.is_local(folder):
    return ""
  if missing := files.missing_library(folder):
    return f"{missing[1]}: small files of a run go through {missing[0]}"
  return (
    "check that the bucket exists and that the credentials may write to it (gs://: gcloud auth "
    "application-default login, or the machine's service account)"
  )
