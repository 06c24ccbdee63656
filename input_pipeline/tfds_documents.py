"""A split of a TFDS data set, by its name, as one shard of the store: of text or of images.

An image is a document: its pixels, and then the label as four bytes (int32, little-endian). With
bytes that are concatenated, a document without text is kept as its end.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath, epy

from input_pipeline import catalog, store
from input_pipeline.text import tokenizer

with epy.lazy_imports():  # TFDS takes seconds; what is stored needs none of them
  from input_pipeline import embedded, shard_writer, tfds

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
  known, images = catalog.embedded_reference(catalog.parse_name(data.name)), data.kind == "image"
  roles = ("image", "label") if images else ("text",)
  encoder = tokenizer.load(tokenizer.BYTES if images else tokenizer.resolve(data))
  keeps_empty = not images and encoder.name == tokenizer.BYTES and data.packing == "concatenate"
  folder = None
  if known is not None:
    features = _embedded_features(data, known, roles)
    folder = _folder(data, encoder, known, split, features, keeps_empty)
  stored = None
  if folder is None or not store.is_there(folder):
    with shard_writer.writing_to(catalog.data_folder(data)):
      known, features, found, stored = _open_split(data, split, roles)
    folder = _folder(data, encoder, known, split, features, keeps_empty)
    name = f"data set {known}, split {split}"
    facts, count = {"files": name, "features": features}, _counting(data, stored, tick)
    with shard_writer.writing_to(folder.parent), _once(folder, name, data.max_bad_records) as here:
      if here and images:
        _write_images(folder, found, encoder, {**facts, "name": name}, data.max_bad_records, count)
      elif here:
        shard_writer.write_documents(
          *(folder, _texts(found, features["text"]), encoder, facts),
          **{"limit": data.max_bad_records, "keep_empty": keeps_empty, "tick": count},
        )
  name = f"{known} {split}"
  prepared = store.open_prepared(folder.parent, [folder.name], encoder, name, data.max_bad_records)
  if stored is not None:
    _check_count(prepared, stored, name, folder)
  return prepared, name


def texts(data: Any, split: str, bad: Callable[["shard_writer.Item"], None]) -> Iterator[bytes]:
  """Yields the texts of a split, which need not be prepared.

  Args:
    data: the config's `data` section.
    split: of the data set.
    bad: is called with each record that cannot be read; raises where that is too much.
  """
  _, features, found, _ = _open_split(data, split, ("text",))
  for item in _texts(found, features["text"]):
    if item.value is None:
      bad(item)
    else:
      yield item.value


def _embedded_features(data: Any, known: catalog.Reference, roles: Sequence[str]) -> dict[str, str]:
  return {role: catalog.embedded_feature(known, role, data[f"{role}_feature"]) for role in roles}


def _open_split(data: Any, split: str, roles: Sequence[str]) -> tuple:
  """Returns what `tfds.open_split` does, of an embedded data set too."""
  reference = catalog.parse_name(data.name)
  known = catalog.embedded_reference(reference)
  if known is None or not catalog.is_made_here(known):
    asked = {role: data[f"{role}_feature"] for role in roles}
    return tfds.open_split(reference, catalog.data_folder(data), split, asked)
  found = embedded.examples(known, split)
  return known, _embedded_features(data, known, roles), found, len(found)


def _counting(data: Any, total: int, tick: Callable) -> Callable[[int, int, int], None]:
  """Returns the tick of a shard's writer."""
  what = "images" if data.kind == "image" else "documents"
  return lambda documents, tokens, _: tick(
    what, documents, f"{documents:,} of {total:,} {what}, {tokens:,} tokens"
  )


@contextlib.contextmanager
def _once(folder: epath.Path, name: str, limit: int) -> Iterator[bool]:
  """Holds the lock of a shard; yields whether it is still to be written."""
  with shard_writer.locked(folder):
    folder.parent.mkdir(parents=True, exist_ok=True)
    shard_writer.remove_partial(folder.parent, folder.name)
    try:
      yield not store.is_there(folder)
    except shard_writer.TooManyBadError as error:
      raise ValueError(store.too_many_bad(name, error.bad, error.count, limit)) from error


def _write_images(folder, read: Iterable["shard_writer.Item"], encoder, facts, limit, tick) -> None:
  """Writes images, all of one shape, as a shard that says which shape and labels they have."""
  name, features = facts["files"], facts["features"]

  def fill(shard: "shard_writer.ShardWriter") -> Mapping[str, Any]:
    shape, labels = None, []
    for item in read:
      if item.value is None:
        shard.add_bad(item, item.why)
        continue
      image, label = (np.asarray(item.value[features[role]]) for role in ("image", "label"))
      if image.dtype != np.uint8:
        raise ValueError(f"{name}: the pixels are {image.dtype}, and only uint8 (0..255) is read")
      shape = shape or image.shape
      if image.shape != shape:
        shard.add_bad(
          item,
          f"it has shape {image.shape}, but the first image has {shape}; all images must have one"
          " shape; scale them in your own data set",
        )
        continue
      content = image.tobytes() + np.int32(label).astype("<i4").tobytes()
      shard.add(np.frombuffer(content, np.uint8), len(content), shard_writer.content_hash(content))
      labels.append(int(label))
    if not labels:
      raise ValueError(f"{name} is empty: {shard.bad_count} images, none of which can be read")
    return {"shape": [*shape], "labels": [min(labels), max(labels)]}

  shard_writer.write_shard(
    folder, encoder.size, {"tokenizer": encoder.digest, **facts}, fill, limit, tick
  )


def _texts(found: Iterable["shard_writer.Item"], feature: str) -> Iterator["shard_writer.Item"]:
  for item in found:
    if item.value is not None:
      text = item.value[feature]
      item.value = text.encode() if isinstance(text, str) else bytes(text)
    yield item


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
