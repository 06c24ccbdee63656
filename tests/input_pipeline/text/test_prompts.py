"""Prompts: what a record has to be, how it is written for the model, and which are held out."""

import json
import types

import numpy as np
import pytest

from input_pipeline import catalog
from input_pipeline.batches import TrainingBatches
from input_pipeline.position import Position
from input_pipeline.row_source import open_source

TEMPLATE = (
  "{% for m in messages %}<{{ m.content }}>{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture
def opened(tmp_path):
  """Returns a function of records that returns the source of a split."""

  def of(records, split="train", **keys):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    data = {
      **{"name": catalog.PROMPTS, "kind": "text", "files": str(path), "evaluation_files": ""},
      **{"evaluation_fraction": 0.3, "tokenizer": "bytes", "sequence_length": 12},
      **{"chat_template": str(tmp_path / "t.jinja"), "max_bad_records": 0, "sources": ()},
    }
    return open_source(types.SimpleNamespace(**{**data, **keys}, get=data.get), split, 0)

  return of


def test_forms_of_a_prompt(opened):
  chat = [{"role": "user", "content": "hi"}]
  records = [
    {"prompt": "2+2=", "answer": "4"},
    {"question": "2+3="},
    {"prompt": chat},
    {"messages": chat, "system": "s"},
  ]
  found = {one.text: one for split in ("train", "test") for one in opened(records, split).prompts}
  assert sorted(found) == ["2+2=", "2+3=", "<hi>a:", "<s><hi>a:"]
  assert bytes(found["2+2="].tokens.tolist()) == b"\x002+2=", "behind the start of a document"
  assert bytes(found["<hi>a:"].tokens.tolist()) == b"<hi>a:"
  assert found["2+2="].record == records[0]
  assert found["2+3="].place.endswith("prompts.jsonl:2")


def test_splits_are_by_content_and_have_all(opened):
  records = [{"prompt": f"{n}"} for n in range(50)]
  train, test = (opened(records, split) for split in ("train", "test"))
  texts = [{one.text for one in source.prompts} for source in (train, test)]
  assert not texts[0] & texts[1]
  assert texts[0] | texts[1] == {f"{n}" for n in range(50)}
  assert 5 < len(test) < 25
  again = opened(records[::-1], "test")
  assert {one.text for one in again.prompts} == texts[1]
  assert again.fingerprint != train.fingerprint
  with pytest.raises(ValueError, match="has no split 'tst'; it has train and test"):
    opened(records, "tst")


@pytest.mark.parametrize(
  ("record", "said"),
  [
    ({"text": "a"}, "it has no 'prompt' (a text, or messages), only 'text'"),
    ({"prompt": [{"role": "assistant", "content": "x"}]}, "ends with a message of the assistant"),
    ({"prompt": [{"content": "x"}]}, "message 0: it has no 'role'"),
  ],
)
def test_what_is_no_prompt_is_refused_with_its_place(opened, record, said):
  good = [{"prompt": f"{n}"} for n in range(9)]
  with pytest.raises(ValueError, match=r"1 record cannot be prompts.*prompts.jsonl:10: ") as caught:
    opened([*good, record])
  assert said in str(caught.value)
  assert len(opened([*good, record], max_bad_records=1)) < 10


def test_answers_of_a_group_are_in_one_batch(opened):
  source = opened([{"prompt": f"{n}"} for n in range(20)])
  batches = TrainingBatches(source, global_batch_size=12, seed=0, repeats=4)
  ids = np.concatenate([batches.row_ids(step) for step in range(len(source))]).reshape(-1, 4)
  assert np.all(ids == ids[:, :1])
  # Each prompt as often as any other, after as many groups as there are prompts three times.
  assert np.all(np.bincount(ids[:, 0]) == 3)
  skipping = Position.start(12).skipping([(4, 8)])
  np.testing.assert_array_equal(batches.row_ids(0, skipping)[:4], ids[0])
  assert ids[1, 0] not in batches.row_ids(0, skipping)[4:]
