"""Records of tasks: forms and refusals; their scores beside those computed by hand."""

import gzip
import json
import math
import re

import numpy as np
import pytest

from inference import task_evaluation
from inference.request import Request
from inference.sampler import BatchGenerator, Sampler, TrainedModel
from inference.task_evaluation import (
  CHOICE,
  GENERATION,
  LIKELIHOOD,
  Encoded,
  Metric,
  Record,
  Task,
  TaskEvaluator,
  encode,
  parse_record,
  read_tasks,
)
from tests.helpers.jobs import first_state, make_job

# ------------------------------ records ------------------------------

RECORD_CHOICES = {"context": "2+2=", "choices": ["3", "4"], "answer": 1}


def write(path, *records):
  path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
  return str(path)


def test_the_three_kinds(tmp_path):
  files = [
    write(tmp_path / "arc.jsonl", RECORD_CHOICES, {**RECORD_CHOICES, "answer": "3", "id": 7}),
    write(tmp_path / "lambada.jsonl", {"context": "a", "answer": " b"}),
    write(
      tmp_path / "gsm.jsonl",
      {"context": [{"role": "user", "content": "2+2?"}], "answer": ["4", "four"], "until": []},
      {"context": "2", "answer": "4", "until": ["\n"], "max_new_tokens": 3, "pattern": "is (.*)"},
    ),
  ]
  arc, gsm, lambada = read_tasks(",".join(files))
  assert [arc.kind, gsm.kind, lambada.kind] == [CHOICE, GENERATION, LIKELIHOOD]
  assert [arc.name, gsm.name, lambada.name] == ["arc", "gsm", "lambada"]
  assert [record.answer for record in arc.records] == [1, 0]
  assert arc.records[1].where == f"{tmp_path}/arc.jsonl:2"
  assert lambada.records[0].choices == (" b",)
  first, second = gsm.records
  assert (first.answers, first.until) == (("4", "four"), ())
  assert first.max_new_tokens == task_evaluation.NEW_TOKENS
  assert (second.answers, second.max_new_tokens, second.pattern.pattern) == (("4",), 3, "is (.*)")
  (tmp_path / "t.jsonl.gz").write_bytes(gzip.compress(json.dumps(RECORD_CHOICES).encode()))
  assert read_tasks(f"{tmp_path}/t.jsonl.gz")[0].name == "t"


BAD = {
  "a null": ({"context": None, "answer": "b"}, "its 'context' is null"),
  "no answer": ({"context": "a", "choices": ["b", "c"]}, "has no 'answer', only 'context', 'choi"),
  "another key": ({"contxt": "a", "answer": "b"}, "no 'context'.*; 'contxt' is another key"),
  "an answer that is no choice": ({**RECORD_CHOICES, "answer": "5"}, "'5' is not among.*'3', '4'"),
  "a number that is true": ({**RECORD_CHOICES, "answer": True}, "True is not among its choices"),
  "one choice": ({**RECORD_CHOICES, "choices": ["4"]}, "1 of 'choices'; a choice needs at least 2"),
  "a context of numbers": (
    {**RECORD_CHOICES, "context": 4},
    "'context' is a number, not a string or",
  ),
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
    parse_record(record, "x")


def test_bad_records_are_listed_with_file_and_line(tmp_path):
  path = tmp_path / "t.jsonl"
  path.write_text(f'{json.dumps(RECORD_CHOICES)}\n{{"context": "a"}}\nnot JSON\n')
  with pytest.raises(ValueError, match="2 records cannot be scored") as caught:
    read_tasks(str(path))
  lines = str(caught.value).splitlines()
  assert lines[1].startswith(f"  {path}:2: it has no 'answer'")
  assert lines[2].startswith(f"  {path}:3: invalid JSON")


def test_files_that_are_no_task_are_refused(tmp_path):
  mixed = write(tmp_path / "mixed.jsonl", RECORD_CHOICES, {"context": "a", "answer": "b"})
  with pytest.raises(ValueError, match=r"mixed\.jsonl:2 is exact match, likelihood, and .*:1 is m"):
    read_tasks(mixed)
  with pytest.raises(ValueError, match=r"empty\.jsonl is empty"):
    read_tasks(write(tmp_path / "empty.jsonl"))
  with pytest.raises(ValueError, match=r"missing\.jsonl"):
    read_tasks(f"{tmp_path}/missing.jsonl")
  (tmp_path / "a.txt").write_text("a")
  with pytest.raises(ValueError, match=r"a\.txt is not a \.jsonl file"):
    read_tasks(f"{tmp_path}/a.txt")
  (tmp_path / "two").mkdir()
  one, other = (
    write(folder / "t.jsonl", RECORD_CHOICES) for folder in (tmp_path, tmp_path / "two")
  )
  with pytest.raises(ValueError, match="would have the same name"):
    read_tasks(f"{one},{other}")


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
  path = tmp_path / "a.jsonl"
  path.write_text('{"context": "a", "answer": "b"}\n')

  def parse_and_append(value, where):
    path.write_text(path.read_text() * 2)
    return parse_record(value, where)

  monkeypatch.setattr(task_evaluation, "parse_record", parse_and_append)
  with pytest.raises(ValueError, match=r"a\.jsonl had 32 bytes of .* and now has 64"):
    read_tasks(str(path))


# ------------------------------ evaluation ------------------------------

# Bytes below the small model's vocabulary of 61: digits and signs.
VALUES = {"data.sequence_length": 32, "data.global_batch_size": 4, "model.layers": 1}


def task(kind, *records, name="t"):
  found = [parse_record(record, f"{name}.jsonl:{line}") for line, record in enumerate(records, 1)]
  assert {record.kind for record in found} == {kind}
  return Task(name, f"{name}.jsonl", kind, found)


@pytest.fixture(scope="module")
def model():
  job = make_job("dp4_tp2", "lm", **VALUES)
  return TrainedModel(job, first_state(job).params)


CHOICES = task(
  CHOICE,
  *(
    {"context": f"{n}+{n}:", "choices": [" 1", str(7 * n), "000"], "answer": n % 3}
    for n in range(5)
  ),
)
WORDS = task(LIKELIHOOD, *({"context": "1" * n, "answer": "23"} for n in (1, 40, 3)), name="w")


def test_the_metrics_are_those_of_the_log_likelihoods(model):
  choices, words = TaskEvaluator(model.job, encode(model.spec, [CHOICES, WORDS]))(model.given)
  for name, divisor in (("acc", lambda text: 1), ("acc_norm", len), ("acc_bytes", len)):
    right = [
      np.argmax(
        [value / divisor(text) for value, text in zip(s["log_likelihoods"], r.choices, strict=True)]
      )
      == r.answer
      for s, r in zip(choices.samples, CHOICES.records, strict=True)
    ]
    assert choices.metrics[name].value == np.mean(right)
    error = np.sqrt(np.mean(right) * (1 - np.mean(right)) / (len(right) - 1))
    assert choices.metrics[name].standard_error == pytest.approx(error)
  assert (choices.truncated, words.truncated) == (0, 1)
  losses = [-sample["log_likelihoods"][0] for sample in words.samples]
  assert words.metrics["answer_loss"].value == pytest.approx(np.mean(losses))
  assert [sample["where"] for sample in words.samples] == ["w.jsonl:1", "w.jsonl:2", "w.jsonl:3"]


def test_bytes_and_characters_differ():
  record = Record("x", CHOICE, "", ("aaaa", "éé"), 0)
  found = [task_evaluation.Score(value, False, 0) for value in (-3.9, -2.0)]
  [sample] = task_evaluation._scored(Encoded(Task("t", "t", CHOICE, [record])), [found]).samples
  # Per character -0.98 and -1.0, per byte -0.98 and -0.5.
  assert (sample["acc"], sample["acc_norm"], sample["acc_bytes"]) == (False, True, False)


def test_a_single_record_has_no_standard_error():
  assert Metric.of([1.0]) == Metric(1.0, None)
  assert Metric.of([True, False]).standard_error == pytest.approx(math.sqrt(0.5) / math.sqrt(2))


def test_generated_answers_are_those_of_greedy_sampling(model):
  contexts = ["12", "3", "456789", "0" * 40]
  request = Request(tuple(text[-28:] for text in contexts), max_new_tokens=4, temperature=0.0)
  alone = [drawn.decode() for drawn in Sampler(model.job, request)(model.params, request)]
  records = [
    {"context": text, "answer": ["%", answer.strip() or "?"], "until": [], "max_new_tokens": 4}
    for text, answer in zip(contexts, alone, strict=True)
  ]
  records[1]["answer"] = "%%%"
  records.append({**records[0], "until": [alone[0][1]], "answer": alone[0][0]})
  given = task(GENERATION, *records)
  [result] = TaskEvaluator(model.job, encode(model.spec, [given]))(model.given)
  assert [sample["generated"] for sample in result.samples] == [*alone, alone[0][0]]
  assert result.metrics["exact_match"].value == 4 / 5
  assert result.truncated == 1
  requests = encode(model.spec, [given])[0].requests
  assert BatchGenerator(model.job)(model.given, requests, lambda done, count: done < 1) is None


def test_a_pattern_takes_the_answer_out_of_the_text():
  def answer(pattern, text):
    record = Record("x", GENERATION, "", pattern=pattern and re.compile(pattern))
    return task_evaluation.extracted(record, text)

  assert answer(None, " 4\n") == "4"
  assert answer("#### (.*)", "so\n#### 42 \nand") == "42"
  assert answer("[0-9]+", "it is 17, or 18") == "17"
  assert answer("#### (.*)", "nothing") == ""


REFUSED = {
  "a token that the model does not know": (
    {"context": "a", "choices": ["1", "2"], "answer": 0},
    r"t\.jsonl:1: .*has token 97; .*model\.vocabulary_size=61",
  ),
  "a choice longer than a row": (
    {"context": "1", "choices": ["1", "2" * 33], "answer": 0},
    r"t\.jsonl:1: '2+': it has 33 tokens.*data\.sequence_length=32",
  ),
  "more new tokens than a row has": (
    {"context": "1", "answer": "1", "until": [], "max_new_tokens": 32},
    r"t\.jsonl:1: max_new_tokens=32 leaves no place for a prompt",
  ),
  "messages without a chat template": (
    {"context": [{"role": "user", "content": "1"}], "choices": ["1", "2"], "answer": 0},
    r"t\.jsonl:1: .*bytes has no chat template",
  ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(model, name):
  record, message = REFUSED[name]
  kind = CHOICE if "choices" in record else GENERATION
  with pytest.raises(ValueError, match=message):
    encode(model.spec, [task(kind, record)])
