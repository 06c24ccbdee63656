"""A model folder: on disk, or on the Hub (hf://OWNER/NAME), where it is downloaded from first.

It holds config.json, the weights in one safetensors file or in several with an index, and usually
generation_config.json and a tokenizer. Nothing here imports JAX.
"""

import functools
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from interop import hf_config, safetensors_file
from interop.safetensors_file import Stored
from runtime import files
from runtime.suggest import nearest

CONFIG, GENERATION = "config.json", "generation_config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_HUB = "hf://"
# What is downloaded to know a model and its tokenizer, and then for its weights.
_SMALL = ["*.json", "*.jinja", "*.model", "*.txt"]
_WEIGHTS = ["*.safetensors"]
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_NAMED = 8
_MOST_FILES = 2**12  # of weights; a terabyte in files of 5 GB are 200
_COPY, _STATE = (
  "tokenizer",
  "state",
)  # of a checkpoint, as integrity.py names them


def is_model(location: str | os.PathLike) -> bool:
  """Returns whether a location is a model folder, and not the workdir of a run."""
  location = os.fspath(location)
  if location.startswith(_HUB):
    return True
  if not location or "://" in location:
    return False
  folder = pathlib.Path(location).expanduser()
  if not folder.is_dir():
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
  location = os.fspath(location)
  if not location or "://" in location:
    return False
  folder = pathlib.Path(location).expanduser()
  return (folder / ADAPTER).exists() and not any((folder / one).exists() for one in (SINGLE, INDEX))


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


def read_config(folder: pathlib.Path, key: str) -> hf_config.Described:
  """Returns what a folder's config.json says of its model.

  Raises:
    ValueError: it is missing or not JSON, or describes a model that cannot be built.
  """
  return hf_config.read(_object(folder / CONFIG, key), str(folder / CONFIG))


def _object(path: pathlib.Path, key: str) -> Any:
  try:
    return files.read_json(path, follow=True)
  except FileNotFoundError:
    folder = path.parent
    if (folder / ADAPTER).exists():
      raise ValueError(
        f"{key}={folder}: it is an adapter ({ADAPTER}), not a model; name the folder of its base"
      ) from None
    raise ValueError(
      f"{key}={folder}: it has no {path.name}, only {_listed(folder)}; name the folder of a model"
    ) from None
  except (OSError, ValueError) as error:
    raise ValueError(f"{key}: {path} cannot be read ({error})") from error


def _listed(folder: pathlib.Path) -> str:
  names = sorted(path.name for path in folder.iterdir())
  return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "") or "nothing"


def decoder_config(content: bytes) -> bytes:
  """Returns the content of a config.json; of a model with images, that of its decoder."""
  theirs = files.parse_json(content)
  inner = hf_config.text_part(theirs)
  return content if inner is theirs else f"{files.json_text(inner, indent=2)}\n".encode()


# ------------------------------ weights ------------------------------


def stored_tensors(folder: pathlib.Path, key: str) -> dict[str, Stored]:
  """Returns name -> array of a folder's weights, of which only the headers are read.

  Raises:
    ValueError: there are none, files are missing or damaged, or the index names other arrays than
      the files have; everything in one message.
  """
  if not (folder / INDEX).exists():
    if not (folder / SINGLE).exists():
      raise ValueError(_no_weights(folder, key))
    return _header(folder / SINGLE)
  content = _object(folder / INDEX, key)
  places = content.get("weight_map") if isinstance(content, Mapping) else None
  plain = isinstance(places, Mapping) and all(
    isinstance(name, str) and name == os.path.basename(name) for name in places.values()
  )
  if not plain or not places:
    raise ValueError(f"{key}: {folder / INDEX} has no weight_map of names of files beside it")
  names = sorted(set(places.values()))
  if len(names) > _MOST_FILES:
    raise ValueError(
      f"{key}: {folder / INDEX} names {len(names):,} files, and at most {_MOST_FILES:,} are read"
    )
  if missing := [name for name in names if not (folder / name).exists()]:
    listed = ", ".join(missing[:_NAMED]) + (", ..." if len(missing) > _NAMED else "")
    raise ValueError(
      f"{key}={folder}: {len(missing)} of the {len(names)} files that {INDEX} names are missing: "
      f"{listed}; download them too"
    )
  found, wrong = {}, []
  for name in names:
    header = _header(folder / name)
    wrong += [
      f"{tensor} is in {name}, and the index says {places.get(tensor, 'nothing of it')}"
      for tensor in header
      if places.get(tensor) != name
    ]
    found.update(header)
  wrong += [f"{tensor} is not in {name}" for tensor, name in places.items() if tensor not in found]
  if wrong:
    more = [f"and {len(wrong) - _NAMED} more"] if len(wrong) > _NAMED else []
    lines = "\n".join(f"  {line}" for line in [*wrong[:_NAMED], *more])
    raise ValueError(f"{folder / INDEX} does not fit the files beside it:\n{lines}")
  return found


def _header(path: pathlib.Path) -> dict[str, Stored]:
  try:
    return safetensors_file.read_header(path)
  except OSError as error:
    raise ValueError(f"{path} cannot be read ({error})") from error


def _no_weights(folder: pathlib.Path, key: str) -> str:
  names = sorted(path.name for path in folder.iterdir())
  if (folder / ADAPTER).exists():
    return f"{key}={folder}: it is an adapter ({ADAPTER}), not a model; name the folder of its base"
  if pickles := [name for name in names if name.endswith(_PICKLES)]:
    return (
      f"{key}={folder}: its weights are pickled ({pickles[0]}), and reading a pickle runs code. "
      f"Write them as safetensors, where transformers is installed: `python -c 'from "
      f'transformers import AutoModelForCausalLM as M; M.from_pretrained("{folder}")'
      f'.save_pretrained("{folder}")\'`'
    )
  if shards := [name for name in names if name.endswith(".safetensors")]:
    return (
      f"{key}={folder}: it has {shards[0]}, and neither {SINGLE} nor {INDEX}; download that too"
    )
  return f"{key}={folder}: it has no weights ({SINGLE}), only {_listed(folder)}"


def digest(folder: pathlib.Path, *, weights: bool) -> str:
  """Returns a digest of a folder's model or adapter: of its config, and of the weights' headers."""
  adapter = is_adapter(folder)
  hashed = hashlib.sha256(files.read_bytes(folder / (ADAPTER if adapter else CONFIG), follow=True))
  if weights:
    key = "checkpoint.initialize_from"
    tensors = _header(folder / ADAPTER_WEIGHTS) if adapter else stored_tensors(folder, key)
    facts = {
      name: [one.dtype, one.shape, one.size, os.path.basename(one.path)]
      for name, one in tensors.items()
    }
    hashed.update(json.dumps(facts, sort_keys=True).encode())
  return hashed.hexdigest()[:16]
