"""A split of a TFDS data set, by its name, as one shard of the store: of text or of images.

An image is a document: its pixels, and then the label as four bytes (int32, little-endian). With
bytes that are concatenated, a document without text is kept as its end.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from etils import epath

from input_pipeline import catalog, store
from input_pipeline.text import tokenizer

LABEL_BYTES = 4


def prepare(data: Any, split: str, tick: Callable = store.no_tick) -> tuple[store.Prepared, str]:
  """Returns the documents of a split and its name; stores them first if they are not there.

  Args:
    data: the config's `data` section, with `kind`, how its rows are read: text or image.
    split: of the data set, or a slice of one in TFDS's notation.
    tick: called often while something is written, with what is counted, how many so far, and a line
      about it. What it raises ends the preparation, which leaves nothing behind.

  Raises:
    ValueError: whatever makes the data set unusable, with the fix.
  """
  reference, root = catalog.parse_name(data.name), catalog.data_folder(data)
  images = data.kind == "image"
  encoder = tokenizer.load(tokenizer.BYTES if images else tokenizer.resolve(data))
  keeps_empty = not images and encoder.name == tokenizer.BYTES and data.packing == "concatenate"
  roles = ("image", "label") if images else ("text",)
  asked = {role: data[f"{role}_feature"] for role in roles}
  known = catalog.embedded_reference(reference)
  features = {}
  if known is not None:
    embedded = catalog.EMBEDDED[known.name].features
    features = {
      r: embedded[r] for r in roles if asked[r] in ("", embedded.get(r)) and r in embedded
    }
  folder = (
    _folder(data, encoder, known, split, features, keeps_empty)
    if len(features) == len(roles)
    else None
  )
  builder = None
  if folder is None or not store.is_there(folder):
    # Importing TFDS takes longer than all else here.
    from input_pipeline import shard_writer, tfds

    with shard_writer.writing_to(root):
      builder = tfds.load_builder(reference, root, tick)
    tfds.check_split(builder, split)
    features = {role: tfds.choose_feature(builder, role, asked[role]) for role in roles}
    known = tfds.full_reference(builder)
    folder = _folder(data, encoder, known, split, features, keeps_empty)
    with shard_writer.writing_to(folder.parent):
      tfds.fill(folder, builder, split, features, encoder, data, tick, keep_empty=keeps_empty)
  name = f"{known} {split}"
  prepared = store.open_prepared(folder.parent, [folder.name], encoder, name, data.max_bad_records)
  if builder is not None:
    _check_count(prepared, builder.info.splits[split].num_examples, name, folder)
  return prepared, name


def _folder(
  data, encoder, reference, split, features: Mapping[str, str], keeps_empty: bool
) -> epath.Path:
  """Returns the folder of the shard."""
  facts = [str(reference), split]
  if data.kind == "image":
    facts.append("images")
  elif keeps_empty:
    facts.append("empty documents too")
  shard = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]
  kind = store.folder_of(data, encoder, "-".join(features.values()))
  return kind / f"{reference.name}-{shard}"


def _check_count(prepared: store.Prepared, stored: int, name: str, shard: epath.Path) -> None:
  there = len(prepared.documents) + prepared.empty + prepared.bad_count
  if there != stored:
    raise ValueError(
      f"{name} has {stored} examples, but its tokens were made from {there}: the data set changed "
      f"under its version; {store.again(shard)}"
    )
