"""Trains a tokenizer on a user's documents: a byte-level BPE, or a vocabulary of their characters.

Every text can be encoded, and decoding gives exactly its bytes. BPE is that of arXiv:1508.07909, on
bytes as in GPT-2, in words that are split as Llama 3 does it. A character that a vocabulary of
characters does not have is encoded as its bytes in UTF-8, each a token that no document trains.
The same documents give the same tokenizer, in any order of the processes that count.
"""

import dataclasses
import hashlib
import json
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tokenizers
from etils import epath

from input_pipeline import catalog
from input_pipeline.shard_writer import Item, content_hash
from input_pipeline.store import no_tick
from input_pipeline.text import documents, tokenizer, tokenizer_files
from input_pipeline.text import files as text_files
from runtime import files

END = "<|endoftext|>"
FACTS = "training.json"  # beside a tokenizer: what it was trained on
UNSEEN = "unseen"  # there: characters of held-out documents that a vocabulary does not have
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


def characters(texts: Iterable[bytes], tick: Callable = no_tick) -> bytes:
  """Returns the tokenizer.json of the characters of some texts, sorted; arguments as of `train`.

  It is a BPE without merges whose characters are tokens. The ids after them are those of the 256
  bytes, for other characters.

  Raises:
    ValueError: there are no texts.
  """
  found: set[str] = set()
  count = 0
  for count, text in enumerate(texts, 1):
    found.update(text.decode())
    tick("documents", count)
  if not count:
    raise ValueError("there is no document whose characters could be taken")
  pieces = [END, *sorted(found), *(f"<0x{byte:02X}>" for byte in range(256))]
  vocabulary = {piece: number for number, piece in enumerate(pieces)}
  library = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], byte_fallback=True))
  library.add_special_tokens([END])
  fallback, fuse = tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()
  library.decoder = tokenizers.decoders.Sequence([fallback, fuse])
  return library.to_str().encode()


def trained_once(data: Any, size: int | None, tick: Callable = no_tick) -> str:
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


def _facts(data: Any, size: int | None) -> dict[str, Any]:
  """Returns what identifies a tokenizer that is trained on a config's data section."""
  facts = {"data_set": data.name, "split": data.train_split, "size": size}
  if data.name in catalog.OF_FILES:
    ids = [[unit.id for unit in (*one.units, *one.apart_units())] for one in _inputs(data)]
    return facts | {"units": ids, "held_out": data.evaluation_fraction}
  # The only data set whose documents follow from the Python that runs.
  return facts | ({"python": platform.python_version()} if data.name == "python_source" else {})


def train_on(data: Any, size: int | None, tick: Callable = no_tick) -> str:
  """Trains a tokenizer on what a config's data section trains on; returns its folder.

  Documents that are held out for validation are left out.

  Args:
    data: the section: of files, of a mixture, or of a TFDS data set with text.
    size: of the vocabulary; None: one of the characters.
    tick: as of `train`.

  Raises:
    ValueError: as of `train`, `characters` and `store`; no file, or more bad records than
      data.max_bad_records.
  """
  count = 0

  def bad(item: Item) -> None:
    nonlocal count
    count += 1
    if count > data.max_bad_records:
      raise ValueError(
        f"{item.where}: {item.why}; repair it, or set data.max_bad_records to {count} or more to "
        f"continue without such records"
      )

  if size is not None:
    check_size(size)
  inputs = _inputs(data) if data.name in catalog.OF_FILES else []
  texts = _texts(data, inputs, bad)
  content = characters(texts, tick) if size is None else train(texts, size, tick)
  paths = [file.path for one in inputs for file in one.found]
  facts = {"files": paths[:100], "size": size} if inputs else _facts(data, size)
  if size is None:
    others = _texts(data, inputs, no_tick, held_out=True)
    facts[UNSEEN] = _unseen(content, others)
  for one in inputs:
    text_files.check_same(one.spec, one.found)
  return store(data, content, facts)


def _unseen(content: bytes, texts: Iterable[bytes]) -> str:
  """Returns the characters of texts, sorted, that a vocabulary of characters does not have."""
  found = {*"".join(set().union(*(text.decode() for text in texts)))}
  return "".join(sorted(found - {*json.loads(content)["model"]["vocab"]}))


def unseen_of(folder: epath.PathLike) -> str:
  """Returns the characters that evaluation has and a stored vocabulary of characters has not."""
  return files.read_json(epath.Path(folder) / FACTS, follow=True)[UNSEEN]


@dataclasses.dataclass(frozen=True)
class _Input:
  """A source of documents of files.

  Attributes:
    spec: its files, as data.files names them.
    feature: data.text_feature.
    found: the files.
    units: of these.
    apart: its data.evaluation_files; "": documents of `units` are held out.
  """

  spec: str
  feature: str
  found: Sequence[text_files.InputFile]
  units: Sequence[documents.Unit]
  apart: str

  def apart_units(self) -> list[documents.Unit]:
    """Returns the units of its evaluation files."""
    return (
      documents.units(text_files.find(self.apart, "data.evaluation_files")) if self.apart else []
    )


def _inputs(data: Any) -> list[_Input]:
  """Returns the sources of a mixture, or the only one of a data section of files."""
  made = []
  for source in data.sources or (data,):
    apart, found = source.get("evaluation_files", ""), text_files.find(source["files"])
    units = documents.units(found, held_out=0.0 if apart else data.evaluation_fraction)
    made.append(_Input(source["files"], source.get("text_feature", ""), found, units, apart))
  return made


def _texts(
  data: Any,
  inputs: Sequence[_Input],
  bad: Callable[[Item], None],
  held_out: bool = False,
) -> Iterator[bytes]:
  """Yields the documents that are trained on, or those that are held out.

  Args:
    data: the section.
    inputs: its sources; none: it is a TFDS data set.
    bad: as of `sample`.
    held_out: which of the two.
  """
  if not inputs:
    split = data.evaluation_split if held_out else data.train_split
    from input_pipeline import tfds_documents  # texts in files do not need it

    yield from tfds_documents.texts(data, split, bad)
  for one in inputs:
    feature, most = documents.choose_feature(one.found, one.feature), SAMPLE_BYTES // len(inputs)
    least = 0.0 if one.apart else data.evaluation_fraction * 2.0**64
    divided = one.units[0].held_out
    for number, text in enumerate(sample(one.units, feature, bad, most)):
      if (number > 0 if divided else content_hash(text) < least) is held_out:
        yield text
    if held_out:
      yield from sample(one.apart_units(), feature, bad, most)


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
  kind = "characters" if UNSEEN in facts else "bpe"
  root = tokenizer.trained_folder(data)
  identity = hashlib.sha256(content + facts.get(UNSEEN, "").encode())
  folder = root / f"{kind}-{identity.hexdigest()[:12]}"
  try:
    if not (folder / tokenizer_files.TOKENIZER_FILE).exists():
      folder.mkdir(parents=True, exist_ok=True)
      config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
      for name, value in ((FACTS, facts), (tokenizer_files.CONFIG_FILE, config)):
        files.replace(folder / name, json.dumps(value, indent=2) + "\n", shared=True)
      files.sync_tree(folder)
      # The last: without it, the folder is none of a tokenizer, and is written again.
      files.replace(folder / tokenizer_files.TOKENIZER_FILE, content, shared=True)
    current = tokenizer.CURRENT_FILE if kind == "bpe" else tokenizer.CHARACTERS_FILE
    files.replace(root / current, json.dumps({"folder": folder.name}) + "\n")
  except OSError as error:
    raise ValueError(
      f"the tokenizer cannot be written to {root} ({error}); free some space or get the right to"
      " write there, or set data.data_dir to another folder"
    ) from error
  return str(folder)
