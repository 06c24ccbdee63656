"""sample --chat: by --prompt, from a pipe and in a terminal; Ctrl-C; what is refused."""

import json
import termios
import time

import pytest

from tests.helpers import terminals
from tests.helpers.cli import TINY_LM
from tests.helpers.terminals import Terminal

# The roles' first letters, a space and the content; a turn ends with |.
TEMPLATE = """\
{%- for m in messages %}
  {%- if m.role not in ('user', 'assistant') %}{{ raise_exception('no role ' ~ m.role) }}{% endif %}
  {{- m.role[0] ~ ': ' ~ m.content ~ '|' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'a: ' }}{% endif %}"""


@pytest.fixture(scope="module")
def trained(main, tmp_path_factory):
  """Returns the arguments that name a run of two steps."""
  folder = tmp_path_factory.mktemp("chats")
  turns = [("user", "1?"), ("assistant", "ab")]
  record = {"messages": [{"role": role, "content": text} for role, text in turns]}
  text = "".join(
    json.dumps(record).replace("1?", f"{number}?") + "\n" for number in range(100, 160)
  )
  (folder / "chats.jsonl").write_text(text)
  (folder / "t.jinja").write_text(TEMPLATE)
  keys = {
    "data.files": folder / "chats.jsonl",
    "data.data_dir": folder / "data",
    "data.sequence_length": 48,
    "data.evaluation_split": "test",
    "data.global_batch_size": 8,
    "data.prepare_processes": 1,
    "evaluation.every_steps": 0,
    "training.steps": 2,
  }
  arguments = [*TINY_LM, *(f"--config.{key}={value}" for key, value in keys.items())]
  template = f"--config.data.chat_template={folder}/t.jinja"
  config = "--config=configs/single.py:model=lm,data=conversations"
  code, out, err = main(config, *arguments, template, f"--workdir={folder}/run")
  assert code == 0, (out, err)
  return [*arguments, f"--checkpoint={folder}/run"]


def command(trained, *more, strategy="single"):
  config = f"--config=configs/{strategy}.py:model=lm,data=conversations"
  return ["sample", config, *trained, "--chat", *more]


def test_turns_by_prompt_are_the_same_on_any_mesh(main, trained):
  # The template is the run's own copy.
  turns = ["--temperature=0", "--max_new_tokens=4", "--prompt=1?", "--prompt=2?"]
  found = [main(*command(trained, *turns, strategy=name)) for name in ("single", "dp4_tp2")]
  assert [(code, err) for code, _, err in found] == [(0, "")] * 2
  assert found[0][1] == found[1][1]
  assert found[0][1].count("\n") >= 2


def test_in_a_terminal_ctrl_c_ends_a_reply_and_then_the_conversation(main, forks, trained):
  # No limit but the row's: the reply takes long enough to be ended.
  longer = [word for word in trained if "sequence_length" not in word]
  longer += ["--config.data.sequence_length=16384", "--temperature=0"]
  with Terminal(terminals.main(*command(longer)), forks=forks) as terminal:
    terminal.wait_for("Ctrl-D does; /new begins another\n> ")
    terminal.press(b"hello\n")
    before = len("> hello\n")
    terminal.wait_until(
      lambda: len(terminal.text().partition("> ")[2]) > before + 200, "the stream of a reply"
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
  code, out, err = main(*command(trained))
  assert (code, out, err) == (0, "", ""), "standard input has ended"


REFUSED = {
  "a role that the template refuses": (["--system=be kind"], "refuses the conversation: no role s"),
  "two system messages": (
    ["--system=a", "--system_file=b"],
    "--system and --system_file: give one",
  ),
  "two sources of turns": (["--prompt=a", "--prompt_file=b"], "give one of the two"),
  "a setting": (["--prompt=a", "--temperature=-1"], "temperature=-1.0: 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(main, trained, name):
  more, message = REFUSED[name]
  code, out, err = main(*command(trained, *more))
  assert (code, out) == (2, "")
  assert message in err


def test_a_checkpoint_without_a_template_is_refused(main, tmp_path):
  plain = ["sample", "--config=configs/single.py", f"--checkpoint={tmp_path}", "--prompt=a"]
  code, _, err = main(*plain, "--chat")
  assert code == 2
  assert "--chat: data.tokenizer=bytes has no chat template" in err
  code, _, err = main(*plain, "--system=a")
  assert (code, "--system belongs to sample --chat" in err) == (2, True)
