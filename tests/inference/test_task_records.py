"""Records of tasks: what is read, and what is refused with file and line."""

import gzip
import json

import pytest

from inference import task_records
from inference.task_records import CHOICE, GENERATION, LIKELIHOOD, parse, read

CHOICES = {"context": "2+2=", "choices": ["3", "4"], "answer": 1}


def write(path, *records):
  path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
  return str(path)


def test_the_three_kinds(tmp_path):
  files = [
    write(tmp_path / "arc.jsonl", CHOICES, {**CHOICES, "answer": "3", "id": 7}),
    write(tmp_path / "lambada.jsonl", {"context": "a", "answer": " b"}),
    write(
      tmp_path / "gsm.jsonl",
      {"context": [{"role": "user", "content": "2+2?"}], "answer": ["4", "four"], "until": []},
      {"context": "2", "answer": "4", "until": ["\n"], "max_new_tokens": 3, "pattern": "is (.*)"},
    ),
  ]
  arc, gsm, lambada = read(",".join(files))
  assert [arc.kind, gsm.kind, lambada.kind] == [CHOICE, GENERATION, LIKELIHOOD]
  assert [arc.name, gsm.name, lambada.name] == ["arc", "gsm", "lambada"]
  assert [record.answer for record in arc.records] == [1, 0]
  assert arc.records[1].where == f"{tmp_path}/arc.jsonl:2"
  assert lambada.records[0].choices == (" b",)
  first, second = gsm.records
  assert (first.answers, first.until) == (("4", "four"), ())
  assert first.max_new_tokens == task_records.NEW_TOKENS
  assert (second.answers, second.max_new_tokens, second.pattern.pattern) == (("4",), 3, "is (.*)")
  (tmp_path / "t.jsonl.gz").write_bytes(gzip.compress(json.dumps(CHOICES).encode()))
  assert read(f"{tmp_path}/t.jsonl.gz")[0].name == "t"


BAD = {
  "a null": ({"context": None, "answer": "b"}, "its 'context' is null"),
  "no answer": ({"context": "a", "choices": ["b", "c"]}, "has no 'answer', only 'context', 'choi"),
  "another key": ({"contxt": "a", "answer": "b"}, "no 'context'.*; 'contxt' is another key"),
  "an answer that is no choice": ({**CHOICES, "answer": "5"}, "'5' is not among.*'3', '4'"),
  "a number that is no choice": ({**CHOICES, "answer": 2}, "'answer' is 2; its choices are 0 to 1"),
  "a number that is true": ({**CHOICES, "answer": True}, "True is not among its choices"),
  "one choice": ({**CHOICES, "choices": ["4"]}, "1 of 'choices'; a choice needs at least 2"),
  "an empty choice": ({**CHOICES, "choices": ["", "4"]}, "an empty string is in its 'choices'"),
  "choices that are no list": ({**CHOICES, "choices": "34"}, "'choices' is a string, not a list"),
  "a context of numbers": ({**CHOICES, "context": 4}, "'context' is a number, not a string or"),
  "messages without a role": ({**CHOICES, "context": [{"content": "a"}]}, "message 0: .*no 'role'"),
  "an answer of numbers": ({"context": "a", "answer": 4}, "a number is in its 'answer'"),
  "a pattern and no until": (
    {"context": "a", "answer": "b", "pattern": "c"},
    "'pattern' and no 'until', so nothing is generated",
  ),
  "a broken pattern": (
    {"context": "a", "answer": "b", "until": [], "pattern": "("},
    "not a regular expression",
  ),
  "no tokens": (
    {"context": "a", "answer": "b", "until": [], "max_new_tokens": 0},
    "'max_new_tokens' is 0, not a number of at least 1",
  ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_record_is_refused(name):
  record, message = BAD[name]
  with pytest.raises(ValueError, match=f"(?s){message}"):
    parse(record, "x")


def test_bad_records_are_listed_with_file_and_line(tmp_path):
  path = tmp_path / "t.jsonl"
  path.write_text(f'{json.dumps(CHOICES)}\n{{"context": "a"}}\nnot JSON\n')
  with pytest.raises(ValueError, match="2 records cannot be scored") as caught:
    read(str(path))
  lines = str(caught.value).splitlines()
  assert lines[1].startswith(f"  {path}:2: it has no 'answer'")
  assert lines[2].startswith(f"  {path}:3: invalid JSON")


def test_files_that_are_no_task_are_refused(tmp_path):
  mixed = write(tmp_path / "mixed.jsonl", CHOICES, {"context": "a", "answer": "b"})
  with pytest.raises(ValueError, match=r"mixed\.jsonl:2 is exact match, likelihood, and .*:1 is m"):
    read(mixed)
  with pytest.raises(ValueError, match=r"empty\.jsonl is empty"):
    read(write(tmp_path / "empty.jsonl"))
  with pytest.raises(ValueError, match=r"missing\.jsonl"):
    read(f"{tmp_path}/missing.jsonl")
  (tmp_path / "a.txt").write_text("a")
  with pytest.raises(ValueError, match=r"a\.txt is not a \.jsonl file"):
    read(f"{tmp_path}/a.txt")
  (tmp_path / "two").mkdir()
  one, other = (write(folder / "t.jsonl", CHOICES) for folder in (tmp_path, tmp_path / "two"))
  with pytest.raises(ValueError, match="would have the same name"):
    read(f"{one},{other}")


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
  path = tmp_path / "a.jsonl"
  path.write_text('{"context": "a", "answer": "b"}\n')

  def parse_and_append(value, where):
    path.write_text(path.read_text() * 2)
    return parse(value, where)

  monkeypatch.setattr(task_records, "parse", parse_and_append)
  with pytest.raises(ValueError, match=r"a\.jsonl had 32 bytes and now has 64"):
    read(str(path))
