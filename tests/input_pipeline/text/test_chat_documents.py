"""Conversations and preferences from a file to rows: masks, splits, what is left out or refused."""

import json

import numpy as np
import pytest

from configs import single
from configs.schema import finalize
from input_pipeline import mixture, row_source, store
from input_pipeline.text import chat_documents, chat_template, preparation, tokenizer
from input_pipeline.text.chat_documents import encode_pair, parse_pair
from input_pipeline.text.chat_template import ChatTemplate
from input_pipeline.text.conversations import parse
from input_pipeline.text.tokenizer import ByteTokenizer
from tests.input_pipeline.text import chats
from tests.input_pipeline.text.corpora import section
from training import splits

# ------------------------------ preferences ------------------------------

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


# ------------------------------ conversations ------------------------------

T = 192


@pytest.fixture(scope="module")
def chat(trained, tmp_path_factory):
  return chats.chat_tokenizer(trained, tmp_path_factory.mktemp("chat"), chats.CHATML)


def record(number, turns=1, words=3):
  messages = []
  for turn in range(turns):
    messages += [
      {"role": "user", "content": f"What is {number} + {turn}?"},
      {"role": "assistant", "content": "number " * words + str(number + turn)},
    ]
  return {"messages": messages}


RECORDS = [record(number, 1 + number % 3, number % 5) for number in range(60)]


@pytest.fixture
def data(tmp_path, chat):
  """Returns a function from records and keys to the config's `data` section."""

  def write(records=RECORDS, **keys):
    path = tmp_path / "chats.jsonl"
    path.write_text(
      "".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in records)
    )
    keys = {"name": "conversations", "sequence_length": T, "tokenizer": str(chat)} | keys
    return section(path, tmp_path / "data", **keys)

  return write


def encoded(records, chat, source=chats.CHATML):
  """Returns (tokens, trained) of each record, encoded without a store."""
  template = chat_template.ChatTemplate("T", {"default": source}, {})
  encoder = tokenizer.load(chat)
  found = [template.encode(parse(one), encoder) for one in records]
  return [(one.tokens.tolist(), one.trained.tolist()) for one in found]


def pieces(found):
  """Returns (inputs, targets, weights) of each segment of the rows, sorted."""
  pieces = []
  for tokens, targets, weights, segments in zip(
    *(found[name] for name in ("tokens", "targets", "weights", "segments")), strict=True
  ):
    for number in range(segments.max() + 1):
      here = segments == number
      if weights[here].any():
        pieces.append((tokens[here].tolist(), targets[here].tolist(), weights[here].tolist()))
  return sorted(pieces)


def test_a_chat_template_that_changes_meanwhile_is_refused(data, tmp_path):
  """Each shard's writer loads it, and the folder of the shards is named after the first."""
  template = tmp_path / "chat.jinja"
  template.write_text(chats.CHATML)
  keys = data(chat_template=str(template))
  path = tmp_path / "chats.jsonl"
  path.with_name("more.jsonl").write_bytes(path.read_bytes())
  keys.files = f"{tmp_path}/*.jsonl"

  def tick(*_):
    template.write_text(chats.CHATML + " ")

  with pytest.raises(ValueError, match=r"chat_template=.*chat\.jinja was changed while .* used"):
    preparation.prepare(keys, keys.files, tick=tick)


def test_each_conversation_is_in_one_row_with_its_mask(data, chat):
  keys = data()
  sources = [row_source.open_source(keys, split, 3) for split in ("train", "test")]
  found = [source.read(np.arange(len(source))) for source in sources]
  wanted = [
    (tokens[:-1], tokens[1:], [float(one) for one in trained[1:]])
    for tokens, trained in encoded(RECORDS, chat)
  ]
  assert sorted(pieces(found[0]) + pieces(found[1])) == sorted(wanted)
  report = sources[0].report
  assert report["documents"] + sources[1].report["documents"] == len(RECORDS)
  assert report["split_documents"] == report["untrained_conversations"] == 0
  assert report["rows"] < report["documents"]
  trained = sum(weights.sum() for weights in (one["weights"] for one in found))
  size = sum(
    s.bytes_per_token * one["weights"].sum() for s, one in zip(sources, found, strict=True)
  )
  assert trained == sum(sum(mask) for _, mask in encoded(RECORDS, chat))
  spoken = [m["content"] for one in RECORDS for m in one["messages"] if m["role"] == "assistant"]
  assert size == pytest.approx(sum(len(text) + len("<|im_end|>\n") for text in spoken))


def test_bad_conversations_beyond_the_limit_are_listed(data, tmp_path):
  keys = data()
  for name in "ab":
    path = tmp_path / f"{name}.jsonl"
    path.write_text(json.dumps(record(98)) + "\n{}\n")
    keys.files += f",{path}"
  keys.prepare_processes = 2
  with pytest.raises(
    ValueError, match=r"1 bad record, more than data.max_bad_records=0; "
  ) as error:
    preparation.prepare(keys, keys.files)
  assert ".jsonl:2: " in str(error.value)


def test_another_template_is_another_store_and_is_named_on_resume(data, tmp_path):
  keys = data()
  first = row_source.open_source(keys, "train", 3)
  (tmp_path / "t.jinja").write_text(chats.MARKED)
  keys.chat_template = str(tmp_path / "t.jinja")
  second = row_source.open_source(keys, "train", 3)
  assert second.tokenizer_digest == first.tokenizer_digest
  assert second.chat_template_digest != first.chat_template_digest
  assert second.fingerprint != first.fingerprint
  folders = [path for path in (tmp_path / "data/prepared/text").iterdir() if path.is_dir()]
  assert len(folders) == 2


def long_and_silent():
  silent = {"messages": [{"role": "user", "content": "Hello?"}]}
  muted = record(1)
  muted["messages"][1]["weight"] = 0
  return [*RECORDS[:5], record(7, 6), silent, *RECORDS[5:], muted, record(8, 9)]


def test_what_cannot_be_trained_on_is_refused_by_its_line(data):
  keys = data(long_and_silent(), evaluation_fraction=0.001)
  with pytest.raises(ValueError, match="without a token") as refusal:
    row_source.open_source(keys, "train", 3)
  assert str(refusal.value) == (
    f"conversations train: 2 of 63 conversations without a token to train on, the first at "
    f"{keys.files}:7 (the assistant says nothing in it that is trained, by its template and "
    f"weights); set data.untrained_conversations=drop to continue without them"
  )
  keys.untrained_conversations = "drop"
  with pytest.raises(ValueError, match="longer than a row") as refusal:
    row_source.open_source(keys, "train", 3)
  message = str(refusal.value)
  assert f"conversations longer than a row of data.sequence_length={T} tokens" in message
  assert f"the first at {keys.files}:6 (the longest takes" in message
  assert "set data.long_conversations=drop" in message
  needed = int(message.rpartition("=")[2])
  keys.sequence_length = needed
  assert row_source.open_source(keys, "train", 3).report["long_conversations"] == 0
  keys.sequence_length = needed - 1
  with pytest.raises(ValueError, match="1 of 63 conversations longer"):
    row_source.open_source(keys, "train", 3)


def test_what_cannot_be_trained_on_is_dropped_and_counted(data, chat):
  drop = {"untrained_conversations": "drop", "long_conversations": "drop"}
  keys = data(long_and_silent(), evaluation_fraction=0.001, **drop)
  source = row_source.open_source(keys, "train", 3)
  report = source.report
  assert (report["untrained_conversations"], report["long_conversations"]) == (2, 2)
  good = [one for one in encoded(RECORDS, chat) if len(one[0]) <= T + 1]
  held_out = row_source.open_source(keys, "test", 3).report["documents"]
  assert (
    report["documents"] == len(good) - held_out == len(pieces(source.read(np.arange(len(source)))))
  )
  keys.sequence_length = 4
  with pytest.raises(
    ValueError, match=r"all of its .* are left out: 2 by data.untrained_conv.*=drop, "
  ):
    row_source.open_source(keys, "train", 3)


def test_records_that_are_no_conversations_are_bad_records(data, tmp_path):
  bad = ['{"text": "a"}', "{", {"messages": []}, {"messages": [{"role": "user", "content": [{}]}]}]
  records = [*RECORDS[:2], *bad, *RECORDS[2:]]
  keys = data(records)
  with pytest.raises(ValueError, match=r"more than data.max_bad_records=0") as refusal:
    row_source.open_source(keys, "train", 3)
  assert f"{keys.files}:3: it has none of 'messages', 'conversations', or" in str(refusal.value)
  keys.max_bad_records = 4
  source = row_source.open_source(keys, "train", 3)
  assert [place.rpartition(":")[2] for place in source.bad.left_out] == ["3", "4", "5", "6"]
  prepared = preparation.prepare(keys, keys.files)
  assert [why for _, why in prepared.bad][2] == "the conversation is empty"


def test_a_record_that_the_template_refuses_is_named_with_the_template_s_message(data, tmp_path):
  (tmp_path / "t.jinja").write_text(chats.HEADERS)
  strange = {"messages": [{"role": "narrator", "content": "a"}, *record(1)["messages"]]}
  keys = data([*RECORDS, strange], chat_template=str(tmp_path / "t.jinja"))
  with pytest.raises(
    ValueError, match=r"chats.jsonl:61: data.chat_template=.*Unknown role: narrator"
  ):
    row_source.open_source(keys, "train", 3)
  (tmp_path / "t.jinja").write_text(chats.THINKING)
  with pytest.raises(ValueError, match=r"chats.jsonl:2: .* writes earlier text differently"):
    row_source.open_source(keys, "train", 3)


def test_a_shard_without_conversations_and_one_with(data, tmp_path, chat):
  keys = data(max_bad_records=1, prepare_processes=1)
  first = tmp_path / "a.jsonl"
  first.write_text("{}\n")
  keys.files = f"{first},{keys.files}"
  prepared = preparation.prepare(keys, keys.files)
  assert prepared.documents.masked
  assert prepared.documents.index["trained"].tolist() == [sum(m) for _, m in encoded(RECORDS, chat)]
  numbers = [0, 17, 59]
  assert [chat_documents.place_in_files(prepared, one).rpartition(":")[2] for one in numbers] == [
    "1",
    "18",
    "60",
  ]


def test_a_conversation_as_it_is_shown(data, chat):
  keys = data()
  prepared = preparation.prepare(keys, keys.files)
  shown = chat_documents.example(prepared, 1)
  tokens, trained = encoded(RECORDS, chat)[1]
  assert (shown.place, shown.tokens, shown.trained) == (
    f"{keys.files}:2",
    len(tokens),
    sum(trained),
  )
  assert mixture.example_conversations(keys, 2)[-1] in [
    chat_documents.example(prepared, n) for n in (1, 2)
  ]
  assert shown.segments == [
    (b"<|im_start|>user\nWhat is 1 + 0?<|im_end|>\n<|im_start|>assistant\n", False),
    (b"number 1<|im_end|>\n", True),
    (b"<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\n", False),
    (b"number 2<|im_end|>\n", True),
  ]


def test_a_mixture_of_conversations(data, tmp_path, chat):
  keys = data()
  other = tmp_path / "other.jsonl"
  other.write_text("".join(json.dumps(record(n, 1, 0)) + "\n" for n in range(500, 530)))
  keys.sources = (
    {"name": "long", "files": keys.files, "weight": 0.5},
    {"name": "short", "files": str(other), "weight": 0.5},
  )
  keys.files = ""
  source = row_source.open_source(keys, "train", 3)
  assert source.chat_template_digest == chat_template.load("", tokenizer.load(chat)).digest
  found = source.read(np.arange(len(source)))
  assert source.report["trained"] == found["weights"].sum()
  assert [part.name for part in source.parts] == ["long", "short"]
  trained = [source.report[f"trained/{part.name}"] for part in source.parts]
  rates = [part.bytes_per_token for part in source.parts]
  assert source.bytes_per_token == pytest.approx(np.average(rates, weights=trained))
  [example] = mixture.example_conversations(keys, 1)
  assert example.place.startswith(f"{keys.sources[0]['files']}:")


def test_a_conversation_that_cannot_be_read_is_not_shown(data, monkeypatch):
  keys, read, asked = data(max_bad_records=1), store.Documents.read, []
  assert len(mixture.example_conversations(keys, 2)) == 2

  def first_is_damaged(documents, records):
    asked.append(records)
    if len(asked) == 1:
      raise store.RecordError({int(records[0]): "damaged"})
    return read(documents, records)

  monkeypatch.setattr(store.Documents, "read", first_is_damaged)
  assert len(mixture.example_conversations(keys, 2)) == 1


def test_a_conversation_of_several_records_has_its_mask(data, tmp_path):
  """The store keeps at most 8192 tokens in a record, each with its part of the mask."""
  (tmp_path / "t.jinja").write_text(chats.CHATML)
  random, messages = np.random.default_rng(1), []
  for _ in range(40):
    for role in ("user", "assistant"):
      messages.append({"role": role, "content": "x" * int(random.integers(1, 900))})
  records = [record(1), {"messages": messages}, record(2)]
  keys = {"tokenizer": "bytes", "chat_template": str(tmp_path / "t.jinja")}
  keys = data(records, sequence_length=40_000, evaluation_fraction=1e-9, **keys)
  source = row_source.open_source(keys, "train", 0)
  found = source.read(np.arange(len(source)))
  template = chat_template.ChatTemplate("T", {"default": chats.CHATML}, {})
  wanted = template.encode(parse(records[1]), tokenizer.ByteTokenizer())
  assert len(wanted.tokens) > 3 * 8192
  longest = max(pieces(found), key=lambda piece: len(piece[0]))
  tokens, trained = wanted.tokens.tolist(), wanted.trained.tolist()
  assert longest == (tokens[:-1], tokens[1:], [float(one) for one in trained[1:]])
