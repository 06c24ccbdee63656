"""Conversations on a terminal and in a file: what is trained on can be told apart."""

import io

from rich.console import Console

from commands import prepare
from input_pipeline.text.chat_documents import Example

EXAMPLE = Example("a\x1b.jsonl:3", 1234, 2, [("ä[b]\x1b[0m ".encode(), False), (b"\xe2\n", True)])


def printed(terminal):
  out = io.StringIO()
  console = Console(file=out, force_terminal=terminal, highlight=False, soft_wrap=True)
  console.print(prepare.conversation_heading(EXAMPLE, terminal))
  console.print(prepare.conversation_text(EXAMPLE.segments, terminal))
  return out.getvalue()


def test_in_brackets_without_a_terminal():
  assert printed(False) == (
    "a\\x1b.jsonl:3: 1,234 tokens, of which the 2 in [[brackets]] are trained on:\n"
    "ä[b]\\x1b[0m [[\ufffd\n]]\n"
  )


def test_of_a_long_part_the_beginning_is_shown():
  shown = prepare.conversation_text([(b"a" * 5000, True)], False)
  assert shown.plain == f"[[{'a' * 2000}... (3000 more characters)]]"


def test_highlighted_on_a_terminal(monkeypatch):
  monkeypatch.setenv("TERM", "xterm")
  monkeypatch.delenv("NO_COLOR", raising=False)
  shown = printed(True)
  assert "ä[b]\\x1b[0m \x1b[30;42m\ufffd" in shown
  assert "[[" not in shown
