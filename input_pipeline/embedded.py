"""The data sets that need no download: Python's standard library, and scikit-learn's digits.

Their examples are in the order of a hash of their keys, as TensorFlow Datasets orders examples.
"""

import hashlib
import pathlib
import sysconfig
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from input_pipeline import catalog
from input_pipeline.shard_writer import Item

# Folders below the standard library's that are tests, or do not belong to it.
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
# Written when this Python was compiled: they would make the data set depend on the machine.
_WRITTEN_ON_BUILD = ("_sysconfigdata", "config-")
_TEST_SHARE = 0.05  # of the files of python_source
_HELD_OUT_EVERY = 6  # of the images of digits

Splits = Mapping[str, Mapping[str, Mapping[str, Any]]]  # split -> key -> feature -> value


def _python_source() -> Splits:
  """Returns the .py files of the running Python's standard library, without its tests."""
  root = pathlib.Path(sysconfig.get_path("stdlib"))
  found: dict[str, dict[str, dict[str, bytes]]] = {"train": {}, "test": {}}
  for path in sorted(root.rglob("*.py")):
    name = path.relative_to(root).as_posix()
    if _LEFT_OUT.isdisjoint(name.split("/")) and not name.startswith(_WRITTEN_ON_BUILD):
      digest = hashlib.sha256(name.encode()).digest()  # independent of the other files
      test = int.from_bytes(digest[:8], "big") < _TEST_SHARE * 2**64
      found["test" if test else "train"][name] = {"path": name, "text": path.read_bytes()}
  return found


def _digits() -> Splits:
  """Returns scikit-learn's 1,797 handwritten digits of 8 by 8 pixels, scaled to 0..255."""
  from sklearn import datasets  # takes longer to import than everything else here

  digits = datasets.load_digits()
  images = np.rint(digits.images * (255 / 16)).astype(np.uint8)[..., None]
  found: dict[str, dict[str, dict[str, Any]]] = {"train": {}, "test": {}}
  for number, (image, label) in enumerate(zip(images, digits.target.tolist(), strict=True)):
    split = "train" if number % _HELD_OUT_EVERY else "test"
    found[split][str(number)] = {"image": image, "label": label}
  return found


SETS: Mapping[str, Callable[[], Splits]] = {"python_source": _python_source, "digits": _digits}


def examples(reference: catalog.Reference, split: str) -> list[Item]:
  """Returns the examples of a split, or of slices in TFDS's notation.

  Raises:
    ValueError: there is no such split, or it is empty.
  """
  splits = SETS[reference.name]()
  sizes = {name: len(found) for name, found in splits.items()}
  parts = [(split, 0, sizes[split])] if split in sizes else _slices(reference, split, sizes)
  chosen = []
  for name, start, stop in parts:
    order = sorted(splits[name], key=lambda key: hashlib.md5(f"{name}{key}".encode()).digest())
    chosen += [splits[name][key] for key in order[start:stop]]
  if not chosen:
    raise ValueError(catalog.empty_split(reference, split, sizes))
  return [Item("record {}".format, number, value) for number, value in enumerate(chosen)]


def _slices(reference, split: str, sizes: Mapping[str, int]) -> list[tuple[str, int, int]]:
  """Returns (split, first example, the one after the last) of each slice."""
  from tensorflow_datasets import core  # whose notation it is

  infos = [core.SplitInfo(name=n, shard_lengths=[s], num_bytes=0) for n, s in sizes.items()]
  try:
    found = core.ReadInstruction.from_spec(split).to_absolute(core.SplitDict(infos))
  except (KeyError, ValueError, AssertionError) as error:
    raise ValueError(catalog.unknown_split(reference, split, sizes)) from error
  return [(one.splitname, one.from_, one.to) for one in found]
