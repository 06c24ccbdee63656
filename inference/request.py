"""What a model reads and draws, what is asked of a sampler, and its prompts as tokens."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from ml_collections import ConfigDict

from input_pipeline.source import Source, UnreadableError
from input_pipeline.text import tokenizer
from models import MODELS, Generator
from runtime import forms
from training.tasks import TASKS

# What a training run continues, by data.name; of other data the beginning of a row.
OPENINGS = {"python_source": "def "}
WORDS, ROWS = 6, 16  # of that beginning, if it is no conversation; rows that are tried
# Where a person looks: the likelier tokens, which say more about a model than rare ones do.
TEMPERATURE, TOP_K = 0.8, 50
MAX_NEW_TOKENS = 64  # by default, where a row has room for them

Prompt = str | bytes | tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class TextSpec:
  """What a model reads and draws: its tokenizer, and the rows that it was trained on.

  Attributes:
    model: `model.name`.
    tokenizer: of its texts.
    begins: whether it has learned texts behind the token that begins a document.
    sequence_length: the most tokens of a row.
    vocabulary_size: of the model; it knows the tokens below.
    chat_template: `data.chat_template`; "": the tokenizer's own.
    positions: the most tokens of any row: later positions are not learned; 0: there is no limit.
  """

  model: str
  tokenizer: tokenizer.Tokenizer
  begins: bool
  sequence_length: int
  vocabulary_size: int
  chat_template: str
  positions: int = 0

  def fitting(self, prompts: Sequence[Prompt], most: int = MAX_NEW_TOKENS) -> int:
    """Returns how many tokens, at most so many, can be drawn behind each prompt; at least 1."""
    longest = max((len(tokens) for tokens in self.encoded(prompts)), default=0)
    return max(1, min(most, self.sequence_length - longest))

  @property
  def drawable(self) -> int:
    """Returns how many token ids may be drawn: those that stand for something."""
    return min(self.vocabulary_size, self.tokenizer.size)

  def shown(self, prompt: Prompt) -> str | bytes:
    """Returns a prompt as it is shown: of token ids, with the names of special tokens."""
    if not isinstance(prompt, tuple):
      return prompt
    special = {id_: name.encode() for name, id_ in self.tokenizer.special.items()}
    return b"".join(special.get(id_) or self.tokenizer.token_bytes(id_) for id_ in prompt)

  def encoded(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
    """Returns each prompt's tokens, at least one: an empty prompt begins a document.

    A prompt follows the token from which documents are begun where the model has learnt them from
    it: packed documents all begin with it, and a tokenizer with a BOS has it before each text.

    Raises:
      ValueError: a prompt is not text, and the tokenizer takes nothing else.
    """
    start = np.array([self.tokenizer.start], np.uint32)
    found = []
    for number, prompt in enumerate(prompts, 1):
      if isinstance(prompt, tuple):
        found.append(np.array(prompt, np.uint32))
        continue
      try:
        [ids] = self.tokenizer.encode([as_bytes(prompt)])
      except ValueError as error:
        raise ValueError(f"prompt {number}: {error}") from error
      found.append(np.concatenate([start, ids]) if self.begins or not len(ids) else ids)
    return found

  def unseen(self, prompts: Sequence[Prompt]) -> str:
    """Returns a sentence on characters of prompts that the model has never read; "" for none."""
    known = self.tokenizer.characters
    if known is None:
      return ""
    texts = [as_bytes(p).decode(errors="ignore") for p in prompts if not isinstance(p, tuple)]
    return tokenizer.unseen_text("the prompt", {*"".join(texts)} - known)


def text_spec(config: ConfigDict) -> TextSpec:
  """Returns what the model of a finalized config reads and draws.

  Raises:
    ValueError: its tokenizer cannot be read.
  """
  model, data = config.model, config.data
  coder = _loaded(data.tokenizer or tokenizer.BYTES)
  return TextSpec(
    model.name,
    coder,
    coder.has_bos or data.packing != "concatenate",
    data.sequence_length,
    model.get("vocabulary_size") or 0,
    data.get("chat_template") or "",
    0 if model.get("positions") in (None, "rotary") else model.max_positions,
  )


_loaded = functools.lru_cache(maxsize=4)(tokenizer.load)


def as_bytes(text: str | bytes) -> bytes:
  """Returns UTF-8; bytes that Python smuggled through a command line as surrogates come back."""
  return text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")


@dataclasses.dataclass(frozen=True)
class Request:
  """What is asked for.

  Attributes:
    prompts: texts, or bytes that need not be complete characters; one may be empty. Or token ids,
      taken as they are: at least one.
    max_new_tokens: the most tokens drawn per prompt.
    temperature: divides the logits; 0 takes the likeliest token.
    top_k: draws among the k likeliest; 0 is off.
    top_p: draws among the fewest likeliest that together have this probability; 1 is off.
    seed: of the draws, which depend on (seed, number of the prompt, position) alone.
    stop: texts; a row ends with the first of them in what was drawn.
    stop_tokens: tokens that end a row as the end of a document does, and are no part of the text.
  """

  prompts: tuple[Prompt, ...]
  max_new_tokens: int = MAX_NEW_TOKENS
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  seed: int = 0
  stop: tuple[str | bytes, ...] = ()
  stop_tokens: tuple[int, ...] = ()


def check(spec: TextSpec, request: Request) -> None:
  """Finds what cannot be sampled, before anything is read or compiled.

  Raises:
    ValueError: with all that is wrong, a line each.
  """
  if not isinstance(MODELS[spec.model], Generator):
    raise ValueError(
      f"model.name={spec.model!r} has no next token to draw; sample takes a transformer, "
      f"such as --config=FILE:lm"
    )
  if wrong := [*_settings(spec, request), *_prompts(spec, request)]:
    raise forms.refusal("the sampling is refused:", wrong)


def _settings(spec: TextSpec, request: Request) -> Iterator[str]:
  choices = spec.drawable
  if request.max_new_tokens < 1:
    yield f"max_new_tokens={request.max_new_tokens}: at least 1"
  if not 0 <= request.temperature < math.inf:
    yield f"temperature={request.temperature}: 0 (the likeliest token) or more, and finite"
  if not 0 <= request.top_k <= choices:
    yield f"top_k={request.top_k}: 0 (off) to {choices}, the number of tokens there are"
  if not 0 < request.top_p <= 1:
    yield f"top_p={request.top_p}: above 0 and at most 1 (off)"
  if not 0 <= request.seed < 2**32:
    yield f"seed={request.seed}: 0 or more and below 2**32"
  if any(not stop for stop in request.stop):
    yield "stop: an empty text would end every row at once; leave it out"


def _prompts(spec: TextSpec, request: Request) -> Iterator[str]:
  if not request.prompts:
    yield "no prompt; give at least one (an empty one starts a document)"
  limit, new, choices = spec.sequence_length, request.max_new_tokens, spec.drawable
  try:
    prompts = spec.encoded(request.prompts)
  except ValueError as error:
    yield str(error)
    return
  of_bytes = spec.tokenizer.name == tokenizer.BYTES
  for number, tokens in enumerate(prompts, 1):
    length = len(tokens)
    if new >= 1 and length + new > limit:
      shorter = [f"shorten the prompt to {limit - new}"] if new < limit else []
      fewer = [f"set max_new_tokens={limit - length}"] if length < limit else []
      ways = [*shorter, *fewer]
      if spec.positions > limit:
        ways.append(f"or raise data.sequence_length up to model.max_positions={spec.positions}")
      elif not spec.positions:
        ways.append("or raise data.sequence_length for this command")
      note = f"its positions are learned, model.max_positions={spec.positions} of them"
      if not spec.positions:
        note = "rotary positions have no limit, but longer texts are untrained"
      yield (
        f"prompt {number} is {length} tokens{' (bytes)' * of_bytes} long, with "
        f"max_new_tokens={new} together "
        f"{length + new}; the limit is data.sequence_length={limit}, the positions that the model "
        f"was trained on; {', '.join(ways)} ({note})"
      )
    if max(tokens) >= choices:
      place = int(np.argmax(tokens >= choices))
      yield (
        f"prompt {number} has {'byte' if of_bytes else 'token'} {tokens[place]} at position {place}"
        f"; the model has only tokens below model.vocabulary_size={choices}"
      )


def first_words(config: ConfigDict, source: Source) -> Request | None:
  """Returns what a run samples: a short continuation, or None where there is no text to draw.

  Args:
    config: of the run.
    source: the rows of its evaluation split.

  Raises:
    ValueError: the run could not draw what `evaluation.sample_tokens` asks for.
  """
  asked = config.evaluation.sample_tokens
  if not TASKS[config.task].of_tokens or asked < 1:
    return None
  try:
    spec = text_spec(config)
    prompt = OPENINGS.get(config.data.name) or _beginning(spec, source)
    if isinstance(prompt, str) and spec.tokenizer.name != tokenizer.BYTES:
      prompt = prompt.rstrip()  # the space begins the next token: a text rarely goes on after one
    room = spec.sequence_length - len(spec.encoded([prompt])[0])
    if room < 1:
      return None
    request = Request(
      (prompt,),
      max_new_tokens=min(asked, room),
      temperature=TEMPERATURE,
      top_k=min(TOP_K, spec.drawable),
      **(_turn_ends(spec) if isinstance(prompt, tuple) else {}),
    )
    check(spec, request)
  except ValueError as error:
    raise ValueError(f"evaluation.sample_tokens={asked} (0 turns it off): {error}") from error
  return request


def _beginning(spec: TextSpec, source: Source) -> Prompt:
  """Returns the beginning of the first row that leaves half of it to be drawn; "" of none.

  That is of a conversation all before the first token that is trained on, and of other texts the
  first words.
  """
  side = "" if "tokens" in source.fields else "chosen_"  # of a pair
  if f"{side}tokens" not in source.fields:
    return ""
  try:
    rows = source.read(np.arange(min(len(source), ROWS)))
  except UnreadableError:
    return ""
  for tokens_T, weights_T in zip(rows[f"{side}tokens"], rows[f"{side}weights"], strict=True):
    trained = np.flatnonzero(weights_T)
    if len(trained) and trained[0] == 0:
      ids = [
        id_ for id_ in tokens_T.tolist() if id_ not in (spec.tokenizer.start, spec.tokenizer.end)
      ]
      text = spec.tokenizer.decode(ids[: spec.sequence_length // 2]).decode(errors="ignore")
      return " ".join(text.strip().partition("\n")[0].split(" ")[:WORDS])
    if len(trained) and trained[0] < spec.sequence_length // 2:
      return tuple(tokens_T[: trained[0] + 1].tolist())
  return ""


def _turn_ends(spec: TextSpec) -> dict[str, tuple]:
  """Returns what ends the assistant's turn, as fields of a request; {} without a template."""
  from input_pipeline.text import chat_template  # of conversations alone

  try:
    template = chat_template.load(spec.chat_template, spec.tokenizer)
    found = chat_template.turn_ends(template, spec.tokenizer)
  except ValueError:
    return {}
  return {"stop_tokens": tuple(found.tokens), "stop": found.texts}
