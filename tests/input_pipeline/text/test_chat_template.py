"""Chat templates: rendered as plain Jinja renders them, and which tokens are trained on."""

import datetime
import json

import jinja2
import jinja2.ext
import numpy as np
import pytest

from input_pipeline.text import chat_template, tokenizer
from input_pipeline.text.conversations import Conversation, parse
from tests.input_pipeline.text import chats
from tests.input_pipeline.text.conftest import EVERY_PLANE, MISTRAL

TURNS = [
  {"role": "system", "content": "Be brief."},
  {"role": "user", "content": "Was heißt „🦊“ auf Englisch?"},
  {"role": "assistant", "content": "  fox\n\n"},
  {"role": "user", "content": "<b>und</b> 狐?"},
  {"role": "assistant", "content": "Wieder fox — 'same' & \"done\""},
]
TOOLS = [{"type": "function", "function": {"name": "lookup", "description": "für <Wörter>"}}]


@pytest.fixture(scope="module")
def chat(trained, tmp_path_factory):
  """The folder of a tokenizer with special tokens of turns, and a template as ChatML's."""
  folder = tmp_path_factory.mktemp("chat")
  config = {"bos_token": chats.HEADER, "additional_special_tokens": [chats.IM_END]}
  return chats.chat_tokenizer(trained, folder, chats.CHATML, config)


@pytest.fixture(scope="module")
def encoder(chat):
  return tokenizer.load(chat)


def template(source, **special):
  return chat_template.ChatTemplate("T", {"default": source}, special)


def plain(source, **variables):
  """Returns what Jinja renders with the settings that chat templates are written for."""
  environment = jinja2.Environment(
    trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
  )
  environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
  return environment.from_string(source).render(variables)


def trained_text(found, encoder):
  """Returns the bytes of the runs of tokens that are trained on."""
  runs, last = [], False
  for id_, learned in zip(found.tokens.tolist(), found.trained.tolist(), strict=True):
    if learned:
      runs[-1:] = [runs[-1] + encoder.token_bytes(id_)] if last else [*runs[-1:], b""]
      if not last:
        runs[-1] = encoder.token_bytes(id_)
    last = learned
  return runs


# ------------------------------ rendering ------------------------------


@pytest.mark.parametrize("source", [chats.CHATML, chats.HEADERS, chats.THINKING])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_rendered_as_plain_jinja_renders_it(source, tools):
  found = template(source, bos_token="<s>").render(Conversation(TURNS, tools), prompt=True)
  assert found == plain(
    source, messages=TURNS, tools=tools, add_generation_prompt=True, bos_token="<s>"
  )
  assert found.count("heißt „🦊“") == 1


def test_a_rendering_written_out():
  found = template(chats.HEADERS, bos_token="<s>").render(Conversation(TURNS[1:3], TOOLS))
  tools = '[{"type": "function", "function": {"name": "lookup", "description": "für <Wörter>"}}]'
  assert found == (
    f"<s><|start_header_id|>system<|end_header_id|>\n\nFunctions: {tools}<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nWas heißt „🦊“ auf Englisch?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nfox<|eot_id|>"
  )


def test_what_templates_may_call():
  source = (
    "{%- for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
    "{{ {'a': '<ü>'} | tojson }} {{ {'a': [1]} | tojson(indent=1) }} {{ strftime_now('%Y-%m-%d') }}"
    " {{ documents is none }} {{ tools is none }} {{ date_string }}{% endfor %}"
  )
  found = template(source).render(Conversation(TURNS, variables={"date_string": "today"}))
  date = datetime.date(2025, 1, 1)
  assert found == f'{{"a": "<ü>"}} {{\n "a": [\n  1\n ]\n}} {date} True True today'


# ------------------------------ what is trained on ------------------------------


@pytest.mark.parametrize("source", [chats.CHATML, chats.MARKED])
def test_trained_is_what_the_assistant_writes_with_the_end_of_its_turn(encoder, source):
  found = template(source).encode(Conversation(TURNS), encoder)
  end = "" if source == chats.MARKED else "\n"
  wanted = [f"  fox\n\n<|im_end|>{end}", f"Wieder fox — 'same' & \"done\"<|im_end|>{end}"]
  assert trained_text(found, encoder) == [text.encode() for text in wanted]
  assert found.bytes == sum(len(text.encode()) for text in wanted)
  assert found.text == template(chats.CHATML).render(Conversation(TURNS))
  # The library's own offsets, of the file as it is, give the same tokens and borders.
  encoding = encoder._library.encode(found.text, add_special_tokens=False)
  assert encoding.ids == found.tokens.tolist()
  spans = [(found.text.index(text), found.text.index(text) + len(text)) for text in wanted]
  inside = [any(a <= i and j <= b for a, b in spans) for i, j in encoding.offsets]
  assert found.trained.tolist() == inside


@pytest.mark.parametrize("source", [chats.CHATML, chats.MARKED])
def test_messages_of_weight_0_are_context(encoder, source):
  messages = [*TURNS[:2], {**TURNS[2], "weight": 0}, *TURNS[3:]]
  found = template(source).encode(parse({"messages": messages}), encoder)
  [only] = trained_text(found, encoder)
  assert only.startswith(b"Wieder fox")
  assert only.rstrip().endswith(b"<|im_end|>")
  nothing = [*TURNS[:2], {**TURNS[2], "weight": 0}]
  found = template(source).encode(parse({"messages": nothing}), encoder)
  assert found.bytes == 0
  assert not found.trained.any()


def test_a_template_that_drops_earlier_thinking_is_refused_by_name(encoder):
  thinking = template(chats.THINKING)
  one = thinking.encode(Conversation(TURNS[:3]), encoder)
  assert trained_text(one, encoder) == [b"<think>\n\n</think>\n\n  fox\n\n<|im_end|>\n"]
  with pytest.raises(
    ValueError,
    match=r"T writes earlier text differently when the messages after message 2 are added.*"
    r"Train on the last turn only.*data.chat_template",
  ):
    thinking.encode(Conversation(TURNS), encoder)
  last = thinking.encode(Conversation(TURNS, untrained=frozenset({2})), encoder)
  [only] = trained_text(last, encoder)
  assert only.startswith(b"<think>\n\n</think>\n\nWieder fox")


def test_a_prompt_that_the_turn_does_not_begin_with_is_refused(encoder):
  source = chats.CHATML.replace("<|im_start|>assistant\\n' }}\n{%- endif", "Answer:' }}\n{%- endif")
  assert source != chats.CHATML
  with pytest.raises(ValueError, match=r"when message 2 is added.*Answer:"):
    template(source).encode(Conversation(TURNS), encoder)


MACRO = """\
{%- macro turn(text) %}{% generation %}{{ text }}{{ eos_token }}{% endgeneration %}{% endmacro %}
{%- for message in messages %}
  {%- set written %}{% if message.role == 'assistant' %}{{ turn(message.content) }}
  {%- else %}{{ '[' + message.content + ']' }}{% endif %}{% endset %}
  {{- written FILTER }}
{%- endfor %}"""


def test_marks_in_macros_and_captured_text():
  messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": " cd "}] * 2
  source = MACRO.replace("FILTER", "")
  text, spans = template(source, eos_token="$").trained(Conversation(messages))
  assert text == "[ab] cd $[ab] cd $"
  assert spans == [(4, 9), (13, 18)]
  changed = template(MACRO.replace("FILTER", "| trim"), eos_token="")
  with pytest.raises(ValueError, match="T changes the text that it marks"):
    changed.trained(Conversation(messages))


def test_a_token_that_straddles_a_border_is_not_trained(bpe):
  """The prompt ends within it, so the model is never asked for it."""
  pieces = [bpe.token_bytes(id_) for id_ in range(bpe.size)]
  merged = next(id_ for id_, piece in enumerate(pieces) if len(piece) == 4 and piece.isalpha())
  word = pieces[merged].decode()
  assert [merged] == bpe.encode_template(word)[0].tolist()
  source = "{{ messages[0].content }}{% for m in messages[1:] %}{{ m.content }}{% endfor %}"
  for cut in (1, 3):
    messages = [("user", "?" + word[:cut]), ("assistant", word[cut:] + ".;")]
    conversation = Conversation([{"role": r, "content": c} for r, c in messages])
    found = template(source).encode(conversation, bpe)
    tokens = [bpe.token_bytes(id_).decode() for id_ in found.tokens]
    assert tokens[1] == word
    assert not found.trained[:2].any()
    assert found.trained[2:].all()
    assert len(tokens) > 2
    assert found.bytes == len(word) - cut + 2


def test_trained_tokens_by_hand():
  # a text of 6 characters, of which 2, 3 and 4 are trained on
  offsets = [(0, 2), (1, 3), (2, 3), (2, 3), (3, 5), (4, 6), (2, 2), (5, 5), (6, 6)]
  trained = [0, 0, 1, 1, 1, 0, 1, 0, 0]
  found = chat_template.trained_tokens(np.array(offsets), 6, [(2, 4), (4, 5)])
  assert found.tolist() == [bool(one) for one in trained]
  whole = chat_template.trained_tokens(np.array([(0, 1), (1, 2)]), 2, [(0, 2)])
  assert whole.tolist() == [False, True], "nothing precedes the first token"
  assert chat_template.trained_tokens(np.zeros((0, 2), np.int64), 0, []).tolist() == []


def test_characters_of_all_planes(encoder):
  """Bytes of a character are tokens of their own; each belongs to its character."""
  messages = [{"role": r, "content": EVERY_PLANE[::7]} for r in ("user", "assistant")]
  found = template(chats.CHATML).encode(Conversation(messages), encoder)
  [run] = trained_text(found, encoder)
  assert run.decode() == EVERY_PLANE[::7] + "<|im_end|>\n"
  assert found.bytes == len(run)


def test_sentencepiece_as_its_owner_encodes_conversations():
  """Ids from mistral_common 1.13.1's own encoding of the same conversation, not of a template."""
  pytest.importorskip("sentencepiece")
  encoder = tokenizer.load(MISTRAL / "mistral_instruct_tokenizer_240323.model.v3")
  source = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' ~ m.content ~ "
    "'[/INST]' }}{% else %}{{ ' ' ~ m.content ~ eos_token }}{% endif %}{% endfor %}"
  )
  asked = [("What is 2+2?", "It is 4."), ("And\n 3 x 3?", "  Nine – ok")]
  messages = [
    {"role": role, "content": content}
    for pair in asked
    for role, content in zip(("user", "assistant"), pair, strict=True)
  ]
  chosen = chat_template.ChatTemplate(
    "T", {"default": source}, {"bos_token": "<s>", "eos_token": "</s>"}
  )
  found = chosen.encode(Conversation(messages), encoder)
  first = [1, 3, 2592, 1117, 29473, 29518, 29574, 29518, 29572, 4]
  answer = [1429, 1117, 29473, 29549, 29491, 2]
  second = [3, 1783, 781, 29473, 29538, 2086, 29473, 29538, 29572, 4]
  last = [1027, 1186, 1241, 1532, 4382, 2]
  assert found.tokens.tolist() == [*first, *answer, *second, *last]
  mask = [0] * len(first) + [1] * len(answer) + [0] * len(second) + [1] * len(last)
  assert found.trained.tolist() == [bool(one) for one in mask]


# ------------------------------ which template ------------------------------


def test_the_template_of_a_tokenizer(chat, encoder, trained, tmp_path):
  found = chat_template.load("", encoder)
  assert found.name == str(chat / "chat_template.jinja")
  assert not found.marked
  assert found.render(Conversation(TURNS)) == plain(chats.CHATML, messages=TURNS)

  named = [{"name": "default", "template": chats.MARKED}, {"name": "tool_use", "template": "x"}]
  config = {"chat_template": named, "bos_token": {"content": chats.HEADER}}
  folder = chats.chat_tokenizer(trained, tmp_path / "listed", config=config)
  listed = chat_template.load("", tokenizer.load(folder))
  assert listed.marked
  assert listed.name == f"chat_template of {folder / 'tokenizer_config.json'}"
  assert listed.digest != found.digest
  assert listed.render(Conversation(TURNS, TOOLS)) == "x"

  own = tmp_path / "own.jinja"
  own.write_text("{{ bos_token }}{{ eos_token }}{{ unk_token }}|")
  chosen = chat_template.load(str(own), encoder)
  assert chosen.render(Conversation(TURNS)) == chats.HEADER + "<|endoftext|>|"
  from_json = chat_template.load(str(folder / "tokenizer_config.json"), encoder)
  assert from_json.render(Conversation(TURNS, TOOLS)) == "x"


def test_digest_depends_on_the_template_and_on_its_special_tokens(encoder, tmp_path):
  assert template("a").digest == template("a").digest
  others = [template("b"), template("a", eos_token="x"), template("a", eos_token="y")]
  assert len({template("a").digest, *(one.digest for one in others)}) == 4


@pytest.mark.parametrize(
  ("config", "message"),
  [
    ({}, "has no chat template, neither in .*data.chat_template"),
    ({"chat_template": 4}, "tokenizer_config.json: chat_template is not a text, nor a list"),
    ({"chat_template": [{"name": "x"}]}, "is not a text, nor a list of objects"),
    ({"chat_template": [{"name": "rag", "template": "x"}]}, "has the templates rag, and none"),
    ({"chat_template": "{% if %}"}, "tokenizer_config.json, line 1: Expected an expression"),
    ({"chat_template": "a\n{% generation %}x"}, "line 2: Unexpected end of template"),
    ({"chat_template": "a\n{{ messages | nosuch }}"}, "line 2: No filter named 'nosuch'"),
    ({"chat_template": "{{ messages | random }}"}, "line 1: No filter named 'random'"),
  ],
)
def test_no_template_that_can_be_used(trained, tmp_path, config, message):
  folder = chats.chat_tokenizer(trained, tmp_path / "t", config=config)
  with pytest.raises(ValueError, match=message):
    chat_template.load("", tokenizer.load(folder))


def test_a_file_that_cannot_be_read(encoder, tmp_path):
  with pytest.raises(ValueError, match=r"data.chat_template=/nowhere.jinja: .* cannot be read"):
    chat_template.load("/nowhere.jinja", encoder)
  (tmp_path / "latin.jinja").write_bytes(b"\xe4")
  with pytest.raises(ValueError, match="not valid UTF-8"):
    chat_template.load(str(tmp_path / "latin.jinja"), encoder)
  with pytest.raises(ValueError, match=r"has no chat template.*data.chat_template"):
    chat_template.load("", tokenizer.ByteTokenizer())


@pytest.mark.parametrize(
  ("source", "message"),
  [
    ("{{ raise_exception('Roles must alternate') }}", "T refuses the conversation: Roles must"),
    ("\n{{ messages[0].name.first }}", "T, line 2: 'dict object' has no attribute 'name'"),
    ("{{ nothing.x }}", "T, line 1: 'nothing' is undefined"),
    ("\n\n{{ 'a' + 1 }}", "T, line 3: TypeError: can only concatenate str"),
    ("{{ messages[0].__class__.__mro__ }}", "T, line 1: access to attribute '__class__'"),
    ("{{ messages.append(1) }}", "T, line 1: .*append.*unsafe|not safely callable"),
    ("{% for i in range(1000000) %}{% endfor %}", "T, line 1: OverflowError: Range too big"),
  ],
)
def test_a_template_that_fails_has_its_own_message(source, message):
  with pytest.raises(ValueError, match=message):
    template(source).render(Conversation(TURNS))
