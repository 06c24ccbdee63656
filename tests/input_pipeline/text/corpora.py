"""Folders of text, and the config's `data` section that reads them."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from configs.schema import recipes


def section(folder: pathlib.Path, data_dir: pathlib.Path, **changes: Any) -> ConfigDict:
  """Returns the finalized `data` section of text in a folder, of 32 tokens a row."""
  keys = dict(recipes.lm().data) | {
    "name": "text",
    "kind": "text",
    "files": str(folder),
    "data_dir": str(data_dir),
    "sequence_length": 32,
    "tokenizer": "bytes",
    "packing": "best_fit",
    "prepare_processes": 1,
  }
  return ConfigDict(keys | changes)


def texts(count: int, seed: int = 0, longest: int = 90) -> list[str]:
  """Returns documents of ASCII and other characters, none equal to another."""
  draw = np.random.default_rng(seed)
  letters = np.array(list("abcdefgh ijkäö€\n"))
  sizes = draw.integers(1, longest, count)
  return [f"{i} " + "".join(draw.choice(letters, size)) for i, size in enumerate(sizes)]


def write_lines(path: pathlib.Path, documents: Sequence[str]) -> pathlib.Path:
  """Writes documents to a .jsonl file."""
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
  return path


def mixture(folder: pathlib.Path) -> list[str]:
  """Writes two sources; returns the flags that mix them, and that name where tokens are stored."""
  write_lines(folder / "web.jsonl", texts(200))
  write_lines(folder / "code.jsonl", texts(100, seed=1, longest=30))
  sources = tuple(
    {"name": name, "files": f"{folder}/{name}.jsonl", "weight": weight, "maximum_epochs": 0}
    for name, weight in (("web", 0.7), ("code", 0.3))
  )
  return [f"--config.data.sources={sources!r}", f"--config.data.data_dir={folder}/data"]
