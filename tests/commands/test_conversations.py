"""Conversations from a file to a run: what `prepare` shows, resume, and what is refused."""

import json
import math
import re
import termios
import time

import numpy as np
import pytest

from tests.helpers import terminals
from tests.helpers.cli import TINY_LM, lines_of
from tests.helpers.terminals import Terminal

TEMPLATE = """\
{%- for m in messages %}
  {%- if m.role not in ('user', 'assistant') %}{{ raise_exception('no role ' ~ m.role) }}{% endif %}
  {{- m.role[0] ~ ': ' ~ m.content ~ '|' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'a: ' }}{% endif %}"""


def record(asked, answer, role="user"):
  return {"messages": [{"role": role, "content": asked}, {"role": "assistant", "content": answer}]}


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
  """The folder with the files of the conversations, and the flags that read them."""
  folder = tmp_path_factory.mktemp("chats")
  random = np.random.default_rng(3)
  records = [record(f"{n}?", "ab"[: random.integers(1, 3)] * 2) for n in range(100, 260)]
  records[0] = record("100?", "\x1b[31ma")
  (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, records)))
  (folder / "t.jinja").write_text(TEMPLATE)
  keys = {
    "data.files": folder / "chats.jsonl",
    "data.chat_template": folder / "t.jinja",
    "data.data_dir": folder / "data",
    "data.sequence_length": 48,
    "data.evaluation_split": "test",
    "data.global_batch_size": 8,
    "data.prepare_processes": 1,
  }
  flags = [f"--config.{key}={value}" for key, value in keys.items()]
  config = "--config=configs/single.py:model=lm,data=conversations"
  return folder, [config, *TINY_LM, *flags]


@pytest.fixture(scope="module")
def trained(main, chats, tmp_path_factory):
  """The workdir of a run of two steps, and what it and `prepare` before it have printed."""
  workdir = tmp_path_factory.mktemp("trained") / "run"
  printed = []
  for verb, more in (("prepare", []), ("train", [f"--workdir={workdir}"])):
    code, out, err = main(verb, *chats[1], *more, "--config.training.steps=2")
    assert (code, err) == (0, "")
    printed.append(out)
  return workdir, *printed


@pytest.mark.long
def test_prepared_shown_trained_on_and_resumed(main, chats, trained, tmp_path):
  _folder, flags = chats
  workdir, out, printed = trained
  shown = re.findall(r"/chats.jsonl:\d+: (\d+) tokens, of which the (\d) in \[\[brackets\]\]", out)
  texts = re.findall(r"^(u: 1\d\d\?\|a: )\[\[(.*)\|\]\]$", out, re.MULTILINE)
  assert len(shown) == len(texts) == 2
  for (tokens, learned), (prompt, answer) in zip(shown, texts, strict=True):
    answer = answer.replace("\\x1b", "\x1b")
    assert (int(tokens), int(learned)) == (len(f"{prompt}{answer}|"), len(f"{answer}|"))
  assert "\x1b" not in out
  [line] = [line for line in out.splitlines() if line.startswith("conversations train: ")]
  assert "1.000 bytes per token" in line
  assert re.search(r", [\d,]+ tokens trained on \(2\d\.\d %\), 0 conversations dropped", line), line

  assert line.partition(";")[0] in printed
  last = lines_of(workdir)[-1]
  assert last["eval_bits_per_byte"] == pytest.approx(last["eval_loss"] / math.log(2), rel=1e-6)
  config = json.loads((workdir / "config.json").read_text())
  assert config["model"]["separate_documents"] is True
  assert (config["data"]["packing"], config["data"]["tokenizer"]) == ("best_fit", "bytes")

  kept = workdir / "checkpoints/2/tokenizer/chat_template.jinja"
  assert kept.read_text() == (workdir / "tokenizer/chat_template.jinja").read_text() == TEMPLATE

  gone = f"--config.data.chat_template={tmp_path}/gone.jinja"
  code, out, err = main("evaluate", *flags, f"--checkpoint={workdir}", gone)
  assert (code, err) == (0, "")
  assert f"{last['eval_loss']:.4f}"[:5] in out

  other = tmp_path / "other.jinja"
  other.write_text(TEMPLATE.replace("'|'", "'/'"))
  more = [*flags, f"--workdir={workdir}", "--config.training.steps=3"]
  code, _, err = main(*more, f"--config.data.chat_template={other}")
  assert code == 2
  assert "dataset.chat_template: " in err
  other.write_text(TEMPLATE)
  code, out, err = main(*more, f"--config.data.chat_template={other}")
  assert (code, err) == (0, "")
  assert "resumes from the checkpoint of step 2" in out
  code, out, err = main(*more, gone, "--config.training.steps=4")
  assert (code, err) == (0, "")
  assert "resumes from the checkpoint of step 3" in out


def test_no_tokenizer_is_trained_on_conversations(main, chats):
  code, out, err = main("prepare", *chats[1], "--train_tokenizer=300")
  assert (code, out) == (2, "")
  assert "--train_tokenizer=300: data.name='conversations' is no text; choose" in err


def test_a_conversation_that_is_refused_is_one_message_and_exit_code_2(main, chats, tmp_path):
  _, flags = chats
  records = [record("1?", "a"), record("a", "b", "judge"), record("2?", "b"), record("3?", "c")]
  (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, records)))
  files = [f"--config.data.files={tmp_path}/chats.jsonl", f"--config.data.data_dir={tmp_path}"]
  code, _out, err = main("prepare", *flags, *files, "--config.data.evaluation_fraction=1e-9")
  assert code == 2
  assert re.search(r"chats.jsonl:2: data.chat_template=.*: no role judge", err), err
  assert err.startswith("refused: ")
  assert "Traceback" not in err


# ---- sample --chat ----


def chat(chats, trained, *more):
  """Returns the command of a conversation with the run; the template is the run's own copy."""
  flags = [flag for flag in chats[1] if "chat_template" not in flag]
  return ["sample", *flags, f"--checkpoint={trained[0]}", "--chat", *more]


def test_turns_by_prompt(main, chats, trained):
  turns = ["--temperature=0", "--max_new_tokens=4", "--prompt=1?", "--prompt=2?"]
  code, out, err = main(*chat(chats, trained, *turns))
  assert (code, err) == (0, "")
  assert out.count("\n") >= 2
  code, out, err = main(*chat(chats, trained, "--system=be kind", *turns))
  assert (code, out) == (2, "")
  assert "refuses the conversation: no role s" in err
  code, _, err = main(*(word for word in chat(chats, trained, "--system=a") if word != "--chat"))
  assert (code, "--system belongs to sample --chat" in err) == (2, True)


@pytest.mark.long
def test_in_a_terminal_ctrl_c_ends_a_reply_and_then_the_conversation(
  main, forks, chats, trained, tmp_path
):
  # No limit but the row's, whose many slots take time; an end that the model does not write.
  (tmp_path / "t.jinja").write_text(TEMPLATE.replace("'|'", "'<END OF THE TURN>'"))
  longer = [word for word in chat(chats, trained) if "sequence_length" not in word]
  longer += ["--config.data.sequence_length=65536", "--temperature=0"]
  longer.append(f"--config.data.chat_template={tmp_path}/t.jinja")
  with Terminal(terminals.main(*longer), forks=forks) as terminal:
    terminal.wait_for("Ctrl-D does; /new begins another\n> ")
    terminal.press(b"hello\n")
    before = len("> hello\n")
    terminal.wait_until(
      lambda: len(terminal.text().partition("> ")[2]) > before + 5, "the stream of a reply"
    )
    terminal.press()
    terminal.wait_until(lambda: terminal.text().endswith("\n> "), "the next prompt")
    assert terminal.popen.poll() is None
    time.sleep(1.1)  # before that, it would count as the same one
    terminal.press(b"and")
    terminal.wait_until(lambda: terminal.text().endswith("> and"), "the line")
    terminal.press()
    assert terminal.end() == 75
    mode = termios.tcgetattr(terminal._master)[3]
    assert mode & termios.ECHO, "the terminal is as it was"
  code, out, err = main(*chat(chats, trained))
  assert (code, out, err) == (0, "", ""), "standard input has ended"
