"""Conversations: records in the usual forms, as the messages that a chat template takes.

A record is an object with
  messages                  of OpenAI: objects with `role` and `content`; `tools` beside them
  conversations             of ShareGPT: objects with `from` and `value`; `system`, `tools` beside
  prompt and completion     two texts, or two lists of messages, of which the second is trained on
Messages stay as they are, other keys included, except for what the forms write differently: content
in text parts is joined, the arguments of a tool call become an object, what is null is left out.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from input_pipeline.catalog import CONVERSATION_FORMS
from input_pipeline.text import documents

ASSISTANT = "assistant"
DROP = "drop"  # what is done with conversations that cannot be trained on, unless refused
# Roles of ShareGPT's `from`, as the chat templates call them.
_ROLES = {
  "human": "user",
  "user": "user",
  "gpt": ASSISTANT,
  "chatgpt": ASSISTANT,
  "assistant": ASSISTANT,
  "model": ASSISTANT,
  "bot": ASSISTANT,
  "function_call": ASSISTANT,
  "system": "system",
  "tool": "tool",
  "observation": "tool",
  "function_response": "tool",
}
_CALL = "function_call"
_WEIGHT = "weight"  # of a message in OpenAI's form: 0 or 1


@dataclasses.dataclass(frozen=True)
class Conversation:
  """A conversation as a chat template takes it.

  Attributes:
    messages: objects with `role`, `content` and what else the record has.
    tools: JSON schemas of the functions that may be called; None where there are none.
    variables: what else the template is given.
    untrained: numbers of the assistant's messages that are only context.
  """

  messages: list[dict[str, Any]]
  tools: list[dict[str, Any]] | None = None
  variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  untrained: frozenset[int] = frozenset()

  def content(self) -> bytes:
    """Returns what distinguishes it from other conversations."""
    facts = [self.messages, self.tools, self.variables, sorted(self.untrained)]
    return json.dumps(facts, sort_keys=True, default=str).encode()


def parse(record: Mapping[str, Any]) -> Conversation:
  """Returns the conversation of a record.

  Args:
    record: an object of a .jsonl file, or a row of a Parquet file.

  Raises:
    ValueError: it is of none of the forms, is empty, or holds what is no text.
  """
  messages, context = _messages(record)
  if not messages:
    raise ValueError("the conversation is empty")
  if (system := record.get("system")) and messages[0].get("role") != "system":
    if not isinstance(system, str):
      raise ValueError(f"its 'system' is {documents.type_name(system)}, not a string")
    messages, context = [{"role": "system", "content": system}, *messages], context + 1
  untrained = set()
  for number, message in enumerate(messages):
    weight = message.pop(_WEIGHT, 1)
    if type(weight) is bool or weight not in (0, 1):
      raise ValueError(f"message {number}: its 'weight' is {weight!r}, not 0 or 1")
    if message["role"] == ASSISTANT and (not weight or number < context):
      untrained.add(number)
  if record.get("functions"):
    raise ValueError("it has 'functions', an earlier form of 'tools'; write 'tools'")
  tools = _decoded(record.get("tools") or None, "'tools'", list)
  variables = _decoded(record.get("chat_template_kwargs") or {}, "'chat_template_kwargs'", dict)
  return Conversation(messages, tools or None, variables or {}, frozenset(untrained))


def _messages(record: Mapping[str, Any]) -> tuple[list[dict[str, Any]], int]:
  """Returns the messages, and how many of the first are only context."""
  for key in ("messages", "conversations"):
    if record.get(key) is not None:
      return _all(_decoded(record[key], repr(key), list) or []), 0
  parts = [record.get(key) for key in ("prompt", "completion")]
  if any(part is None for part in parts):
    present = ", ".join(repr(key) for key, value in record.items() if value is not None)
    raise ValueError(f"it has none of {CONVERSATION_FORMS}, only {present or 'nothing'}")
  if all(isinstance(part, str) for part in parts):
    roles = zip(("user", ASSISTANT), parts, strict=True)
    return _all([{"role": role, "content": text} for role, text in roles]), 0
  for key, part in zip(("prompt", "completion"), parts, strict=True):
    if not isinstance(part, list):
      both = "'prompt' and 'completion' are two texts or two lists of messages"
      raise ValueError(f"its {key!r} is {documents.type_name(part)}; {both}")
  return _all([*parts[0], *parts[1]]), len(parts[0])


def _all(messages: list[Any]) -> list[dict[str, Any]]:
  found = []
  for number, message in enumerate(messages):
    try:
      found.append(_message(message))
    except ValueError as error:
      raise ValueError(f"message {number}: {error}") from None
  return found


def _message(message: Any) -> dict[str, Any]:
  """Returns a message with `role` and a string as `content`."""
  if not isinstance(message, dict):
    raise ValueError(f"it is {documents.type_name(message)}, not an object")
  # Of Parquet, all messages have the keys of any; what one does not have is null.
  message = {key: value for key, value in message.items() if value is not None}
  if "role" not in message and "from" in message:
    message = _of_sharegpt(message)
  role = message.get("role")
  if not isinstance(role, str) or not role:
    raise ValueError(f"it has no 'role', only {', '.join(map(repr, message)) or 'nothing'}")
  calls = message.pop("tool_calls", None)
  if calls:
    message["tool_calls"] = _calls(calls)
  if _CALL in message:
    raise ValueError("it has 'function_call', an earlier form of 'tool_calls'; write 'tool_calls'")
  if "content" not in message and not calls:
    raise ValueError("it has no 'content'")
  message["content"] = _text(message.get("content", ""))
  return message


def _of_sharegpt(message: dict[str, Any]) -> dict[str, Any]:
  speaker, value = message["from"], message.get("value")
  if not isinstance(speaker, str) or speaker not in _ROLES:
    raise ValueError(f"its 'from' is {speaker!r}; known are {', '.join(_ROLES)}")
  if value is None:
    raise ValueError("it has no 'value'")
  rest = {key: other for key, other in message.items() if key not in ("from", "value")}
  if speaker == _CALL:
    called = _decoded(value, "the 'value' of a function_call", (dict, list))
    called = called if isinstance(called, list) else [called]
    calls = [{"type": "function", "function": call} for call in called]
    return {"role": ASSISTANT, "content": "", "tool_calls": calls, **rest}
  return {"role": _ROLES[speaker], "content": value, **rest}


def _text(content: Any) -> str:
  """Returns content as a string; parts of text are joined."""
  if isinstance(content, str):
    return content
  if not isinstance(content, list):
    raise ValueError(f"its 'content' is {documents.type_name(content)}, not a string")
  texts = []
  for part in content:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("text") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(text, str):
      what = repr(kind) if isinstance(kind, str) else documents.type_name(part)
      raise ValueError(f"its 'content' has a part of type {what}; only text is trained on")
    texts.append(text)
  return "".join(texts)


def _calls(calls: Any) -> list[dict[str, Any]]:
  """Returns tool calls whose arguments are objects: templates write those as JSON."""
  found = []
  for call in calls if isinstance(calls, list) else [None]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
      raise ValueError(
        "its 'tool_calls' are not a list of objects with a 'function' of 'name' and 'arguments'"
      )
    arguments = _decoded(function.get("arguments"), "'arguments' of a tool call", dict) or {}
    outer = {key: value for key, value in call.items() if value is not None}
    if function is call:
      outer = {}
    found.append({"type": "function", **outer, "function": {**function, "arguments": arguments}})
  return found


def _decoded(value: Any, what: str, kind: Any) -> Any:
  """Returns a value, parsed if it is JSON in a string; None for none.

  Raises:
    ValueError: it is of another type.
  """
  decoded = value
  if isinstance(value, str) and value:
    try:
      decoded = json.loads(value)
    except ValueError as error:
      raise ValueError(f"{what} is a string that is not valid JSON ({error})") from None
  if decoded in (None, ""):
    return None
  if not isinstance(decoded, kind):
    kinds = kind if isinstance(kind, tuple) else (kind,)
    names = " or ".join(documents.type_name(one()) for one in kinds)
    raise ValueError(f"{what} is {documents.type_name(decoded)}, not {names}")
  return decoded
