"""What can happen to a small file: its content is damaged, or something else is in its place."""

import json
import os
import pathlib
import random
from collections.abc import Callable

from tests.training.checkpointing.damage import cut, delete, empty, flip

Harm = Callable[[pathlib.Path, random.Random], str]  # returns what was done


def written(*contents: bytes) -> Harm:
  """Returns the harm of another content: one of these."""

  def harm(path: pathlib.Path, chance: random.Random) -> str:
    content = chance.choice(contents)
    path.write_bytes(content)
    return f"says {content[:20]!r}"

  return harm


def overwritten(most: int, drawn: Callable[[random.Random, int], bytes], what: str) -> Harm:
  """Returns the harm of other bytes in a part of at most so many, as a power cut may leave."""

  def harm(path: pathlib.Path, chance: random.Random) -> str:
    content = bytearray(path.read_bytes())
    start = chance.randrange(len(content))
    size = min(chance.randint(1, most), len(content) - start)
    content[start : start + size] = drawn(chance, size)
    path.write_bytes(content)
    return f"{size} {what} at {start}"

  return harm


def replaced(put: Callable[[pathlib.Path], object], what: str) -> Harm:
  """Returns the harm of something else in a file's place."""

  def harm(path: pathlib.Path, chance: random.Random) -> str:
    path.unlink(missing_ok=True)
    put(path)
    return what

  return harm


def another_value(path: pathlib.Path, chance: random.Random) -> str:
  """Replaces one value of JSON by another; cuts what is no JSON."""
  try:
    found = json.loads(path.read_text())
    key = chance.choice(sorted(found))
  except (ValueError, TypeError, IndexError):
    return cut(path, chance)
  values = (None, -1, 1e308, [], {}, "\x1b[31m", "x" * 9999, True, [[[]]], "../x")
  found[key] = chance.choice(values)
  path.write_text(json.dumps(found))
  return f"another value of {key!r}"


def lines_inserted(path: pathlib.Path, chance: random.Random) -> str:
  """Inserts lines that no run writes."""
  lines = path.read_bytes().splitlines(keepends=True)
  bad = (b"\n", bytes(99) + b"\n", b"\xff\xfe\x80\n", b'{"loss": 1.5}\n', b"7\n", b'{"step": 3, "l')
  inserted = chance.sample(bad, chance.randint(1, len(bad)))
  for line in inserted:
    lines.insert(chance.randrange(len(lines)), line)
  path.write_bytes(b"".join(lines))
  return f"{len(inserted)} lines inserted"


def sparse(path: pathlib.Path, chance: random.Random) -> str:
  """Makes a file claim to be four terabytes."""
  path.touch()
  os.truncate(path, 2**42)
  return "four terabytes, sparse"


def link(path: pathlib.Path, chance: random.Random) -> str:
  """Moves a file to beside the run or its data, and links to it."""
  top = next(one for one in path.parents if one.name in ("run", "data"))
  elsewhere = top.with_name("elsewhere")
  if path.exists():
    path.rename(elsewhere)
  else:
    elsewhere.write_text("kept\n")
  path.symlink_to(elsewhere)
  return "a symbolic link"


def _device(path: pathlib.Path) -> None:
  try:
    os.mknod(path, 0o020600, os.makedev(1, 5))
  except PermissionError:
    path.symlink_to("/dev/zero")


nested = written(b"[" * 100_000)
another_form = written(b'["a", "list"]', b"17", b"{}", b'{"step": "three"}', b"null")
nuls = overwritten(600, lambda chance, size: bytes(size), "NULs")
# No digits or letters: a number that has changed cannot be told from another.
noise = overwritten(
  99, lambda chance, size: bytes(byte | 128 for byte in chance.randbytes(size)), "random bytes"
)
directory = replaced(lambda path: (path / "inside").mkdir(parents=True), "a directory")
fifo = replaced(os.mkfifo, "a FIFO")
device = replaced(_device, "a device without an end")
loop = replaced(lambda path: path.symlink_to(path.parent), "a link to its own folder")

CONTENT = (empty, delete, cut, nuls, noise, nested, another_form)
PLACE = (directory, fifo, sparse, link)
# Of what a person, a script or a broken disk may do to a file of a workdir, by name.
HARMS: dict[str, Harm] = {
  "cut short": cut,
  "a bit flipped": flip,
  "a folder in its place": directory,
  "another value": another_value,
  "deleted": delete,
  "empty": empty,
  "NULs": written(b"\0" * 4096),
  "nested deep": nested,
  "escape sequences": written(b'{"\x1b]0;title\x07": "\x1b[2J"}\n'),
  "null": written(b"null\n"),
}
