"""The files that a tokenizer is made of: their names, what is read of them, and text as UTF-8."""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from etils import epath

from runtime import files, forms
from runtime.forms import COUNT, FLAG, TEXT, Each, Needs, OrNull

MOST_BYTES = 2**29  # of one of a tokenizer's files; vocabularies of 256k have 30 to 50 MB
TOKENIZER_FILE = "tokenizer.json"
SENTENCEPIECE_FILE = "tokenizer.model"
TEKKEN_FILE = "tekken.json"
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_FILE = "special_tokens_map.json"
GENERATION_FILE = "generation_config.json"
TEMPLATE_FILE = "chat_template.jinja"
ADDED_FILE = "added_tokens.json"
# What may stand beside a tokenizer, and is copied with it.
COMPANIONS = (CONFIG_FILE, SPECIAL_FILE, GENERATION_FILE, TEMPLATE_FILE, ADDED_FILE)
# The keys of CONFIG_FILE and SPECIAL_FILE that name one special token each.
SPECIAL_KEYS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
SPECIAL_KEYS = (*SPECIAL_KEYS, "mask_token")


def find(path: epath.Path) -> epath.Path:
  """Returns the file of a tokenizer: the path itself, or what is in that folder."""
  try:
    if path.is_dir():
      return _in_folder(path)
    if path.exists():
      return path
  except OSError as error:
    raise ValueError(f"data.tokenizer={path}: it cannot be read ({error.strerror})") from error
  raise ValueError(
    f"data.tokenizer={path}: there is no such file or folder. It is `bytes`, `characters`, a"
    f" {TOKENIZER_FILE} or a folder with one, or a SentencePiece model (*.model)."
    " One of the Hugging Face Hub is downloaded first:"
    f" `hf download OWNER/NAME --include '*token*' '*.jinja' --local-dir FOLDER`"
  )


def _in_folder(folder: epath.Path) -> epath.Path:
  for name in (TOKENIZER_FILE, SENTENCEPIECE_FILE):
    if (folder / name).exists():
      return folder / name
  models = sorted(path for path in folder.iterdir() if ".model" in path.name)
  if len(models) == 1:
    return models[0]
  if models:
    names = ", ".join(path.name for path in models)
    raise ValueError(f"data.tokenizer={folder}: several SentencePiece models ({names}); name one")
  present = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
  if (folder / TEKKEN_FILE).exists():
    present += f"; {TEKKEN_FILE} is not read, use the {TOKENIZER_FILE} of the same model"
  raise ValueError(
    f"data.tokenizer={folder}: the folder has neither a {TOKENIZER_FILE} nor a SentencePiece model"
    f" (*.model), only {present}"
  )


def as_bytes(text: str | bytes) -> bytes:
  """Returns a text in UTF-8; bytes as they are. Raises ValueError for half a surrogate pair."""
  if isinstance(text, bytes):
    return text
  try:
    return text.encode()
  except UnicodeEncodeError as error:
    raise ValueError(
      f"character {error.start:,} of a text is half a surrogate pair"
      f" (U+{ord(text[error.start]):04X}), which UTF-8 cannot represent"
    ) from None


def as_str(text: str | bytes) -> str:
  """Returns a text as valid Unicode. Raises ValueError for bytes that are not UTF-8."""
  if isinstance(text, str):
    as_bytes(text)
    return text
  try:
    return text.decode()
  except UnicodeDecodeError as error:
    raise ValueError(
      f"byte {error.start:,} of a text is 0x{text[error.start]:02x}, which is not valid UTF-8"
    ) from None


def digest(definition: bytes, facts: Mapping[str, Any]) -> str:
  """Returns the digest of a tokenizer: of the file that defines it, and of its special ids."""
  hashed = hashlib.sha256(definition)
  hashed.update(json.dumps(facts, sort_keys=True).encode())
  return hashed.hexdigest()


def read(path: epath.PathLike) -> bytes:
  """Returns the content of one of a tokenizer's files; raises ValueError, which names it."""
  try:
    return files.read_bytes(path, most_bytes=MOST_BYTES, follow=True)
  except OSError as error:
    raise ValueError(f"data.tokenizer: {path} cannot be read ({error})") from error


_TOKEN = Needs({"content": TEXT}, {"special": FLAG})
# By the name of a file, what is read of it; the templates in it are checked where one is needed.
_FORMS: dict[str, Any] = {
  CONFIG_FILE: {"added_tokens_decoder": OrNull(Each(_TOKEN)), "add_bos_token": OrNull(FLAG)},
  ADDED_FILE: Each(COUNT),
}


def read_object(path: epath.PathLike) -> dict[str, Any]:
  """Returns the JSON object in one of a tokenizer's files; raises ValueError, which names it."""
  return parse_object(read(path), path, _FORMS.get(epath.Path(path).name, {}))


def parse_object(content: bytes, path: epath.PathLike, form: Any) -> dict[str, Any]:
  """Returns the JSON object in the content of a file; raises ValueError, which names it."""
  try:
    value = files.parse_json(content)
  except ValueError as error:
    raise ValueError(f"data.tokenizer: {path} is not valid JSON ({error})") from error
  forms.check(value, form, f"data.tokenizer: {path}")
  return value


def read_companions(companions: Mapping[str, epath.Path]) -> dict[str, dict[str, Any]]:
  """Returns name -> content of those of the files beside a tokenizer that are JSON objects."""
  return {name: read_object(p) for name, p in companions.items() if name.endswith(".json")}


def token_name(token: Any) -> str | None:
  """Returns the name of a special token, as both forms of CONFIG_FILE write it; None for none."""
  content = token.get("content") if isinstance(token, dict) else token
  return content if isinstance(content, str) and content else None


def check_added(
  path: epath.PathLike, said: Mapping[str, dict[str, Any]], ids: Callable[[str], int | None]
) -> None:
  """Raises ValueError where files beside a tokenizer add tokens that it does not have.

  Args:
    path: of the tokenizer.
    said: name -> content of the files beside it.
    ids: gives the id of a token's name, None where there is none.
  """
  added = dict(said.get(ADDED_FILE, {}))
  for id_, token in (said.get(CONFIG_FILE, {}).get("added_tokens_decoder") or {}).items():
    added[token["content"]] = id_
  differing = {name: id_ for name, id_ in added.items() if str(ids(name)) != str(id_)}
  if differing:
    name, id_ = next(iter(differing.items()))
    raise ValueError(
      f"data.tokenizer: files beside {path} add tokens that it does not have ({len(differing):,};"
      f" the first is {name!r} with id {id_}). Write one {TOKENIZER_FILE} that has all: in Python,"
      " `transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)`"
    )
