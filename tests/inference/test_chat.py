"""Prompts in turn as a sampler continues them, on a mesh, with the programs compiled once; and
conversations: the replies are those of the rendered text without a cache; where turns end.
"""

import dataclasses
import json

import pytest
import tokenizers

from inference import chat as chats
from inference.chat import Chat, Continuation
from inference.request import Request, text_spec
from inference.sampler import Sampler, TrainedModel
from input_pipeline.text import chat_template, tokenizer
from input_pipeline.text.tokenizer import ByteTokenizer
from tests.helpers.jobs import first_state, make_job

# Of bytes below the small model's vocabulary of 61.
TEMPLATE = """\
{%- for m in messages %}
{%- if m.role == 'system' %}{{ '%' ~ m.content ~ '%' }}
{%- elif m.role == 'user' %}{{ '<' ~ m.content ~ '*' }}
{%- elif m.role == 'assistant' %}{{ '$' ~ m.content ~ END }}
{%- else %}{{ raise_exception('no role ' ~ m.role) }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '$' }}{% endif %}"""
VALUES = {"data.sequence_length": 40, "data.global_batch_size": 4, "model.layers": 1}
GREEDY = Request((), max_new_tokens=6, temperature=0.0)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  """Returns a function from what ends a turn to a job with such a template; and parameters."""
  job, folder = make_job("dp4_tp2", "lm", **VALUES), tmp_path_factory.mktemp("templates")

  def template(end):
    path = folder / f"{len(list(folder.iterdir()))}.jinja"
    path.write_text(TEMPLATE.replace("END", repr(end)))
    with job.config.unlocked():
      job.config.data.chat_template = str(path)
    return job

  return template, first_state(job).params


@pytest.fixture(scope="module")
def continued(made):
  """Returns a function from a text to what follows it, without a cache that is kept."""
  template, params = made
  sampler = Sampler(template("!"), Request(((0,) * 34,), max_new_tokens=6))

  def follows(text):
    request = Request((tuple(text.encode()),), max_new_tokens=6, temperature=0.0)
    [drawn] = sampler(params, request)
    return drawn.decode(errors="replace")

  return follows


def test_replies_are_those_of_the_rendered_text_without_a_cache(made, continued, monkeypatch):
  monkeypatch.setattr(chats, "PIECE", 4)  # so that a prompt is read in several pieces
  template, params = made
  job = template("&&&&")
  chat, written = Chat(TrainedModel(job, params), GREEDY, system="00"), []
  first = chat.reply("123456", written.append)
  assert first == "".join(written) == continued("%00%<123456*$")
  second = chat.reply("7", written.append)
  rendered = f"%00%<123456*${first}&&&&<7*$"
  assert second == continued(rendered)
  assert chat.messages == [
    {"role": "system", "content": "00"},
    {"role": "user", "content": "123456"},
    {"role": "assistant", "content": first},
    {"role": "user", "content": "7"},
    {"role": "assistant", "content": second},
  ]
  # The next turn no longer fits: the first exchange is left out, the system's message stays.
  third = chat.reply("8", written.append)
  assert third == continued(f"%00%<7*${second}&&&&<8*$")
  assert chat.dropped == 2
  with pytest.raises(ValueError, match=r"50 tokens.* with 6 for the reply .*sequence_length=40"):
    chat.reply("1" * 43, written.append)
  assert [m["content"] for m in chat.messages] == ["00", "7", second, "8", third], "nothing is kept"

  # Where a turn of the assistant ends, a reply does.
  whole = continued("<12*$")
  assert len({*whole}) > 3, whole
  chat.messages.clear()
  calls = []
  cut = chat.reply("12", written.append, lambda: calls.append(0) or len(calls) == 3)
  assert cut == whole[:3] == chat.messages[-1]["content"]
  chat.messages.clear()
  written.clear()
  chat.ends = chat_template.TurnEnds(frozenset(), (whole[2:4],))
  assert chat.reply("12", written.append) == whole[:2] == "".join(written)


def test_a_chat_without_a_template_is_refused(made):
  job = made[0]("!")
  with job.config.unlocked():
    job.config.data.chat_template = ""
  with pytest.raises(ValueError, match=r"--chat: .*bytes has no chat template"):
    chats.prepare(text_spec(job.config), GREEDY)
  with pytest.raises(ValueError, match="max_new_tokens=-1"):
    chats.prepare(text_spec(made[0]("!").config), Request((), max_new_tokens=-1))


# ---- What ends a turn ----


def of_words(folder, config, generation=None):
  """Returns a tokenizer whose document ends with <eos> and that has a token <turn>."""
  library = tokenizers.Tokenizer(tokenizers.models.BPE({chr(n + 33): n for n in range(94)}, []))
  library.add_special_tokens(["<eos>", "<turn>", "<call>"])
  library.save(str(folder / "tokenizer.json"))
  (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", **config}))
  if generation:
    (folder / "generation_config.json").write_text(json.dumps(generation))
  return tokenizer.load(folder)


def test_the_token_behind_a_turn_and_those_of_the_generation_config_end_it(tmp_path):
  text = "{% for m in messages %}{{ m.role }}:{{ m.content }}<turn>\n{% endfor %}"
  encoder = of_words(tmp_path, {"chat_template": text}, {"eos_token_id": [96, 10**6]})
  special = encoder.special
  assert special["<turn>"] != special["<eos>"] == encoder.end
  found = chat_template.turn_ends(chat_template.load("", encoder), encoder)
  assert found.texts == ()
  assert found.tokens == {special["<turn>"], special["<eos>"], special["<call>"]}


@pytest.mark.parametrize(
  ("behind", "texts"), [("|\n", ("|",)), ("\n", ("\n",)), ("", ()), (" END. ", ("END.",))]
)
def test_a_text_behind_a_turn_ends_it(behind, texts):
  source = "{% for m in messages %}{{ m.content ~ " + repr(behind) + " }}{% endfor %}"
  template = chat_template.ChatTemplate("t", {"default": source}, {})
  assert chat_template.turn_ends(template, ByteTokenizer()) == chat_template.TurnEnds(
    frozenset({0}), texts
  )


# ---- Prompts in turn ----

SETTINGS = Request((), max_new_tokens=9, temperature=1.0, seed=5)
PROMPT = "0123456"


@pytest.fixture(scope="module")
def model(made):
  template, params = made
  return TrainedModel(template("!"), params)


@pytest.fixture(scope="module")
def continuation(model):
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(chats, "PIECE", 4)  # a prompt is read in several pieces
    yield Continuation(model, SETTINGS)


def test_the_first_is_what_a_sampler_draws_and_the_next_by_the_next_seed(model, continuation):
  written = []
  found = [continuation(PROMPT, written.append), continuation(PROMPT[:3], written.append)]
  sampler = Sampler(model.job, dataclasses.replace(SETTINGS, prompts=(PROMPT,)))
  for drawn, prompt, seed in zip(found, (PROMPT, PROMPT[:3]), (5, 6), strict=True):
    request = dataclasses.replace(SETTINGS, prompts=(prompt,), seed=seed)
    assert sampler(model.params, request) == [drawn]
  assert found[0] != found[1]
  assert "".join(written) == "".join(one.decode(errors="replace") for one in found)
  assert continuation.sampler.pace.tokens == sampler.pace.tokens == 9


def test_a_text_ends_by_a_cut_at_a_stop_text_and_where_the_row_is_full(continuation):
  assert len(continuation(PROMPT, lambda text: None, lambda: True)) == 1
  assert continuation.sampler.pace.tokens == 1
  continuation.settings = dataclasses.replace(SETTINGS, max_new_tokens=1000, temperature=0.0)
  drawn = continuation(PROMPT, lambda text: None)
  assert len(drawn) == 40 - len(PROMPT) + 1
  stop = drawn[3:5].decode(errors="replace")
  continuation.settings = dataclasses.replace(continuation.settings, stop=(stop,))
  assert continuation(PROMPT, lambda text: None) == drawn[: drawn.find(stop.encode()) + 2]


def test_what_does_not_fit_is_refused(model, continuation):
  with pytest.raises(ValueError, match=r"40 tokens .*sequence_length=40, .*the prompt to 39"):
    continuation("0" * 40, print)
  with pytest.raises(ValueError, match=r"has byte 122 at position 0; .*vocabulary_size=61"):
    continuation("z", print)
  with pytest.raises(ValueError, match="top_k=-1"):
    Continuation(model, dataclasses.replace(SETTINGS, top_k=-1))
