"""Damages files of records, as a failing disk does."""

import os
import pathlib
import random
import shutil
from collections.abc import Iterable

import numpy as np

from input_pipeline import row_source, source, store, tfds_documents

ROWS, LENGTH, IMAGES = 67, 16, 41  # of the data sets of noise
# Of Riegeli, which ArrayRecord is made of: the header of each block stands amid what is written.
BLOCK, HEADER = 2**16, 24
BAD = (0, 7, 8, 30, ROWS - 1)
BAD_IMAGES = (2, 3, 19)


def flip(
  path: pathlib.Path,
  contents: Iterable[bytes],
  *,
  silently: bool = False,
  chance: random.Random | None = None,
) -> None:
  """Flips a bit of each record of a file, whose bytes must stand in it once.

  Args:
    path: of the file.
    contents: the records' bytes, as they stand in the file.
    silently: the file keeps its time of change.
    chance: chooses the bit; without it, it is one in the middle.
  """
  stat = os.stat(path)
  whole = path.read_bytes()
  blocks = (whole[start + HEADER : start + BLOCK] for start in range(0, len(whole), BLOCK))
  joined = b"".join(blocks)
  with path.open("r+b") as file:  # in place: somebody may be reading it
    for record in contents:
      assert joined.count(record) == 1, f"{joined.count(record)} times in the file"
      place, bit = (
        (chance.randrange(len(record)), chance.randrange(8)) if chance else (len(record) // 2, 2)
      )
      block, place = divmod(joined.index(record) + place, BLOCK - HEADER)
      place += block * BLOCK + HEADER
      file.seek(place)
      file.write(bytes([whole[place] ^ 1 << bit]))
  # A clock may be too coarse to tell this change from the one before.
  later = stat.st_mtime_ns + (0 if silently else 10**7)
  os.utime(path, ns=(stat.st_atime_ns, later))


def opened(data, sharing=None):
  """Returns the source of the split `train`."""
  return row_source.open_source(data, "train", 0, sharing)


def damage(data, bad: Iterable[int]) -> dict[str, np.ndarray]:
  """Damages rows of a prepared store that has no bad ones; returns all rows as they were."""
  sound = data.copy_and_resolve_references()
  sound.max_bad_records = 0
  rows = opened(sound)
  whole = rows.read(np.arange(len(rows)))
  damage_more(sound, *bad)
  return whole


def damage_more(data, *rows: int, silently: bool = False) -> None:
  """Damages rows of a prepared store in which others may be bad; each row is a document."""
  prepared = prepared_of(data)
  sound = data.copy_and_resolve_references()
  sound.max_bad_records = prepared.bad_count
  read = opened(sound).read(np.array(rows))
  if data.kind == "image":
    stored = np.rint(read["inputs"] * 255).astype(np.uint8)
  else:
    stored = read["targets"].astype(np.uint8)
  path = pathlib.Path(prepared.documents.shards[0].folder) / store.TOKENS
  flip(path, [row.tobytes() for row in stored], silently=silently)


def prepared_of(data) -> store.Prepared:
  """Returns what is stored of a data set's split `train`."""
  tolerant = data.copy_and_resolve_references()
  tolerant.max_bad_records = 10**6
  return tfds_documents.prepare(tolerant, "train")[0]


def shard_of(data) -> pathlib.Path:
  """Returns the folder of its only shard."""
  return pathlib.Path(prepared_of(data).documents.shards[0].folder)


def damage_data_set(folder: pathlib.Path, name: str, contents: Iterable[bytes]) -> None:
  """Damages records of a TFDS data set, and removes the rows that were made of it."""
  (path,) = (folder / name / "1.2.0").glob("*train.array_record*")
  flip(path, contents)
  shutil.rmtree(folder / "prepared")


def is_without(rows: source.Source, bad: tuple[int, ...], whole: dict[str, np.ndarray]) -> None:
  """Checks that the bad rows of a source are zeros, and all others as they were."""
  assert rows.bad.rows == tuple(bad)
  found = rows.read(np.arange(len(rows)))
  good = ~np.isin(np.arange(len(rows)), bad)
  assert found.keys() == whole.keys()
  for field, array in found.items():
    assert array.dtype == whole[field].dtype
    np.testing.assert_array_equal(array[good], whole[field][good])
    assert not array[~good].any()
  some = np.array([bad[-1], 1, bad[0], 1])
  np.testing.assert_array_equal(rows.read(some)["weights"], found["weights"][some])
