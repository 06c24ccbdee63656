"""The catalog of data sets by name, without importing TensorFlow Datasets."""

import dataclasses
import os
import platform
import re

from etils import epath

RANDOM_NORMAL = "random_normal"
TEXT = "text"
CONVERSATIONS = "conversations"
PREFERENCES = "preferences"
PROMPTS = "prompts"
RENDERED = (CONVERSATIONS, PREFERENCES)  # by a chat template
CONVERSATION_FORMS = "'messages', 'conversations', or 'prompt' and 'completion'"
# Names of data that are read from the files that data.files names.
OF_FILES = (TEXT, *RENDERED, PROMPTS)


@dataclasses.dataclass(frozen=True)
class Embedded:
  """A data set that is built from local files; its builder is in builtin.py."""

  config: str  # "" for none, as in a TFDS path
  version: str
  splits: tuple[str, ...]
  features: dict[str, str]  # the role "text", "image" or "label" -> the feature that has it


# The Python version is the config, so that rows of two Pythons are never confused.
EMBEDDED = {
  "python_source": Embedded(
    config=f"{platform.python_implementation().lower()}-{platform.python_version()}",
    version="1.0.0",
    splits=("train", "test"),
    features={"text": "text"},
  ),
  "digits": Embedded(
    config="",
    version="1.0.0",
    splits=("train", "test"),
    features={"image": "image", "label": "label"},
  ),
}


@dataclasses.dataclass(frozen=True)
class Reference:
  """A data set as a user names it: NAME, NAME/CONFIG, NAME:VERSION or NAME/CONFIG:VERSION."""

  name: str
  config: str  # "" where the user left it open
  version: str  # "" where the user left it open

  @property
  def path(self):
    """The folder below a data_dir, as TFDS lays it out: NAME[/CONFIG][/VERSION]."""
    return "/".join(part for part in (self.name, self.config, self.version) if part)

  def __str__(self):
    named = f"{self.name}/{self.config}" if self.config else self.name
    return f"{named}:{self.version}" if self.version else named


def parse_name(name):
  """Returns the Reference that `name` spells. Raises ValueError if it is not of that form."""
  match = re.fullmatch(r"(\w+)(?:/([\w.+-]+))?(?::([\w.*]+))?", name)
  if not match:
    raise ValueError(
      f"data.name={name!r} is not the name of a data set; write NAME, NAME/CONFIG, NAME:VERSION"
      " or NAME/CONFIG:VERSION"
    )
  return Reference(*(part or "" for part in match.groups()))


def data_folder(data):
  """Returns data.data_dir as a path; '' is the default folder of TFDS."""
  default = os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
  return epath.Path(data.data_dir or default).expanduser()


def embedded_reference(reference):
  """Returns `reference` with config and version filled in, or None if this Python cannot build it.

  None also for the source code of another Python: that one can only be read from a data_dir.
  """
  entry = EMBEDDED.get(reference.name)
  if entry is None:
    return None
  if reference.config not in ("", entry.config) or reference.version not in ("", entry.version):
    return None
  return Reference(reference.name, entry.config, entry.version)
