"""What can happen to the files of a checkpoint, by the class of file."""

import os
import pathlib
import random
from collections.abc import Callable

# What a step's folder consists of, whichever processes wrote it; long names in it are random.
CLASSES = (
  "commit_success.txt",
  "_CHECKPOINT_METADATA",
  "digests",
  "config/metadata",
  "config/commit_success.txt",
  "record/metadata",
  "record/commit_success.txt",
  "state/commit_success.txt",
  "state/_METADATA",
  "state/_sharding",
  "state/manifest.ocdbt",
  "state/d/*",
  "state/ocdbt.process_*/manifest.ocdbt",
  "state/ocdbt.process_*/d/*",
)


def delete(path: pathlib.Path, chance: random.Random) -> str:
  """Deletes a file; returns what was done."""
  del chance
  path.unlink()
  return "deleted"


def empty(path: pathlib.Path, chance: random.Random) -> str:
  """Cuts a file to nothing."""
  del chance
  os.truncate(path, 0)
  return "cut to nothing"


def cut(path: pathlib.Path, chance: random.Random) -> str:
  """Cuts a file short."""
  size = chance.randrange(path.stat().st_size)
  os.truncate(path, size)
  return f"cut to {size} bytes"


def flip(path: pathlib.Path, chance: random.Random) -> str:
  """Flips a bit of a file."""
  content = bytearray(path.read_bytes())
  byte, bit = chance.randrange(len(content)), chance.randrange(8)
  content[byte] ^= 1 << bit
  path.write_bytes(content)
  return f"bit {bit} of byte {byte} flipped"


DAMAGES: tuple[Callable[[pathlib.Path, random.Random], str], ...] = (delete, empty, cut, flip)


def files(step: pathlib.Path, name: str) -> list[pathlib.Path]:
  """Returns the files of a class in a step's folder, in order of their names."""
  return sorted(step.glob(name))


def harm(step: pathlib.Path, name: str, damage: Callable, chance: random.Random) -> str:
  """Damages one file of a class; returns what was done."""
  path = chance.choice(files(step, name))
  return f"{path.relative_to(step)}: {damage(path, chance)}"
