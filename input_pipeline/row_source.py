"""Opens the data set that a config names: returns the Source of one of its splits."""

import dataclasses
import hashlib

import numpy as np

from input_pipeline import catalog, rows, store
from input_pipeline.source import Source
from runtime.extensions import Table, error_text

KINDS = ("text", "image", "random")  # of rows, that data sets can be read as
_ROWS_PER_READ = 1024

# name, as data.name gives it -> function of (the config's `data` section, split, seed), which
# returns a Source. Its `fingerprint` changes whenever a row does (`array_source` sees to that).
SOURCES: Table = Table("data source", {})


def open_source(data, split, seed, sharing=None, tick=store.no_tick):
  """Opens a split of the data set that the config names, and prepares it on first use.

  Args:
    data: the config's `data` section, with `kind`, how its rows are read: one of KINDS; a
      registered data source may have others.
    split: of a TFDS data set, its name or a slice. Of files, `train` or `test`: the documents that
      are held out (of a single text file its end), or those of data.evaluation_files.
    seed: int; of "random_normal" all follows from it; of text, which documents share a row of the
      split that is trained on.
    sharing: the processes that open it together, if there are several; all call this.
    tick: as of `preparation.prepare`, whose errors are raised too.

  Returns:
    A Source. Fields by kind, with T = sequence_length, P = input_size, C = target_size:
      text: tokens int32 [T], targets int32 [T], weights float32 [T], segments int32 [T]: of each
        target, the number of its document within the row
      image: inputs float32 [P] in 0..1, targets int32 [], weights float32 []
      random: inputs float32 [P], targets float32 [C], weights float32 []

  Raises:
    ValueError: the data set or split is unknown, empty, damaged or does not fit the config; or
      has more records that cannot be read than data.max_bad_records.
  """
  if data.name in SOURCES:
    return _registered(data, split, seed)
  if data.kind not in KINDS:
    raise ValueError(
      f"data.name={data.name!r}: this recipe's task has rows of its own (Task.rows="
      f"{data.kind!r}), which only a registered data source gives; registered are "
      f"{', '.join(SOURCES) or 'none'}"
    )
  if (data.kind == "random") != (data.name == catalog.RANDOM_NORMAL):
    raise ValueError(
      f"data.name={data.name!r}: this recipe's task reads {data.kind} rows, and the only data set"
      f" of random rows is {catalog.RANDOM_NORMAL}, which has no others; choose another data set,"
      " or another recipe with --config=FILE:RECIPE"
    )
  if data.kind == "random":
    return _random_normal(data, split, seed)
  if data.get("sources"):
    from input_pipeline import mixture  # no other data needs it

    return mixture.open_mixture(data, split, seed, sharing, tick)
  return rows.open_source(data, split, seed, sharing, tick)


def _registered(data, split, seed):
  """Opens a data source of SOURCES; raises ValueError if it does not return a Source."""
  if data.max_bad_records:
    raise ValueError(
      f"data.max_bad_records={data.max_bad_records}: the registered data source {data.name!r} "
      f"finds its bad records itself; set it to 0"
    )
  try:
    source = SOURCES[data.name](data, split, seed)
  except Exception as error:
    raise ValueError(
      f"the data source {data.name!r} fails, split {split!r}: {error_text(error)}"
    ) from error
  if not isinstance(source, Source):
    raise ValueError(
      f"the data source {data.name!r} returns a {type(source).__name__}, not a "
      f"input_pipeline.source.Source"
    )
  if "tokens" in source.fields and "segments" not in source.fields:
    return _of_one_document_each(source)
  return source


def _of_one_document_each(source):
  """Returns a source of tokens with `segments`: each row is one document."""
  shape, read = source.fields["tokens"][0], source.read

  def with_segments(indices):
    return {**read(indices), "segments": np.zeros((len(indices), *shape), np.int32)}

  fields = {**source.fields, "segments": (shape, np.dtype(np.int32))}
  return dataclasses.replace(source, fields=fields, read=with_segments)


def check_ids(source, vocabulary_size):
  """Raises ValueError if a row of text has a token beyond the model's vocabulary.

  Rows are read only if the vocabulary is smaller than the range of ids, which may still suffice:
  ASCII text has no byte above 127.

  Args:
    source: a Source.
    vocabulary_size: of the model.
  """
  if source.ids <= vocabulary_size:
    return
  if source.tokenizer:
    raise ValueError(
      f"{source.name}: the tokenizer {source.tokenizer} has {source.ids:,} tokens, but "
      f"model.vocabulary_size={vocabulary_size} allows 0 to {vocabulary_size - 1}; set "
      f"model.vocabulary_size={source.ids} or more, or take another tokenizer"
    )
  for start in range(0, len(source), _ROWS_PER_READ):
    numbers = np.arange(start, min(start + _ROWS_PER_READ, len(source)))
    found = source.read(numbers)
    largest_B = np.maximum(found["tokens"].max(axis=1), found["targets"].max(axis=1))
    beyond = np.flatnonzero(largest_B >= vocabulary_size)
    if len(beyond):
      raise ValueError(
        f"{source.name}: row {numbers[beyond[0]]} holds token {largest_B[beyond[0]]}, but"
        f" model.vocabulary_size={vocabulary_size} allows 0 to {vocabulary_size - 1}; set"
        f" model.vocabulary_size={source.ids}, which allows all tokens that there can be"
      )


def array_source(name, arrays):
  """Returns a Source over arrays in memory: field name -> [rows, ...].

  The ids of `tokens` and `targets`, if it has `tokens`, must be in the model's vocabulary.
  """
  ids = 0
  if "tokens" in arrays:
    fields = [field for field in ("tokens", "targets") if field in arrays]
    ids = 1 + max(int(arrays[field].max(initial=-1)) for field in fields)
  digest = hashlib.sha256()
  for field, array in sorted(arrays.items()):
    digest.update(f"{field} {array.shape} {array.dtype.str}".encode() + array.tobytes())
  return Source(
    name=name,
    fingerprint=digest.hexdigest(),
    rows=min(len(array) for array in arrays.values()),
    fields={field: (array.shape[1:], array.dtype) for field, array in arrays.items()},
    read=lambda indices: {field: array[indices] for field, array in arrays.items()},
    ids=ids,
  )


def _random_normal(data, split, seed):
  """Draws the complete set at once; both splits are the same set."""
  if seed < 0 or min(data.examples, data.input_size, data.target_size) < 1:
    raise ValueError(
      f"{data.name}: seed={seed} must not be negative, and data.examples={data.examples},"
      f" data.input_size={data.input_size}, data.target_size={data.target_size} must be at least 1"
    )
  generator = np.random.Generator(np.random.Philox(key=seed))
  # Row by row, and rounded from float64, so that neither more examples nor the mathematics library
  # of another machine changes a row.
  drawn = generator.standard_normal((data.examples, data.input_size + data.target_size))
  inputs, targets = np.split(drawn.astype(np.float32), [data.input_size], axis=1)
  weights = np.ones(data.examples, np.float32)
  arrays = {"inputs": inputs, "targets": targets, "weights": weights}
  return array_source(f"{data.name} {split}", arrays)
