"""A conversation as text: what is trained on is highlighted, or in brackets without a terminal."""

from collections.abc import Sequence

from rich.text import Text

from input_pipeline.text.chat_documents import Example
from runtime.printable import printable

TRAINED = "black on green"
OPEN, CLOSE = "[[", "]]"
_LONGEST = 2_000  # characters of a part that are shown


def heading(example: Example, colors: bool) -> Text:
  """Returns a line above a conversation: where it is from, and how much of it is trained on."""
  how = "highlighted" if colors else f"in {OPEN}brackets{CLOSE}"
  return Text(
    f"{printable(example.place, newlines=False)}: {example.tokens:,} tokens, of which the "
    f"{example.trained:,} {how} are trained on:",
    style="bold" if colors else "",
  )


def text(segments: Sequence[tuple[bytes, bool]], colors: bool) -> Text:
  """Returns a conversation.

  Args:
    segments: its text in parts, each with whether it is trained on.
    colors: whether a terminal shows it.
  """
  shown = Text()
  for content, trained in segments:
    part = printable(content.decode(errors="replace"), longest=_LONGEST)
    if trained and colors:
      shown.append(part, TRAINED)
    else:
      shown.append(f"{OPEN}{part}{CLOSE}" if trained else part)
  return shown
