"""A tokenizer trained once per session, and others of formats that the tests make themselves."""

import importlib.resources
import json
import pathlib
import sysconfig

import pytest

from input_pipeline.text import tokenizer, train_tokenizer

MISTRAL = importlib.resources.files("mistral_common") / "data"

# A few hundred characters of each plane of Unicode, first and last ones included.
EVERY_PLANE = "".join(
  chr(plane * 2**16 + code)
  for plane in range(17)
  for code in (*range(0, 2**16, 257), 2**16 - 1)
  if not 0xD800 <= plane * 2**16 + code < 0xE000
)


def python_files(count):
  """Returns the text of some files of Python's standard library."""
  paths = sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
  return [path.read_bytes() for path in paths[:count]]


def save(folder, content, config):
  """Writes a tokenizer.json, and a tokenizer_config.json beside it; returns the folder."""
  folder.mkdir(parents=True, exist_ok=True)
  text = content if isinstance(content, str | bytes) else json.dumps(content)
  (folder / "tokenizer.json").write_bytes(text.encode() if isinstance(text, str) else text)
  if config is not None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
  return folder


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
  """The folder of a byte-level BPE of 512 tokens, trained on files of the standard library."""
  content = train_tokenizer.train(python_files(12), 512)
  config = {"eos_token": train_tokenizer.END}
  return save(tmp_path_factory.mktemp("trained"), content, config)


@pytest.fixture(scope="session")
def bpe(trained):
  """That tokenizer."""
  return tokenizer.load(trained)
