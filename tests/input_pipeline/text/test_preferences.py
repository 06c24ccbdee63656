"""Preferences: the forms of a record, what is trained on, and rows with two sides."""

import json

import numpy as np
import pytest

from configs import single
from configs.schema import finalize, validate
from input_pipeline.text import chat_documents
from input_pipeline.text.chat_documents import encode_pair, parse_pair
from input_pipeline.text.chat_template import ChatTemplate
from input_pipeline.text.tokenizer import ByteTokenizer
from partitioning.mesh_sizes import resolve_sizes
from training import splits

PAIRS = "model=lm,data=preferences"
SOURCE = (
  "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}|{% endfor %}"
  "{% if add_generation_prompt %}a:{% endif %}"
)
USER = {"role": "user", "content": "why?"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("so", "no no"))
THANKS = {"role": "user", "content": "thanks"}
FORMS = {
  "texts": {"prompt": "why?", "chosen": "so", "rejected": "no no"},
  "another name": {"question": "why?", "chosen": "so", "rejected": "no no"},
  "messages": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
  "whole conversations": {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
  "a prompt that the conversations repeat": {
    "prompt": "why?",
    "chosen": [USER, GOOD],
    "rejected": [USER, BAD],
  },
  "ShareGPT": {
    "chosen": [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "so"}],
    "rejected": [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "no no"}],
  },
  "OpenAI": {
    "input": {"messages": [USER]},
    "preferred_output": [GOOD],
    "non_preferred_output": [BAD],
  },
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_the_same_pair(name):
  pair = parse_pair(FORMS[name])
  assert pair.chosen.messages == [USER, GOOD]
  assert pair.rejected.messages == [USER, BAD]
  assert pair.chosen.untrained == pair.rejected.untrained == frozenset()


def test_answers_within_the_prompt_are_context():
  prompt = [USER, GOOD, THANKS]
  pair = parse_pair({"chosen": [*prompt, GOOD], "rejected": [*prompt, BAD], "system": "kind"})
  assert [len(one.messages) for one in (pair.chosen, pair.rejected)] == [5, 5]
  assert pair.chosen.messages[0] == {"role": "system", "content": "kind"}
  assert pair.chosen.untrained == {2}


REFUSED = {
  "nothing": ({"text": "a"}, "none of 'prompt'.* only 'text'"),
  "one answer": ({"prompt": "a", "chosen": "b"}, "none of 'prompt'.* only 'prompt', 'chosen'"),
  "no prompt": ({"chosen": "a", "rejected": "b"}, "no 'prompt', and its 'chosen' is a string, not"),
  "the same": ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same"),
  "empty": ({"chosen": [USER], "rejected": [USER, BAD]}, "its 'chosen' is empty"),
  "a number": ({"prompt": "a", "chosen": "b", "rejected": [3]}, "rejected: message 1: .*a number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_record_is_refused(name):
  record, message = REFUSED[name]
  with pytest.raises(ValueError, match=message):
    parse_pair(record)


def test_both_sides_are_equally_long_and_only_answers_are_trained_on():
  template = ChatTemplate("t", {"default": SOURCE}, {})
  found = encode_pair(parse_pair(FORMS["texts"]), template, ByteTokenizer())
  assert bytes(found.tokens.tolist()) == b"u:why?|a:so|\0\0\0u:why?|a:no no|"
  chosen, rejected = np.split(found.trained, 2)
  assert "".join("-+"[int(learned)] for learned in chosen) == "---------+++---"
  assert "".join("-+"[int(learned)] for learned in rejected) == "---------++++++"
  assert found.bytes == 9
  pair = parse_pair({"prompt": [USER, GOOD], "chosen": [THANKS], "rejected": [THANKS, GOOD]})
  with pytest.raises(ValueError, match="chosen: no token of the answer is trained on"):
    encode_pair(pair, template, ByteTokenizer())


def config_of(folder, **keys):
  config = single.get_config("model=lm,data=preferences")
  keys = {
    "sequence_length": 16,
    "files": str(folder / "pairs.jsonl"),
    "data_dir": str(folder / "data"),
    **keys,
  }
  keys |= {"chat_template": str(folder / "t.jinja"), "prepare_processes": 1}
  config.data.update(keys)
  return finalize.finalize(config, "cpu")


def test_rows_have_the_sides_apart(tmp_path):
  (tmp_path / "t.jinja").write_text(SOURCE)
  records = [
    {"prompt": f"{n}", "chosen": "x" * (n % 5 + 1), "rejected": "yz" * (n % 3 + 1)}
    for n in range(10, 50)
  ]
  (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in records))
  config = config_of(tmp_path)
  assert (config.task, config.data.packing) == ("dpo", "none")
  source = splits.training_batches(config).source
  rows, seen = source.read(np.arange(len(source))), []
  assert {name: array.shape[1:] for name, array in rows.items()} == {
    name: shape for name, (shape, _) in chat_documents.pair_fields(16).items()
  }
  for row in range(len(source)):
    text = {}
    for side in chat_documents.SIDES:
      tokens, targets, weights = (
        rows[f"{side}_{key}"][row] for key in ("tokens", "targets", "weights")
      )
      assert bytes(tokens[:2].tolist()) == b"u:"
      assert (targets[:-1] == tokens[1:])[: np.count_nonzero(targets) - 1].all()
      text[side] = bytes(targets[weights > 0].tolist()).decode()
    prompt = bytes(rows["chosen_tokens"][row, 2:4].tolist()).decode()
    seen.append((prompt, text["chosen"], text["rejected"]))
  expected = {(r["prompt"], f"{r['chosen']}|", f"{r['rejected']}|") for r in records}
  assert set(seen) <= expected
  held_out = len(splits.evaluation_batches(config).source)
  assert len({*seen}) == len(seen) == len(records) - held_out
  assert rows["weights"].tolist() == [1] * len(source)
  with pytest.raises(
    ValueError, match=r"longer than a row of data\.sequence_length=12 .*pairs\.js"
  ):
    splits.training_batches(config_of(tmp_path, sequence_length=12))


@pytest.mark.parametrize(
  ("recipe", "keys", "message"),
  [
    (PAIRS, {"data.packing": "best_fit"}, "a row of data=preferences is one pair; take none"),
    (PAIRS, {"training.dpo_beta": 0.0}, r"training\.dpo_beta=0\.0: above 0"),
    (PAIRS, {"training.dpo_label_smoothing": 0.5}, "at least 0 and below 0.5"),
    (PAIRS, {"training.z_loss": 1e-4}, "the task dpo does not use it"),
    ("lm", {"training.dpo_beta": 0.5}, "the task causal_lm does not use it"),
    ("lm", {"data.name": "preferences"}, "preferences and dpo go together; choose --config=FILE"),
    ("model=mlp,data=preferences", {}, "dpo takes a transformer"),
  ],
)
def test_keys_that_do_not_go_together_are_refused(recipe, keys, message):
  config = single.get_config(recipe)
  config.update_from_flattened_dict({"data.files": "pairs.jsonl", **keys})
  with pytest.raises(ValueError, match=message):
    validate.check(finalize.finalize(config, "cpu"), resolve_sizes({}, None))
