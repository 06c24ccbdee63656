"""training/metrics/console.py: what fits in a line, and which terminals can rewrite one."""

import sys

import pytest

from training.metrics import console

PARTS = ["step 1/9", "loss 2.5", "grad_norm 1.0", "memory 1.0 GiB", "left 0:01"]


@pytest.mark.parametrize(
  ("width", "kept"),
  [(80, PARTS), (60, PARTS), (59, [*PARTS[:2], *PARTS[3:]]), (44, [*PARTS[:2], PARTS[4]])],
)
def test_a_narrow_terminal_leaves_out_the_least_important_first(width, kept):
  text = console.fitting(PARTS, ["grad_norm 1.0", "memory 1.0 GiB"], width)
  assert text.split("  ") == kept


def test_what_does_not_fit_is_cut():
  assert console.fitting(PARTS, [], 12) == "step 1/9  lo"


@pytest.mark.parametrize(
  ("term", "tty", "rewrites"),
  [("xterm", True, True), ("xterm", False, False), ("dumb", True, False), (None, True, False)],
)
def test_lines_are_rewritten_on_capable_terminals_alone(monkeypatch, term, tty, rewrites):
  monkeypatch.delenv("TERM", raising=False)
  if term is not None:
    monkeypatch.setenv("TERM", term)
  monkeypatch.setattr(sys.stdout, "isatty", lambda: tty, raising=False)
  assert console.on_terminal() is rewrites


def test_sentences_break_between_words_and_are_indented():
  text = "chosen: training.loss_chunks=1, model.dtype=float32\n  a loop at models/layer_stack.py:4"
  assert console.wrapped(text, 40).split("\n") == [
    "chosen: training.loss_chunks=1,",
    "  model.dtype=float32",
    "  a loop at models/layer_stack.py:4",
  ]
  assert console.wrapped(text, 60) == text
  path = "workdir: " + "/folder" * 8  # can be copied
  assert console.wrapped(path, 40).split("\n") == ["workdir:", "  " + "/folder" * 8]
  assert console.wrapped("a\n\nb", 40) == "a\n\nb"


@pytest.mark.parametrize("terminal", [True, False])
def test_what_is_not_a_terminal_gets_each_sentence_as_one_line(monkeypatch, capsys, terminal):
  monkeypatch.setenv("COLUMNS", "12")
  monkeypatch.setattr(console, "on_terminal", lambda: terminal)
  console.say_wrapped("two words, and more")
  assert capsys.readouterr().out == (
    "two words,\n  and more\n" if terminal else "two words, and more\n"
  )
