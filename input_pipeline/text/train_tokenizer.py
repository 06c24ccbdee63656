"""Trains a byte-level BPE tokenizer on a user's documents (arXiv:1508.07909; bytes as in GPT-2).

Every text can be encoded, and decoding gives exactly its bytes. Words are split as Llama 3 does it.
The same documents give the same tokenizer, in any order of the processes that count.
"""

import hashlib
import itertools
import json
import platform
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tokenizers
from etils import epath

from input_pipeline import catalog, tfds_documents
from input_pipeline.store import Item, content_hash, no_tick
from input_pipeline.text import documents, tokenizer, tokenizer_files
from input_pipeline.text import files as text_files
from runtime import files

END = "<|endoftext|>"
LEAST_SIZE = 257  # a token for each byte, and the end of a document
MOST_SIZE = 2**20
SAMPLE_BYTES = 2**30  # of text; more changes few merges, and takes hours
_LEAST_OF_UNIT = 2**20
# A word with what stands before it, up to three digits, punctuation with line ends, whitespace.
_WORDS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
  r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def check_size(size: int) -> None:
  """Raises ValueError where no tokenizer can have that many tokens."""
  if not LEAST_SIZE <= size <= MOST_SIZE:
    raise ValueError(
      f"--train_tokenizer={size}: a tokenizer has {LEAST_SIZE} (each byte, and the end of a"
      f" document) to {MOST_SIZE:,} tokens"
    )


def sample(
  units: Sequence[documents.Unit],
  feature: str,
  bad: Callable[[Item], None],
  most_bytes: int = SAMPLE_BYTES,
) -> Iterator[bytes]:
  """Yields documents to train on: all, or an even share of each unit.

  Args:
    units: the input; if it is larger than `most_bytes`, the first documents of each unit are taken.
    feature: as of `documents.read`.
    bad: is called with what cannot be read; raises where that is too much.
    most_bytes: about how much is taken.
  """
  share = max(most_bytes // max(len(units), 1), _LEAST_OF_UNIT)
  ordered = sorted(units, key=lambda unit: unit.id)  # neighbors are alike
  taken = 0
  for unit in ordered:
    of_unit = 0
    for item in documents.read(unit, feature):
      if item.value is None:
        bad(item)
        continue
      yield item.value
      of_unit += len(item.value)
      if of_unit >= share:
        break
    taken += of_unit
    if taken >= most_bytes:
      return


def train(texts: Iterable[bytes], size: int, tick: Callable = no_tick) -> bytes:
  """Returns the tokenizer.json of a tokenizer trained on some texts.

  Args:
    texts: in UTF-8.
    size: of the vocabulary; where the texts have fewer pairs to merge, it becomes smaller.
    tick: is called with ("documents", how many were read); what it raises ends the training.

  Raises:
    ValueError: the size is out of range, or there are no texts.
  """
  check_size(size)
  count = 0

  def read():
    nonlocal count
    for text in texts:
      yield text.decode()
      count += 1
      tick("documents", count)

  library = tokenizers.Tokenizer(tokenizers.models.BPE())
  splitting = tokenizers.pre_tokenizers.Split(tokenizers.Regex(_WORDS), "isolated")
  byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  library.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([splitting, byte_level])
  library.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=size,
    special_tokens=[END],
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  library.train_from_iterator(read(), trainer)
  if not count:
    raise ValueError("there is no document to train a tokenizer on")
  return library.to_str().encode()


def trained_once(data: Any, size: int, tick: Callable = no_tick) -> str:
  """Returns what `train_on` does, without training again what was trained in this data_dir."""
  root, facts = tokenizer.trained_folder(data), json.dumps(_facts(data, size))
  # Others may have given the same tokenizer, whose folder then says those.
  pointer = root / f"of-{hashlib.sha256(facts.encode()).hexdigest()[:12]}.json"
  try:
    folder = root / files.read_json(pointer, follow=True)["folder"]
    if (folder / tokenizer_files.TOKENIZER_FILE).exists():
      return str(folder)
  except (OSError, ValueError, KeyError, TypeError):
    pass  # it is not there, or damaged: the same tokenizer is trained again
  trained = train_on(data, size, tick)
  files.replace(pointer, json.dumps({"folder": epath.Path(trained).name}) + "\n", shared=True)
  return trained


def _facts(data: Any, size: int) -> dict[str, Any]:
  """Returns what identifies a tokenizer that is trained on a data set with a name."""
  facts = {"data_set": data.name, "split": data.train_split, "size": size}
  # The only data set whose documents follow from the Python that runs.
  return facts | ({"python": platform.python_version()} if data.name == "python_source" else {})


def train_on(data: Any, size: int, tick: Callable = no_tick) -> str:
  """Trains a tokenizer on what a config's data section trains on; returns its folder.

  Documents that are held out for validation by their content are left out.

  Args:
    data: the section: of files, of a mixture, or of a TFDS data set with text.
    size: of the vocabulary.
    tick: as of `train`.

  Raises:
    ValueError: as of `train` and `store`; no file, or more bad records than data.max_bad_records.
  """
  check_size(size)
  count = 0

  def bad(item: Item) -> None:
    nonlocal count
    count += 1
    if count > data.max_bad_records:
      raise ValueError(
        f"{item.where}: {item.why}; repair it, or set data.max_bad_records to {count} or more to "
        f"continue without such records"
      )

  if data.name not in catalog.OF_FILES:
    texts = tfds_documents.texts(data, data.train_split, bad, tick)
    return store(data, train(texts, size, tick), _facts(data, size))
  sources = data.sources or (data,)
  given = [
    (source["files"], source.get("text_feature", ""), source.get("evaluation_files", ""))
    for source in sources
  ]
  found = [text_files.find(spec) for spec, _, _ in given]
  parts = [
    _trained_on(files_, feature, "" if apart else data.evaluation_fraction, bad, len(given))
    for files_, (_, feature, apart) in zip(found, given, strict=True)
  ]
  content = train(itertools.chain.from_iterable(parts), size, tick)
  for (spec, _, _), files_ in zip(given, found, strict=True):
    text_files.check_same(spec, files_)
  paths = [file.path for files_ in found for file in files_]
  return store(data, content, {"files": paths[:100], "size": size})


def _trained_on(
  found: Sequence[text_files.InputFile],
  feature: str,
  held_out: float | str,
  bad: Callable[[Item], None],
  sources: int,
) -> Iterator[bytes]:
  """Yields the documents of one source that are not held out for validation."""
  feature = documents.choose_feature(found, feature)
  least = float(held_out or 0) * 2.0**64
  for text in sample(documents.units(found), feature, bad, SAMPLE_BYTES // sources):
    if content_hash(text) >= least:
      yield text


def store(data: Any, content: bytes, facts: dict[str, Any]) -> str:
  """Writes a trained tokenizer, which `tokenizer.resolve` then gives for these files.

  Args:
    data: the config's data section.
    content: of its tokenizer.json.
    facts: what it was trained on, written beside it.

  Returns:
    its folder. What was trained for these files before stays: runs may name it.

  Raises:
    ValueError: the folder cannot be written.
  """
  root = tokenizer.trained_folder(data)
  folder = root / f"bpe-{hashlib.sha256(content).hexdigest()[:12]}"
  try:
    if not (folder / tokenizer_files.TOKENIZER_FILE).exists():
      _write(folder, content, facts)
    files.replace(root / tokenizer.CURRENT_FILE, json.dumps({"folder": folder.name}) + "\n")
  except OSError as error:
    raise ValueError(
      f"the tokenizer cannot be written to {root} ({error}); free some space or get the right to"
      " write there, or set data.data_dir to another folder"
    ) from error
  return str(folder)


def _write(folder: epath.Path, content: bytes, facts: dict[str, Any]) -> None:
  """Writes a tokenizer's folder under another name, and renames it."""
  partial = folder.parent / f"{folder.name}.{uuid.uuid4().hex}.tmp"
  config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
  partial.mkdir(parents=True)
  try:
    for name, value in (("training.json", facts), (tokenizer_files.CONFIG_FILE, config)):
      files.replace(partial / name, json.dumps(value, indent=2) + "\n")
    files.replace(partial / tokenizer_files.TOKENIZER_FILE, content)
    if files.is_local(partial):
      files.sync_tree(partial)
    partial.rename(folder)
  except BaseException as error:
    partial.rmtree(missing_ok=True)
    if isinstance(error, OSError) and (folder / tokenizer_files.TOKENIZER_FILE).exists():
      return  # another process was first, with the same content
    raise
