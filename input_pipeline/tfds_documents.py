"""A split of a TFDS data set, by its name, as one shard of the store: of text or of images.

An image is a document: its pixels, and then the label as four bytes (int32, little-endian). With
bytes that are concatenated, a document without text is kept as its end.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
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
  roles = ("image", "label") if images else ("text",)
  asked = {role: data[f"{role}_feature"] for role in roles}
  known = catalog.embedded_reference(reference)
  features = {}
  if known is not None:
    embedded = catalog.EMBEDDED[known.name].features
    features = {
      r: embedded[r] for r in roles if asked[r] in ("", embedded.get(r)) and r in embedded
    }
  folder = _folder(data, encoder, known, split, features) if len(features) == len(roles) else None
  builder = None
  if folder is None or not store.is_there(folder):
    # Importing TFDS takes longer than all else here.
    from input_pipeline import tfds

    with store.writing_to(root):
      builder = tfds.load_builder(reference, root, tick)
    tfds.check_split(builder, split)
    features = {role: tfds.choose_feature(builder, role, asked[role]) for role in roles}
    known = tfds.full_reference(builder)
    folder = _folder(data, encoder, known, split, features)
    with store.writing_to(folder.parent):
      _fill(folder, builder, split, features, encoder, data, tick)
  name = f"{known} {split}"
  prepared = store.open_prepared(folder.parent, [folder.name], encoder, name, data.max_bad_records)
  if builder is not None:
    _check_count(prepared, builder.info.splits[split].num_examples, name, folder)
  return prepared, name


def _keeps_empty(data: Any, encoder: tokenizer.Tokenizer) -> bool:
  return encoder.name == tokenizer.BYTES and data.packing == "concatenate"


def _folder(data, encoder, reference, split, features: Mapping[str, str]) -> epath.Path:
  """Returns the folder of the shard."""
  facts = [str(reference), split]
  if data.kind == "image":
    facts.append("images")
  elif _keeps_empty(data, encoder):
    facts.append("empty documents too")
  shard = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]
  kind = store.folder_of(data, encoder, "-".join(features.values()))
  return kind / f"{reference.name}-{shard}"


def _fill(folder, builder, split, features, encoder, data, tick) -> None:
  from input_pipeline import tfds

  name = f"data set {tfds.full_reference(builder)}, split {split}"
  examples = builder.info.splits[split].num_examples
  what = "images" if data.kind == "image" else "documents"

  def count(documents: int, tokens: int, _: int) -> None:
    tick(what, documents, f"{documents:,} of {examples:,} {what}, {tokens:,} tokens")

  with store.locked(folder):
    if store.is_there(folder):
      return
    folder.parent.mkdir(parents=True, exist_ok=True)
    store.remove_partial(folder.parent, folder.name)
    facts, limit = {"files": name, "features": features}, data.max_bad_records
    try:
      if data.kind == "image":
        found = _examples(builder, split, lambda example: example)
        _write_images(folder, found, features, encoder, {**facts, "name": name}, limit, count)
      else:
        found = _texts(builder, split, features["text"])
        keep_empty = _keeps_empty(data, encoder)
        store.write_documents(
          folder, found, encoder, facts, limit=limit, keep_empty=keep_empty, tick=count
        )
    except store.TooManyBadError as error:
      raise ValueError(store.too_many_bad(name, error.bad, error.count, limit)) from error


def _write_images(
  folder, read: Iterable[store.Item], features, encoder, facts, limit, tick
) -> None:
  """Writes images, all of one shape, as a shard that says which shape and labels they have."""
  name = facts["files"]

  def fill(shard: store.ShardWriter) -> Mapping[str, Any]:
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
      shard.add(np.frombuffer(content, np.uint8), len(content), store.content_hash(content))
      labels.append(int(label))
    if not labels:
      raise ValueError(f"{name} is empty: {shard.bad_count} images, none of which can be read")
    return {"shape": [*shape], "labels": [min(labels), max(labels)]}

  store.write_shard(folder, encoder.size, {"tokenizer": encoder.digest, **facts}, fill, limit, tick)


def texts(
  data: Any, split: str, bad: Callable[[store.Item], None], tick: Callable = store.no_tick
) -> Iterator[bytes]:
  """Yields the texts of a split, which need not be prepared.

  Args:
    data: the config's `data` section.
    split: of the data set.
    bad: is called with each record that cannot be read; raises where that is too much.
    tick: as of `prepare`, whose errors it raises too.
  """
  from input_pipeline import tfds

  builder = tfds.load_builder(catalog.parse_name(data.name), catalog.data_folder(data), tick)
  tfds.check_split(builder, split)
  for item in _texts(builder, split, tfds.choose_feature(builder, "text", data.text_feature)):
    if item.value is None:
      bad(item)
    else:
      yield item.value


def _texts(builder, split: str, feature: str) -> Iterator[store.Item]:
  def content(example):
    text = example[feature]
    return text.encode() if isinstance(text, str) else bytes(text)

  return _examples(builder, split, content)


def _examples(builder, split: str, content: Callable) -> Iterator[store.Item]:
  """Yields what `content` makes of the examples of a split, in its order."""
  from input_pipeline import tfds

  whys: dict[int, str] = {}
  for number, example in tfds.examples(builder, split, whys.__setitem__):
    value = None if example is None else content(example)
    yield store.Item("record {}".format, number, value, whys.get(number, ""))


def _check_count(prepared: store.Prepared, stored: int, name: str, shard: epath.Path) -> None:
  there = len(prepared.documents) + prepared.empty + prepared.bad_count
  if there != stored:
    raise ValueError(
      f"{name} has {stored} examples, but its tokens were made from {there}: the data set changed "
      f"under its version; {store.again(shard)}"
    )
