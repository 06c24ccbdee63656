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
  """A data set that is made of local files; see `embedded`."""

  config: str  # "" for none, as in a TFDS path
  version: str
  features: dict[str, str]  # the role "text", "image" or "label" -> the feature that has it


# The Python version is the config, so that rows of two Pythons are never confused.
EMBEDDED = {
  "python_source": Embedded(
    config=f"{platform.python_implementation().lower()}-{platform.python_version()}",
    version="1.0.0",
    features={"text": "text"},
  ),
  "digits": Embedded(
    config="",
    version="1.0.0",
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
  """Returns `reference` with config and version filled in, or None if it is no embedded data set.

  The source code of another Python keeps its config: it can only be read from a data_dir.
  """
  entry = EMBEDDED.get(reference.name)
  if entry is None:
    return None
  config, version = reference.config or entry.config, reference.version or entry.version
  return Reference(reference.name, config, version)


def is_made_here(reference):
  """Returns whether a complete Reference is of an embedded data set of this Python."""
  entry = EMBEDDED.get(reference.name)
  return entry is not None and (reference.config, reference.version) == (
    entry.config,
    entry.version,
  )


def embedded_feature(reference, role, wanted):
  """Returns the feature of an embedded data set that has a role; see `tfds.choose_feature`."""
  features = EMBEDDED[reference.name].features
  if wanted not in ("", features.get(role)) or role not in features:
    named = f" {wanted!r}" if wanted else ""
    raise ValueError(
      f"data set {reference} has no feature{named} that can be the {role} (data.{role}_feature);"
      f" it has {', '.join(f'{name} ({role})' for role, name in features.items())}"
    )
  return features[role]


def unknown_split(reference, split, sizes):
  """Returns the refusal of a split that a data set does not have; sizes: name -> examples."""
  return f"data set {reference} has no split {split!r}; it has {_listed(sizes)}"


def empty_split(reference, split, sizes):
  """Returns the refusal of a split without examples."""
  return f"split {split!r} of data set {reference} is empty; its splits: {_listed(sizes)}"


def _listed(sizes):
  return ", ".join(f"{name} ({size} examples)" for name, size in sizes.items())
