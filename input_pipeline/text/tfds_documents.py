"""The documents of a TFDS data set with text, by its name, as one shard of the store."""

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

from etils import epath

from input_pipeline.file_lock import locked
from input_pipeline.sources import catalog
from input_pipeline.text import documents, preparation, shard_writer, store, tokenizer, worker


def prepare(
  data: Any, split: str, tick: Callable = preparation.no_tick
) -> tuple[preparation.Prepared, str]:
  """Returns the documents of a split and its name; tokenizes them first if they are not stored.

  Args:
    data: the config's `data` section.
    split: of the data set, or a slice of one in TFDS's notation.
    tick: as of `preparation.prepare`.

  Raises:
    ValueError: whatever makes the data set unusable, with the way out.
  """
  reference, root = catalog.parse_name(data.name), catalog.data_folder(data)
  encoder = tokenizer.load(tokenizer.resolve(data))
  known = catalog.embedded_reference(reference)
  builder = None
  if known is not None and data.text_feature in ("", catalog.EMBEDDED[known.name].features["text"]):
    reference, feature = known, catalog.EMBEDDED[known.name].features["text"]
    folder, shard = _place(data, encoder, reference, split, feature)
  if known is None or not store.is_there(folder / shard):
    # Importing TFDS takes longer than all else here.
    from input_pipeline.sources import tfds

    builder = tfds.load_builder(reference, root, tick)
    tfds.check_split(builder, split)
    feature = tfds.choose_feature(builder, "text", data.text_feature)
    reference = tfds.full_reference(builder)
    folder, shard = _place(data, encoder, reference, split, feature)
    with preparation.writing_to(folder):
      _fill(folder, shard, builder, split, feature, encoder, data.max_bad_records, tick)
  name = f"{reference} {split}"
  prepared = preparation.opened(folder, [shard], encoder, name, data.max_bad_records)
  if builder is not None:
    _check_count(prepared, builder.info.splits[split].num_examples, name, folder / shard)
  return prepared, name


def _place(data, encoder, reference, split, feature) -> tuple[epath.Path, str]:
  """Returns the folder of the shards, and the name of this one."""
  facts = json.dumps([str(reference), split])
  shard = f"{reference.name}-{hashlib.sha256(facts.encode()).hexdigest()[:24]}"
  return preparation.folder_of(data, encoder, feature), shard


def _fill(folder, shard, builder, split, feature, encoder, limit, tick) -> None:
  from input_pipeline.sources import tfds

  name = f"data set {tfds.full_reference(builder)}, split {split}"
  examples = builder.info.splits[split].num_examples
  done = [0, 0]

  def count(documents: int, tokens: int, size: int) -> None:
    del size
    done[:] = [done[0] + documents, done[1] + tokens]
    share = f"{done[0]:,} of {examples:,} documents, {done[1]:,} tokens"
    tick("documents", done[0], share)

  with locked(folder / shard):
    if store.is_there(folder / shard):
      return
    folder.mkdir(parents=True, exist_ok=True)
    try:
      read = _documents(builder, split, feature)
      facts = {"files": name, "feature": feature}
      worker.write(folder / shard, read, encoder, limit=limit, facts=facts, tick=count)
    except shard_writer.TooManyBadError as error:
      text = preparation.too_many_bad(name, error.bad, error.count, limit)
      raise ValueError(text) from error


def texts(
  data: Any,
  split: str,
  bad: Callable[[documents.Item], None],
  tick: Callable = preparation.no_tick,
) -> Iterator[bytes]:
  """Yields the texts of a split, which need not be prepared.

  Args:
    data: the config's `data` section.
    split: of the data set.
    bad: is called with each record that cannot be read; raises where that is too much.
    tick: as of `preparation.prepare`.

  Raises:
    ValueError: as of `prepare`.
  """
  from input_pipeline.sources import tfds  # slow to import

  builder = tfds.load_builder(catalog.parse_name(data.name), catalog.data_folder(data), tick)
  tfds.check_split(builder, split)
  feature = tfds.choose_feature(builder, "text", data.text_feature)
  for item in _documents(builder, split, feature):
    if item.text is None:
      bad(item)
    else:
      yield item.text


def _documents(builder, split: str, feature: str) -> Iterator[documents.Item]:
  from input_pipeline.sources import tfds

  whys: dict[int, str] = {}
  for number, example in tfds.examples(builder, split, whys.__setitem__):
    text = None
    if example is not None:
      text = example[feature]
      text = text.encode() if isinstance(text, str) else bytes(text)
    yield documents.Item("record {}".format, number, text, whys.get(number, ""))


def _check_count(prepared: preparation.Prepared, stored: int, name: str, shard: epath.Path) -> None:
  there = len(prepared.documents) + prepared.empty + prepared.bad_count
  if there != stored:
    raise ValueError(
      f"{name} has {stored} examples, but its tokens were made from {there}: the data set changed "
      f"under its version; {store.again(shard)}"
    )
