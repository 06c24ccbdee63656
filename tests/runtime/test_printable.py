"""What is printed of a text from elsewhere: no control character reaches a terminal."""

import unicodedata

import pytest

from runtime.printable import few, printable

ORDINARY = "refused: mesh.data=3, Größe 日本語 🙂 \\ 'quoted'"
SHOWN = {
  ORDINARY: ORDINARY,
  "a\x1b[2J\x1b]0;title\x07b\r\x00\x7f\x9b31m\tc": r"a\x1b[2J\x1b]0;title\x07b\r\x00\x7f\x9b31m\tc",
  "a\u202eb\u2066c\u200bd\u2028e\ufefff": r"a\u202eb\u2066c\u200bd\u2028e\ufefff",
  "\udcff": r"\udcff",
  "first\nsecond": "first\nsecond",
  ValueError("bad \x1b[0m"): r"bad \x1b[0m",
}


@pytest.mark.parametrize("text", SHOWN)
def test_control_and_format_characters_and_lone_surrogates_are_escaped(text):
  assert printable(text) == SHOWN[text]
  printable(text).encode()


def test_no_unsafe_character_is_left_of_all_there_are():
  everything = "".join(map(chr, (*range(0x3100), *range(0xD7F0, 0xE010), *range(0xFE00, 0x11100))))
  left = {unicodedata.category(c) for c in printable(everything, longest=len(everything))}
  assert not left & {"Cf", "Cs", "Zl", "Zp"}
  assert set(printable(everything[:256], newlines=False)) == {*map(chr, range(32, 127))} | {
    c for c in map(chr, range(160, 256)) if c != "\xad"
  }


def test_line_breaks_are_kept_only_where_asked_and_long_text_is_cut():
  assert printable("host\nrefused: forged", newlines=False) == r"host\nrefused: forged"
  assert printable("x" * 30, longest=10) == "xxxxxxxxxx... (20 more characters)"


def test_the_first_of_many_are_named_and_the_others_counted():
  assert few([], 2) == ""
  assert few(["a", "b"], 2) == "a, b"
  assert few(["a", "b", "c"], 2) == "a, b and 1 more"
  assert few(["a"] * 3000, 1) == "a and 2,999 more"
