"""Chat templates in the style of known ones, and a tokenizer with their special tokens."""

import json

from tests.input_pipeline.text.conftest import save

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
HEADER, HEADER_END, TURN_END = "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"
SPECIAL = (IM_START, IM_END, HEADER, HEADER_END, TURN_END)

CHATML = """\
{%- for message in messages %}
  {{- '<|im_start|>' + message.role + '\\n' + message.content }}
  {%- for call in message.tool_calls or [] %}
    {{- '<call>' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
  {%- endfor %}
  {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# As CHATML, with marks around what the assistant writes.
MARKED = """\
{% for message in messages %}
{% if message.role == 'assistant' %}
{{ '<|im_start|>assistant\\n' -}}
{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration +%}
{% else %}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' -}}
{% endif %}
"""

HEADERS = """\
{{- bos_token }}
{%- if tools %}
  {{- '<|start_header_id|>system<|end_header_id|>\\n\\nFunctions: ' + (tools | tojson) }}
  {{- '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
  {%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
    {{- raise_exception('Unknown role: ' + message.role) }}
  {%- endif %}
  {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim }}
  {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

# Thinking is written in the last turn only.
THINKING = """\
{%- for message in messages %}
  {{- '<|im_start|>' + message.role + '\\n' }}
  {%- if message.role == 'assistant' and loop.last %}
    {{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
  {%- endif %}
  {{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def chat_tokenizer(trained, folder, template=None, config=None):
  """Writes the trained tokenizer with special tokens for turns; returns the folder.

  Args:
    trained: the folder of a tokenizer.
    folder: where to.
    template: the content of chat_template.jinja; None: without.
    config: what else tokenizer_config.json says.
  """
  content = json.loads((trained / "tokenizer.json").read_text())
  first = 1 + max(content["model"]["vocab"].values())
  flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
  content["added_tokens"] += [
    {"id": first + number, "content": name, "special": True, **flags}
    for number, name in enumerate(SPECIAL)
  ]
  known = json.loads((trained / "tokenizer_config.json").read_text())
  save(folder, content, {**known, **(config or {})})
  if template is not None:
    (folder / "chat_template.jinja").write_text(template)
  return folder
