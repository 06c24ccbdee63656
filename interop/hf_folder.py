"""A model folder: on disk, or on the Hub (hf://OWNER/NAME), where it is downloaded from first.

It holds config.json, the weights in one safetensors file or in several with an index, and usually
generation_config.json and a tokenizer. What reads these is imported where a folder is read, since
every job asks whether it begins with one.
"""

import functools
import hashlib
import os
import pathlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from runtime import files
from runtime.suggest import nearest

if TYPE_CHECKING:
  from interop.hf_config import Described

CONFIG, GENERATION = "config.json", "generation_config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_HUB = "hf://"
# What is downloaded to know a model and its tokenizer, and then for its weights.
_SMALL = ["*.json", "*.jinja", "*.model", "*.txt"]
_WEIGHTS = ["*.safetensors"]
_NAMED = 8
_COPY, _STATE = "tokenizer", "state"  # of a checkpoint, as integrity.py names them


def is_model(location: str | os.PathLike) -> bool:
  """Returns whether a location is a model folder, and not the workdir of a run."""
  if os.fspath(location).startswith(_HUB):
    return True
  if (folder := _existing(location)) is None:
    return False
  if any((folder / name).exists() for name in (SINGLE, INDEX, ADAPTER)):
    return True
  try:
    content = files.read_json(folder / CONFIG, follow=True)
  except (OSError, ValueError):
    return False
  return isinstance(content, Mapping) and "model_type" in content  # a run's config.json has none


def is_adapter(location: str | os.PathLike) -> bool:
  """Returns whether a location is the folder of an adapter, which has no weights of its base."""
  if (folder := _existing(location)) is None:
    return False
  return (folder / ADAPTER).exists() and not any((folder / one).exists() for one in (SINGLE, INDEX))


def _existing(location: str | os.PathLike) -> pathlib.Path | None:
  """Returns a folder on this machine, if a location is one."""
  location = os.fspath(location)
  folder = pathlib.Path(location).expanduser()
  return folder if location and "://" not in location and folder.is_dir() else None


def is_copy(folder: pathlib.Path) -> bool:
  """Returns whether a folder is a run's copy of config.json and tokenizer, in a checkpoint."""
  return folder.name == _COPY and (folder.parent / _STATE).is_dir()


def local(location: str, key: str, *, weights: bool = False) -> pathlib.Path:
  """Returns a model folder on this machine.

  Args:
    location: a path, or hf://OWNER/NAME[@REVISION].
    key: the config's, for messages.
    weights: of the Hub, download the weights too.

  Raises:
    ValueError: there is no such folder, or it cannot be downloaded.
  """
  if location.startswith(_HUB):
    return _downloaded(location, key, weights)
  if "://" in location:
    raise ValueError(f"{key}={location}: a model folder is a local path or hf://OWNER/NAME")
  folder = pathlib.Path(os.path.abspath(os.path.expanduser(location)))
  if not folder.exists():
    there = [path.name for path in folder.parent.iterdir()] if folder.parent.is_dir() else []
    hint = nearest(folder.name, there) or f"; a model of the Hugging Face Hub is {_HUB}OWNER/NAME"
    raise ValueError(f"{key}={location}: there is no folder {folder}{hint}")
  if not folder.is_dir():
    raise ValueError(f"{key}={location}: it is a file; name the folder that has {CONFIG}")
  return folder


@functools.cache
def _downloaded(location: str, key: str, weights: bool) -> pathlib.Path:
  import huggingface_hub

  match = re.fullmatch(r"hf://(?:models/)?([\w.-]+/[\w.-]+)(?:@([^/@]+))?/?", location)
  if not match:
    raise ValueError(
      f"{key}={location}: a model of the Hub is {_HUB}OWNER/NAME, or @REVISION after"
    )
  repository, revision = match[1], match[2]
  try:
    found = huggingface_hub.snapshot_download(
      repository, revision=revision, allow_patterns=_SMALL + (_WEIGHTS if weights else [])
    )
  except Exception as error:  # of the network, of the Hub, of a model that is private or missing
    raise ValueError(
      f"{key}: {location} cannot be read from the Hugging Face Hub ({type(error).__name__}: "
      f"{error}). Without network access, download it where there is some, with `hf download "
      f"{repository} --local-dir FOLDER`, and set {key}=FOLDER"
    ) from error
  return pathlib.Path(found)


# ------------------------------ config.json ------------------------------


def read_config(folder: pathlib.Path, key: str) -> "Described":
  """Returns what a folder's config.json says of its model.

  Raises:
    ValueError: it is missing or not JSON, or describes a model that cannot be built.
  """
  from interop import hf_config

  return hf_config.read(read_object(folder / CONFIG, key), str(folder / CONFIG))


def read_object(path: pathlib.Path, key: str) -> Any:
  """Returns the JSON of a folder's file; raises ValueError, which says what the folder is."""
  try:
    return files.read_json(path, follow=True)
  except FileNotFoundError:
    folder = path.parent
    if (folder / ADAPTER).exists():
      raise ValueError(not_a_model(folder, key)) from None
    raise ValueError(
      f"{key}={folder}: it has no {path.name}, only {listed(folder)}; name the folder of a model"
    ) from None
  except (OSError, ValueError) as error:
    raise ValueError(f"{key}: {path} cannot be read ({error})") from error


def not_a_model(folder: pathlib.Path, key: str) -> str:
  """Returns what a refusal says of the folder of an adapter."""
  return f"{key}={folder}: it is an adapter ({ADAPTER}), not a model; name the folder of its base"


def listed(folder: pathlib.Path) -> str:
  """Returns the names of a folder's files, as a message has them."""
  names = sorted(path.name for path in folder.iterdir())
  return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "") or "nothing"


def digest(folder: pathlib.Path, more: str = "") -> str:
  """Returns a digest of the config of a folder's model or adapter, and of a text."""
  config = folder / (ADAPTER if is_adapter(folder) else CONFIG)
  hashed = hashlib.sha256(files.read_bytes(config, follow=True) + more.encode())
  return hashed.hexdigest()[:16]
