"""A default that follows from config, platform and mesh."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Choice:
  """The value of a key that the config left unset.

  Attributes:
    key: dotted.
    value: chosen.
    why: in a few words.
  """

  key: str
  value: object
  why: str
