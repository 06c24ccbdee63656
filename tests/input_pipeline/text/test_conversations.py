"""Records of the usual forms become the same messages; what is none of them is said."""

import json

import pytest

from input_pipeline.text import conversations

ASKED = {"role": "user", "content": "2 + 2?"}
ANSWER = {"role": "assistant", "content": "4"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def test_three_forms_are_the_same_conversation():
  forms = (
    {"messages": [ASKED, ANSWER], "id": 7},
    {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]},
    {"conversations": [ASKED, ANSWER]},
    {"prompt": "2 + 2?", "completion": "4"},
    {"prompt": [ASKED], "completion": [ANSWER]},
    {"messages": json.dumps([ASKED, ANSWER])},
    # As Parquet gives them: all messages have the keys of any.
    {"messages": [{**ASKED, "tool_calls": None, "name": None}, {**ANSWER, "tool_calls": []}]},
    {
      "messages": [
        {"role": "user", "content": [{"type": "text", "text": "2 + "}, text("2?")]},
        ANSWER,
      ]
    },
  )
  found = [conversations.parse(form) for form in forms]
  assert found == [conversations.Conversation([ASKED, ANSWER])] * len(forms)
  assert len({one.content() for one in found}) == 1


def text(content):
  return {"type": "text", "text": content}


def test_tools_and_calls():
  called = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", **CALL}]}
  as_text = {**CALL, "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
  result = {"role": "tool", "tool_call_id": "1", "content": "4"}
  for call in ({"id": "1", **CALL}, {"id": "1", **as_text}):
    record = {"messages": [ASKED, {**called, "tool_calls": [call]}, result, ANSWER], "tools": TOOLS}
    found = conversations.parse(record)
    assert found.messages == [ASKED, {**called, "content": ""}, result, ANSWER]
    assert found.tools == TOOLS
  shared = {
    "system": "Be brief.",
    "tools": json.dumps(TOOLS),
    "conversations": [
      {"from": "human", "value": "2 + 2?"},
      {"from": "function_call", "value": json.dumps(CALL["function"])},
      {"from": "observation", "value": "4"},
      {"from": "gpt", "value": "4"},
    ],
  }
  assert conversations.parse(shared) == conversations.Conversation(
    [
      {"role": "system", "content": "Be brief."},
      ASKED,
      {"role": "assistant", "content": "", "tool_calls": [CALL]},
      {"role": "tool", "content": "4"},
      ANSWER,
    ],
    TOOLS,
  )


def test_messages_that_are_not_trained():
  weighted = {"messages": [ASKED, {**ANSWER, "weight": 0}, ASKED, {**ANSWER, "weight": 1}]}
  found = conversations.parse(weighted)
  assert found.untrained == {1}
  assert found.messages == [ASKED, ANSWER, ASKED, ANSWER]
  prompted = {"system": "S", "prompt": [ASKED, ANSWER, ASKED], "completion": [ANSWER]}
  assert conversations.parse(prompted).untrained == {2}


def test_nothing_written_as_json_is_nothing():
  call = {"function": {"name": "add", "arguments": "null"}}
  for nothing in (None, "", "null", "[]", []):
    record = {"messages": [ASKED, ANSWER], "tools": nothing, "system": None}
    assert conversations.parse(record) == conversations.Conversation([ASKED, ANSWER])
    with pytest.raises(ValueError, match="the conversation is empty"):
      conversations.parse({"messages": nothing or []})
  found = conversations.parse({"messages": [{**ANSWER, "tool_calls": [call]}]})
  assert found.messages[0]["tool_calls"][0]["function"]["arguments"] == {}
  record = {"messages": [ASKED, ANSWER], "chat_template_kwargs": "null"}
  assert conversations.parse(record).variables == {}


def test_other_keys_reach_the_template():
  thought = {**ANSWER, "reasoning_content": "two and two"}
  found = conversations.parse(
    {"messages": [ASKED, thought], "chat_template_kwargs": {"enable_thinking": False}}
  )
  assert found.messages[1] == thought
  assert found.variables == {"enable_thinking": False}


@pytest.mark.parametrize(
  ("record", "message"),
  [
    ({"text": "a", "id": 1}, "it has none of 'messages', 'conversations', or .*, only 'text',"),
    ({"prompt": "a"}, "only 'prompt'"),
    ({"messages": []}, "the conversation is empty"),
    ({"messages": {"role": "user"}}, "'messages' is an object, not a list"),
    ({"messages": "[{"}, "'messages' is a string that is not valid JSON"),
    ({"messages": [ASKED, "4"]}, "message 1: it is a string, not an object"),
    ({"messages": [{"content": "a"}]}, "message 0: it has no 'role', only 'content'"),
    ({"messages": [{"role": "user"}]}, "message 0: it has no 'content'"),
    ({"messages": [{"role": "user", "content": 4}]}, "'content' is a number, not a string"),
    (
      {"messages": [{"role": "user", "content": [text("a"), {"type": "image_url"}]}]},
      "message 0: its 'content' has a part of type 'image_url'; only text is trained on",
    ),
    ({"messages": [{**ANSWER, "weight": 0.5}]}, "message 0: its 'weight' is 0.5, not 0 or 1"),
    ({"messages": [{**ANSWER, "tool_calls": "x"}]}, "'tool_calls' are not a list of objects"),
    (
      {"messages": [{**ANSWER, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
      "'arguments' of a tool call is a string that is not valid JSON",
    ),
    ({"messages": [{**ANSWER, "function_call": {"name": "f"}}]}, "write 'tool_calls'"),
    ({"messages": [ASKED, ANSWER], "functions": [{}]}, "write 'tools'"),
    ({"messages": [ASKED, ANSWER], "tools": {"a": 1}}, "'tools' is an object, not a list"),
    ({"conversations": [{"from": "narrator", "value": "a"}]}, "'from' is 'narrator'; known are"),
    ({"conversations": [{"from": "human"}]}, "message 0: it has no 'value'"),
    ({"prompt": "a", "completion": [ANSWER]}, "two texts or two lists of messages"),
  ],
)
def test_a_record_that_is_no_conversation_is_refused(record, message):
  with pytest.raises(ValueError, match=message):
    conversations.parse(record)
