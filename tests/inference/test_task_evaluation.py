"""Tasks: metrics from log-likelihoods by NumPy, generation, and the adapter's contexts."""

import math
import re

import numpy as np
import pytest

from inference import task_evaluation
from inference.generation import BatchGenerator
from inference.request import Request
from inference.sampler import Sampler
from inference.task_evaluation import Encoded, Metric, encode, evaluate
from inference.task_records import CHOICE, GENERATION, LIKELIHOOD, Record, Task, parse
from tests.helpers.jobs import first_state, make_job

# Bytes below the small model's vocabulary of 61: digits and signs.
VALUES = {"data.sequence_length": 32, "data.global_batch_size": 4, "model.layers": 1}


def task(kind, *records, name="t"):
  found = [parse(record, f"{name}.jsonl:{line}") for line, record in enumerate(records, 1)]
  assert {record.kind for record in found} == {kind}
  return Task(name, f"{name}.jsonl", kind, found)


@pytest.fixture(scope="module")
def made():
  job = make_job("dp4_tp2", "lm", **VALUES)
  return job, first_state(job).params


CHOICES = task(
  CHOICE,
  *(
    {"context": f"{n}+{n}:", "choices": [" 1", str(7 * n), "000"], "answer": n % 3}
    for n in range(5)
  ),
)
WORDS = task(LIKELIHOOD, *({"context": "1" * n, "answer": "23"} for n in (1, 40, 3)), name="w")


def test_the_metrics_are_those_of_the_log_likelihoods(made):
  job, params = made
  choices, words = evaluate(job, params, encode(job.config, [CHOICES, WORDS]))
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
  [sample] = task_evaluation._scored(
    Encoded(Task("t", "t", CHOICE, [record]), [], []), [found]
  ).samples
  # Per character -0.98 and -1.0, per byte -0.98 and -0.5.
  assert (sample["acc"], sample["acc_norm"], sample["acc_bytes"]) == (False, True, False)


def test_a_single_record_has_no_standard_error():
  assert Metric.of([1.0]) == Metric(1.0, None)
  assert Metric.of([True, False]).standard_error == pytest.approx(math.sqrt(0.5) / math.sqrt(2))


def test_generated_answers_are_those_of_greedy_sampling(made):
  job, params = made
  contexts = ["12", "3", "456789", "0" * 40]
  request = Request(tuple(text[-28:] for text in contexts), max_new_tokens=4, temperature=0.0)
  alone = [drawn.decode() for drawn in Sampler(job, request)(params, request)]
  records = [
    {"context": text, "answer": ["%", answer.strip() or "?"], "until": [], "max_new_tokens": 4}
    for text, answer in zip(contexts, alone, strict=True)
  ]
  records[1]["answer"] = "%%%"
  records.append({**records[0], "until": [alone[0][1]], "answer": alone[0][0]})
  given = task(GENERATION, *records)
  [result] = evaluate(job, params, encode(job.config, [given]))
  assert [sample["generated"] for sample in result.samples] == [*alone, alone[0][0]]
  assert result.metrics["exact_match"].value == 4 / 5
  assert result.truncated == 1
  prompts = encode(job.config, [given])[0].prompts
  assert BatchGenerator(job, params)(prompts, lambda number, count: number < 1) is None


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
def test_refused(made, name):
  record, message = REFUSED[name]
  kind = CHOICE if "choices" in record else GENERATION
  with pytest.raises(ValueError, match=message):
    encode(made[0].config, [task(kind, record)])
