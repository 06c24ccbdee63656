"""Bytes drawn one at a time, as text."""

import io

import pytest

from inference.request import as_bytes
from inference.sampler import Pace, Printer, Row
from input_pipeline.text.tokenizer import ByteTokenizer


def shown(row, tokens):
  """Returns what each token made appear, up to the end of the row."""
  texts = []
  for token in tokens:
    texts.append(row.add(token))
    if row.done:
      break
  return texts


def test_a_character_is_buffered_until_it_is_complete():
  row = Row(b"", [])
  assert shown(row, "aé€😀".encode()) == ["a", "", "é", "", "", "€", "", "", "", "😀"]
  assert not row.done
  assert row.end() == ""


def test_a_row_that_ends_within_a_character_says_so():
  row = Row(b"", [])
  assert shown(row, "x€".encode()[:3]) == ["x", "", ""]
  assert row.end() == "�"
  assert (row.done, bytes(row.drawn)) == (True, b"x\xe2\x82")
  assert shown(Row(b"", []), b"\xff\xffa") == ["�", "�", "a"]


def test_a_character_that_the_prompt_began_is_finished():
  assert shown(Row("€".encode()[:1], []), "€!".encode()[1:]) == ["", "€", "!"]


def test_the_end_of_the_document_ends_a_row():
  row = Row(b"", [])
  assert shown(row, [*b"ab", ByteTokenizer.end, *b"c"]) == ["a", "b", ""]
  assert (row.done, bytes(row.drawn)) == (True, b"ab")


def test_a_stop_text_ends_a_row_and_is_its_last_text():
  row = Row(b"e", ["€".encode(), b"end"])
  assert "".join(shown(row, b"nd endless")) == "nd end"  # not what the prompt began
  row = Row(b"", ["€".encode(), b"end"])
  assert "".join(shown(row, "1 € 2".encode())) == "1 €"


class Words(ByteTokenizer):
  """Tokens of several bytes, and of parts of a character; the first drops a leading space."""

  pieces = (b"", b" the", b" end", b"\xe2\x82", b"\xac", b"ing")

  def token_bytes(self, id_):
    return self.pieces[id_]

  def decode(self, ids):
    return b"".join(map(self.token_bytes, ids)).removeprefix(b" ")


def test_tokens_of_several_bytes():
  row = Row(b"", [], Words())
  assert shown(row, [1, 2, 3, 4, 5, 0, 1]) == ["the", " end", "", "€", "ing", ""]
  assert bytes(row.drawn) == "the end€ing".encode()
  assert shown(Row(b"see", [], Words()), [1]) == [" the"]


def test_a_stop_text_within_a_token_ends_the_row_behind_it():
  row = Row(b"", [b"e e", b"zz"], Words())
  assert "".join(shown(row, [1, 2, 5])) == "the e"
  assert (row.done, bytes(row.drawn)) == (True, b"the e")
  row = Row(b"", [b"in", b"ing", b"di"], Words())
  assert "".join(shown(row, [2, 5, 1])) == "endi"


def test_what_may_begin_a_hidden_stop_text_is_held_back():
  row = Row(b"", [b"<end>", b"\n\n"], hidden=True)
  written = [text for text in shown(row, b"a<b<endx\nc<en") if text]
  assert "".join(written) == "a<b<endx\nc"
  assert written == ["a", "<b", "<endx", "\nc"]
  assert [row.add(byte) for byte in b"d>"] == ["", ""]
  assert (row.done, bytes(row.drawn)) == (True, b"a<b<endx\nc")
  row = Row(b"", [b"<end>"], hidden=True)
  assert "".join(shown(row, b"at the end <e")) + row.end() == "at the end <e"


def test_bytes_of_a_command_line_come_back():
  assert as_bytes("é\udcff") == b"\xc3\xa9\xff"
  assert as_bytes(b"\xff") == b"\xff"


def test_one_prompt_is_printed_as_it_comes():
  stream = io.StringIO()
  printer = Printer(["def "], stream)
  seen = [stream.getvalue()]
  for text in ("f", "(", "x\ny"):
    printer(0, text)
    seen.append(stream.getvalue())
  printer.close()
  assert seen == ["def ", "def f", "def f(", "def f(x\ny"]
  assert stream.getvalue() == "def f(x\ny\n"


def test_several_prompts_are_printed_in_complete_lines():
  stream = io.StringIO()
  printer = Printer(["a\nb", ""], stream)
  assert stream.getvalue() == "[1] a\n"
  printer(1, "x")
  printer(0, "c\nd\ne")
  assert stream.getvalue() == "[1] a\n[1] bc\n[1] d\n"
  printer.close()
  assert stream.getvalue() == "[1] a\n[1] bc\n[1] d\n[1] e\n[2] x\n"


@pytest.mark.parametrize(
  ("encoding", "text", "wanted"),
  [
    ("utf-8", "\x1b[2J\r\x00\x9b\t€\n", "\\x1b[2J\\x0d\\x00\\x9b\t€\n"),
    ("ascii", "é€", "\\xe9\\u20ac"),
  ],
)
def test_what_a_terminal_would_obey_or_cannot_show_is_written_out(encoding, text, wanted):
  stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="")
  Printer([""], stream)(0, text)
  assert stream.buffer.getvalue().decode(encoding) == wanted


def test_the_pace_is_that_of_the_tokens_after_the_first():
  times = iter([10.0, 10.5, 11.5, 12.5])
  pace = Pace(lambda: next(times))
  assert pace.text() == "no tokens"
  pace.tick()
  assert pace.text() == "1 token; the first after 0.50 s"
  pace.tick()
  pace.tick(3)  # of several prompts at once
  assert pace.text() == "5 tokens, 2.0 tokens/s; the first after 0.50 s"
