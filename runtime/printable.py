"""Text from elsewhere (peers, configs, files, variables) made safe to print on a terminal."""

import unicodedata
from collections.abc import Sequence

# Cc and Cf: control and format characters (escape sequences, bidirectional overrides, zero widths);
# Cs: lone surrogates, which cannot be encoded; Zl and Zp: separators that some terminals break at.
_UNSAFE = ("Cc", "Cf", "Cs", "Zl", "Zp")


def printable(text: object, *, newlines: bool = True, longest: int = 8_000) -> str:
  r"""Returns text in which control characters are escaped, `\x1b` for the escape character.

  Args:
    text: what was received or read; converted by `str`.
    newlines: whether line breaks are kept; a field within a sentence should have none, since text
      after a line break can pass for a message of its own.
    longest: characters that are kept; the number of the others is appended.
  """
  text = str(text)
  cut = f"... ({len(text) - longest} more characters)" if len(text) > longest else ""
  return "".join(_shown(c, newlines) for c in text[:longest]) + cut


def _shown(character: str, newlines: bool) -> str:
  if character == "\n" and newlines:
    return character
  if unicodedata.category(character) not in _UNSAFE:
    return character
  return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def few(texts: Sequence[str], most: int = 16) -> str:
  """Returns the first of some texts, and how many more there are: `a, b and 3 more`."""
  more = f" and {len(texts) - most:,} more" if len(texts) > most else ""
  return ", ".join(texts[:most]) + more
