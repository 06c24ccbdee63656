"""Chat templates: what turns a conversation into a text, and which of its tokens are trained on.

The template is the tokenizer's, or the file of data.chat_template; it is rendered as Hugging Face's
`apply_chat_template` does. Trained on is what the template marks with `{% generation %}`; if it
marks nothing, what each message of the assistant adds to the text: the rendering of the messages up
to and including it, after that of the messages before it with the prompt for the assistant
(`add_generation_prompt`). So the end of the turn that the template writes is learned, too.

Nothing in a rendering depends on when or where it is made: `strftime_now` tells a fixed date, and
the filter `random` is missing.
"""

import contextlib
import dataclasses
import datetime
import hashlib
import json
import re
import secrets
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import numpy as np
from etils import epath

from input_pipeline.text import tokenizer, tokenizer_files
from input_pipeline.text.conversations import ASSISTANT, Conversation

KEY = "chat_template"  # of tokenizer_config.json
DATE = datetime.datetime(2025, 1, 1)
_DEFAULT, _WITH_TOOLS = "default", "tool_use"  # of templates with names
_MORE_SPECIAL = "additional_special_tokens"
# Around what is marked, while a template is rendered for its marks; no text contains them.
_BEGIN, _END = (f"\ufdd0{secrets.token_hex(8)}{mark}" for mark in "<>")
_MARKS = re.compile(f"({_BEGIN}|{_END})")
_EXCERPT = 24  # characters around a difference
_FILENAME = "<template>"  # of Jinja's frames in a traceback

Span = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Encoded:
  """A conversation as tokens.

  Attributes:
    text: what the template wrote.
    tokens: uint32 [L].
    trained: bool [L], which of them are trained on; never the first, which nothing precedes.
    bytes: of what is trained on, in UTF-8.
  """

  text: str
  tokens: np.ndarray
  trained: np.ndarray
  bytes: int


class ChatTemplate:
  """The chat template of a tokenizer.

  Attributes:
    name: where it is from, for messages.
    digest: of the templates and of the special tokens that they can write.
    marked: whether it says with `{% generation %}` what is trained on.
  """

  def __init__(self, name: str, sources: Mapping[str, str], special: Mapping[str, Any]):
    """Compiles a template.

    Args:
      name: where it is from.
      sources: name -> text of the template; `default`, and `tool_use` for conversations with tools.
      special: variable -> special token, such as `eos_token`.

    Raises:
      ValueError: its syntax is wrong; with the line.
    """
    self.name, self._special = name, dict(special)
    facts = json.dumps([dict(sources), self._special], sort_keys=True)
    self.digest = hashlib.sha256(facts.encode(errors="surrogatepass")).hexdigest()
    self._environment = _environment()
    self._templates = {}
    for key, source in sources.items():
      try:
        self._templates[key] = self._environment.from_string(source)
      except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"{name}, line {error.lineno}: {error.message}") from error
      except Exception as error:  # Python compiles what Jinja writes, which may be no program
        raise ValueError(f"{name} is not a template of Jinja ({error})") from error
    self.marked = self._environment.marked

  def render(
    self, conversation: Conversation, messages: Sequence[Any] | None = None, prompt: bool = False
  ) -> str:
    """Returns the text of a conversation.

    Args:
      conversation: the conversation.
      messages: those of its messages that are rendered; by default all.
      prompt: whether the prompt for the assistant follows (`add_generation_prompt`).

    Raises:
      ValueError: the template fails, or refuses it; with its own message.
    """
    chosen = _WITH_TOOLS if conversation.tools and _WITH_TOOLS in self._templates else _DEFAULT
    variables = {**self._special, **conversation.variables}
    try:
      return self._templates[chosen].render(
        {
          **variables,
          "messages": conversation.messages if messages is None else messages,
          "tools": conversation.tools,
          "documents": None,
          "add_generation_prompt": prompt,
        }
      )
    except _RefusedError as error:
      raise ValueError(f"{self.name} refuses the conversation: {error}") from error
    except Exception as error:  # a template is a program: it may raise anything
      frames = traceback.extract_tb(error.__traceback__)
      lines = [frame.lineno for frame in frames if frame.filename == _FILENAME]
      place = f", line {lines[-1]}" if lines else ""
      kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
      raise ValueError(f"{self.name}{place}: {kind}{error}") from error

  def trained(self, conversation: Conversation) -> tuple[str, list[Span]]:
    """Returns the text of a conversation, and the characters that are trained on.

    Returns:
      the text; and the spans of characters from (inclusive) and to (exclusive), in order.

    Raises:
      ValueError: the template fails, or it does not tell what a message adds.
    """
    text = self.render(conversation)
    learned = [
      number
      for number, message in enumerate(conversation.messages)
      if message["role"] == ASSISTANT and number not in conversation.untrained
    ]
    if not self.marked:
      return text, self._added(conversation, text, learned)
    spans = self._marked(conversation, text)
    if conversation.untrained:
      added = self._added(conversation, text, sorted(conversation.untrained))
      spans = [part for span in spans for part in _without(span, added)]
    return text, spans

  def encode(self, conversation: Conversation, encoder: tokenizer.Tokenizer) -> Encoded:
    """Returns the tokens of a conversation; raises ValueError as `trained` does."""
    text, spans = self.trained(conversation)
    tokens, offsets = encoder.encode_template(text)
    size = sum(len(text[start:stop].encode()) for start, stop in spans)
    return Encoded(text, tokens, trained_tokens(offsets, len(text), spans), size)

  def _added(self, conversation: Conversation, text: str, numbers: Sequence[int]) -> list[Span]:
    """Returns the characters that messages add to the text."""
    spans, messages = [], conversation.messages
    for number in numbers:
      before = self.render(conversation, messages[:number], prompt=True)
      last = number + 1 == len(messages)
      until = text if last else self.render(conversation, messages[: number + 1])
      for one, other, what in (
        (before, until, f"message {number} is added"),
        (until, text, f"the messages after message {number} are added"),
      ):
        if not other.startswith(one):
          raise ValueError(_not_prefix(self.name, one, other, what))
      spans.append((len(before), len(until)))
    return spans

  def _marked(self, conversation: Conversation, text: str) -> list[Span]:
    """Returns the characters that the template marks."""
    with self._environment.marking():
      parts = _MARKS.split(self.render(conversation))
    # A template may change what it has marked, as the filter `trim` does around a macro.
    if "".join(parts[::2]) != text:
      raise ValueError(
        f"{self.name} changes the text that it marks with {{% generation %}}, with a filter around "
        f"the block; move the block to where the text is written"
      )
    spans, depth, place = [], 0, 0
    for part in parts:
      if part in (_BEGIN, _END):
        depth += 1 if part == _BEGIN else -1
      else:
        if depth > 0 and part:
          spans.append((place, place + len(part)))
        place += len(part)
    return spans


def trained_tokens(offsets: np.ndarray, length: int, spans: Sequence[Span]) -> np.ndarray:
  """Returns which tokens are trained on, bool [L].

  A token is, if all its characters are. One that straddles the border of a span is not: where it
  begins in the prompt, the prompt that a user sends ends within it, and the model is never asked
  for it; where it ends in the next turn, it says what others write.

  Args:
    offsets: int [L, 2], the characters of each token, from (inclusive) and to (exclusive).
    length: of the text, in characters.
    spans: of characters.
  """
  inside = np.zeros(length + 1, np.int64)
  for start, stop in spans:
    inside[start:stop] = 1
  before = np.concatenate([[0], np.cumsum(inside)])
  start, stop = offsets[:, 0], np.maximum(offsets[:, 1], offsets[:, 0])
  # A token without characters, as a space that a tokenizer adds, belongs to what follows it.
  stop = np.where(stop == start, start + 1, stop)
  trained = before[stop] - before[start] == stop - start
  trained[:1] = False
  return trained


def _without(span: Span, others: Sequence[Span]) -> Iterator[Span]:
  """Yields what is left of a span without others, which are in order and do not overlap."""
  start, stop = span
  for first, last in others:
    if first < stop and start < last:
      if start < first:
        yield start, first
      start = max(start, last)
  if start < stop:
    yield start, stop


def _not_prefix(name: str, one: str, other: str, what: str) -> str:
  pairs = zip(one, other, strict=False)
  place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
  part = slice(max(0, place - _EXCERPT), place + _EXCERPT)
  return (
    f"{name} writes earlier text differently when {what}, so that it does not show what to train "
    f"on: {one[part]!r} becomes {other[part]!r}. Some templates drop earlier thinking, or end the "
    f'last turn in another way. Train on the last turn only ("weight": 0 in the earlier messages '
    f"of the assistant), or mark what is trained with {{% generation %}} in a copy of the template "
    f"and name that with data.chat_template"
  )


# ------------------------------ Jinja ------------------------------


class _RefusedError(jinja2.TemplateError):
  """A template has called raise_exception."""


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
  """Jinja as chat templates expect it.

  Attributes:
    marked: whether a template with a generation block was compiled.
  """

  marked = False
  active = False

  @contextlib.contextmanager
  def marking(self) -> Iterator[None]:
    """Lets the generation blocks write marks around their text."""
    self.active = True
    try:
      yield
    finally:
      self.active = False


class _Generation(jinja2.ext.Extension):
  """The block `{% generation %}...{% endgeneration %}`: what the assistant is trained to write."""

  tags = {"generation"}  # noqa: RUF012 as Jinja declares it

  def parse(self, parser: Any) -> jinja2.nodes.Node:
    """Returns the node of a block."""
    line = next(parser.stream).lineno
    body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
    self.environment.marked = True
    return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

  def _mark(self, caller: Any) -> str:
    text = caller()
    return f"{_BEGIN}{text}{_END}" if self.environment.active else text


def _environment() -> _Environment:
  environment = _Environment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[_Generation, jinja2.ext.loopcontrols],
  )
  environment.filters["tojson"] = _to_json
  environment.globals["raise_exception"] = _raise
  environment.globals["strftime_now"] = DATE.strftime
  del environment.filters["random"], environment.globals["lipsum"]
  return environment


def _raise(message: str) -> None:
  raise _RefusedError(message)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
  """Returns JSON; Jinja's own filter escapes what HTML would read."""
  return json.dumps(
    value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
  )


# ------------------------------ the template of a tokenizer ------------------------------


def load(spec: str, encoder: tokenizer.Tokenizer) -> ChatTemplate:
  """Returns the chat template of a run.

  Args:
    spec: data.chat_template: a file with a template, or a JSON file with one under
      `chat_template`; "": the tokenizer's, which is in chat_template.jinja or in
      tokenizer_config.json beside it.
    encoder: the tokenizer.

  Raises:
    ValueError: there is none, it cannot be read, or its syntax is wrong.
  """
  special = _special(encoder)
  if spec:
    path = epath.Path(spec).expanduser()
    name = f"data.chat_template={spec}"
    if path.suffix == ".json":
      return ChatTemplate(name, _named_templates(tokenizer_files.read_object(path), path), special)
    return ChatTemplate(name, {_DEFAULT: _read(path, name)}, special)
  if path := encoder.files.get(tokenizer_files.TEMPLATE_FILE):
    return ChatTemplate(str(path), {_DEFAULT: _read(path, "data.tokenizer")}, special)
  if path := encoder.files.get(tokenizer_files.CONFIG_FILE):
    config = tokenizer_files.read_object(path)
    if config.get(KEY) is not None:
      return ChatTemplate(f"{KEY} of {path}", _named_templates(config, path), special)
  raise ValueError(
    f"data.tokenizer={encoder.name} has no chat template, neither in a "
    f"{tokenizer_files.TEMPLATE_FILE} nor under {KEY} of a {tokenizer_files.CONFIG_FILE} beside it"
    f"; name a file with one with data.chat_template"
  )


def _read(path: epath.Path, name: str) -> str:
  try:
    return tokenizer_files.as_str(tokenizer_files.read(path))
  except ValueError as error:
    raise ValueError(f"{name}: {path} cannot be read as a chat template ({error})") from error


def _named_templates(keys: Mapping[str, Any], path: epath.Path) -> dict[str, str]:
  """Returns name -> text of the templates in a tokenizer_config.json."""
  found = keys.get(KEY)
  if isinstance(found, str):
    return {_DEFAULT: found}
  try:
    named = {one["name"]: one["template"] for one in found}
    if not all(isinstance(text, str) for pair in named.items() for text in pair):
      raise TypeError
  except (TypeError, KeyError):
    raise ValueError(
      f"{path}: {KEY} is not a text, nor a list of objects with `name` and `template`"
    ) from None
  if _DEFAULT not in named:
    raise ValueError(
      f"{path}: {KEY} has the templates {', '.join(named) or '(none)'}, and none that is called "
      f"{_DEFAULT}; write the one that is meant into a file and name it with data.chat_template"
    )
  return named


def _special(encoder: tokenizer.Tokenizer) -> dict[str, Any]:
  """Returns the variables of special tokens that a template can write."""
  names = {id_: name for name, id_ in encoder.special.items()}
  found = {"eos_token": names.get(encoder.end)}
  if encoder.has_bos:
    found["bos_token"] = names.get(encoder.start)
  for file in (tokenizer_files.SPECIAL_FILE, tokenizer_files.CONFIG_FILE):
    if path := encoder.files.get(file):
      config = tokenizer_files.read_object(path)
      found |= {
        key: tokenizer_files.token_name(config[key])
        for key in tokenizer_files.SPECIAL_KEYS
        if config.get(key)
      }
      if isinstance(more := config.get(_MORE_SPECIAL), list):
        found[_MORE_SPECIAL] = [*filter(None, map(tokenizer_files.token_name, more))]
  return {name: token for name, token in found.items() if token}


# ------------------------------ the end of a turn ------------------------------

_PROBE = "Yes"  # what the assistant says in the conversation that shows how its turns end


@dataclasses.dataclass(frozen=True)
class TurnEnds:
  """What ends the assistant's turn."""

  tokens: frozenset[int]
  texts: tuple[str, ...]


def turn_ends(template: ChatTemplate, encoder: tokenizer.Tokenizer) -> TurnEnds:
  """Returns what ends the assistant's turn.

  Raises:
    ValueError: the template cannot render a question and its answer.
  """
  tokens = {encoder.end, *_ends_of_generation(encoder)}
  asked = [{"role": "user", "content": "?"}]
  answered = Conversation([*asked, {"role": ASSISTANT, "content": _PROBE}])
  text = template.render(answered)
  behind = text.rindex(_PROBE) + len(_PROBE) if _PROBE in text else len(text)
  ids, offsets = encoder.encode_template(text)
  special = set(encoder.special.values())
  later = [i for i, start in zip(ids.tolist(), offsets[:, 0], strict=True) if start >= behind]
  first = later[0] if later else None
  if first in special:
    return TurnEnds(frozenset({*tokens, first}), ())
  rest = text[behind:].strip() or text[behind:]
  return TurnEnds(frozenset(tokens), (rest,) if rest else ())


def _ends_of_generation(encoder: tokenizer.Tokenizer) -> Sequence[int]:
  """Returns the tokens that end a text by the generation_config.json beside a tokenizer."""
  if (path := encoder.files.get(tokenizer_files.GENERATION_FILE)) is None:
    return ()
  found = tokenizer_files.read_object(path).get("eos_token_id")
  found = found if isinstance(found, list) else [found]
  return [id_ for id_ in found if type(id_) is int and 0 <= id_ < encoder.size]
