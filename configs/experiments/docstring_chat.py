r"""A small decoder on Python's standard library, tuned on conversations about its docstrings.

  python -m configs.experiments.docstring_chat runs/docstring_chat
  python main.py prepare --config=configs/experiments/docstring_chat.py:base --train_tokenizer=1024
  python main.py --config=configs/experiments/docstring_chat.py:base \
    --workdir=runs/docstring_chat_base
  python main.py --config=configs/experiments/docstring_chat.py:full \
    --workdir=runs/docstring_chat_full
  python main.py --config=configs/experiments/docstring_chat.py:lora \
    --workdir=runs/docstring_chat_lora
  python main.py sample --config=configs/experiments/docstring_chat.py:full \
    --checkpoint=runs/docstring_chat_full --chat

The first command writes the files: modules.jsonl, a document per module; chats.jsonl, a
conversation per function with a docstring; chat_template.jinja. `full` and `lora` start from
`base`. Expected on the evaluation split of the conversations, in nats per trained token: 4.22
before, 2.88 after `full`, 3.18 after `lora` (docs/fine_tuning.md). Base took 232 s
of processor time on two shared x86-64 cores, as eight simulated devices.
"""

import ast
import json
import pathlib
import sys
import sysconfig
from collections.abc import Iterator

from ml_collections import ConfigDict

from configs import base

FOLDER = "runs/docstring_chat"
# The end of a document also ends the assistant's turn: the tokenizer has no other special token.
TEMPLATE = """\
{%- for message in messages %}
{%- if message.role == 'user' %}{{ 'Question: ' ~ message.content ~ '\\nAnswer:' }}
{%- else %}{{ ' ' ~ message.content ~ eos_token }}{% endif %}
{%- endfor %}"""


def get_config(argument: str | None = None) -> ConfigDict:
  """Returns the config of a stage: base, full (all parameters tuned) or lora (adapters)."""
  stage = base.variant(argument, "base", "full", "lora")
  data = "text" if stage == "base" else "conversations"
  config = base.get_config(f"model=lm,data={data}", mesh=dict(data=4, tensor=2))
  files = "modules.jsonl" if stage == "base" else "chats.jsonl"
  config.data.update(files=f"{FOLDER}/{files}", data_dir=f"{FOLDER}/data")
  config.evaluation.final_steps = 0
  config.model.separate_documents = True
  config.training.steps = 300
  if stage != "base":
    config.data.update(
      tokenizer=f"{BASE}/tokenizer",
      chat_template=f"{FOLDER}/chat_template.jinja",
      long_conversations="drop",
    )
    config.checkpoint.initialize_from = BASE
    config.training.steps = 100
    config.optimizer.learning_rate = 2e-3
  if stage == "lora":
    config.lora.rank = 8
    config.optimizer.learning_rate = 1e-2
  return config


BASE = "runs/docstring_chat_base"


# ------------------------------ the files ------------------------------


def write(folder: pathlib.Path) -> None:
  """Writes modules.jsonl, chats.jsonl and chat_template.jinja of this Python's standard library."""
  folder.mkdir(parents=True, exist_ok=True)
  with (folder / "modules.jsonl").open("w") as modules, (folder / "chats.jsonl").open("w") as chats:
    for text in _sources():
      modules.write(json.dumps({"text": text}) + "\n")
      for question, answer in conversations(text):
        turns = (("user", question), ("assistant", answer))
        messages = [{"role": role, "content": content} for role, content in turns]
        chats.write(json.dumps({"messages": messages}) + "\n")
  (folder / "chat_template.jinja").write_text(TEMPLATE)


def _sources() -> Iterator[str]:
  root = pathlib.Path(sysconfig.get_path("stdlib"))
  for path in sorted(root.glob("*.py")):
    try:
      yield path.read_text()
    except UnicodeDecodeError:
      continue


def conversations(source: str) -> Iterator[tuple[str, str]]:
  """Yields (question, answer) of each function with a docstring: its signature, its first line."""
  try:
    tree = ast.parse(source)
  except SyntaxError:
    return
  for node in ast.walk(tree):
    if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
      first = text.strip().partition("\n")[0].strip()
      if first:
        yield f"What does {node.name}({ast.unparse(node.args)}) do?", first


if __name__ == "__main__":
  write(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else FOLDER))
