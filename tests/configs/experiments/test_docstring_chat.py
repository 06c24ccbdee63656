"""The experiment in short form: its files, its three stages one after the other, and a chat."""

import pytest

from configs.experiments import docstring_chat
from tests.helpers.cli import QUICKLY, lines_of

SOURCE = '''
def close(self):
  """Close the file.

  More.
  """

def plain(): pass
'''


def test_a_conversation_per_function_with_a_docstring():
  [pair] = docstring_chat.conversations(SOURCE)
  assert pair == ("What does close(self) do?", "Close the file.")
  assert list(docstring_chat.conversations("def (")) == []


def test_an_unknown_stage_is_refused():
  with pytest.raises(ValueError, match="unknown variant 'all'; there are base, full, lora"):
    docstring_chat.get_config("all")


@pytest.mark.long
def test_the_stages_one_after_the_other(main, tmp_path, monkeypatch):
  files = [f"def f{n}(x):\n  '''Return {n} times x.'''\n  return {n} * x\n" for n in range(60)]
  monkeypatch.setattr(docstring_chat, "_sources", lambda: iter(files))
  folder = tmp_path / "data"
  docstring_chat.write(folder)
  small = [
    *("--config.model.layers=1", "--config.model.model_size=32", "--config.training.steps=3"),
    *("--config.data.sequence_length=64", "--config.data.global_batch_size=8", QUICKLY),
    *("--config.evaluation.every_steps=0", "--config.data.prepare_processes=1"),
    *("--config.metrics.every_steps=1", f"--config.data.data_dir={folder}/data"),
    "--config.metrics.report=False",
  ]
  config = "--config=configs/experiments/docstring_chat.py:"
  base = [f"{config}base", *small, f"--config.data.files={folder}/modules.jsonl"]
  code, out, err = main("prepare", *base, "--train_tokenizer=300")
  assert code == 0, (out, err)
  code, out, err = main(*base, f"--workdir={tmp_path}/base")
  assert code == 0, (out, err)
  tuned = [
    *(*small, f"--config.data.files={folder}/chats.jsonl"),
    f"--config.data.chat_template={folder}/chat_template.jinja",
    f"--config.data.tokenizer={tmp_path}/base/tokenizer",
    f"--config.checkpoint.initialize_from={tmp_path}/base",
  ]
  # `full` differs in lora.rank and the learning rate alone.
  code, out, err = main(f"{config}lora", *tuned, f"--workdir={tmp_path}/lora")
  assert code == 0, (out, err)
  losses = [line["loss"] for line in lines_of(tmp_path / "lora") if "loss" in line]
  assert losses[-1] < losses[0]
  chat = ["--chat", "--prompt=What does f7(x) do?", "--max_new_tokens=4"]
  code, out, err = main("sample", f"{config}lora", *tuned, f"--checkpoint={tmp_path}/lora", *chat)
  assert code == 0, (out, err)
