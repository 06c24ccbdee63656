"""Completion in real shells, by the key Tab in a terminal."""

import os
import re
import shutil
import sys
import time

import pytest

from commands.completion import SCRIPTS, run
from tests.helpers.terminals import Terminal

SHELLS = {
  "bash": (["bash", "--norc", "--noprofile", "-i"], "source {}; PS1='$ '"),
  "zsh": (["zsh", "-f", "-i"], "autoload -Uz compinit; compinit -u -D; source {}; PS1='$ '"),
  "fish": (["fish", "--no-config", "-i"], "source {}"),
}
PYTHON = sys.executable
REQUIRED = "MESHWRIGHT_REQUIRE_SHELLS"  # set where all shells are to be there
TYPED = {  # behind main.py -> what Tab makes of it
  "samp": "main.py sample ",
  "--config=configs/dp8.py:mlp_": "configs/dp8.py:mlp_tutorial",
  "--config=configs/dp8.py --config.optimizer.schedule=inv": "schedule=inverse_sqrt",
}


def test_no_other_shells():
  assert {*SHELLS} == {*SCRIPTS}
  for words, hint in ((["bahs"], "; did you mean 'bash'?"), ([], "")):
    with pytest.raises(ValueError, match=r".") as refused:
      run(*words)
    assert str(refused.value) == f"completion takes one of bash, zsh, fish{hint}"


@pytest.mark.parametrize(
  "shell", ["bash", *(pytest.param(s, marks=pytest.mark.long) for s in ("zsh", "fish"))]
)
def test_tab(main, shell, tmp_path):
  command, setup = SHELLS[shell]
  if not shutil.which(command[0]):
    assert REQUIRED not in os.environ, f"{shell} is not installed"
    pytest.skip(f"{shell} is not installed: apt-get install {shell}")
  script = tmp_path / "script"
  code, printed, _ = main("completion", shell)
  assert code == 0
  script.write_text(printed)
  for typed, becomes in TYPED.items():  # each in a new shell: one may miss a key that clears a line
    with Terminal(command, environment={"HOME": str(tmp_path)}, columns=300) as terminal:
      terminal.press(f"{setup.format(script)}; echo RE''ADY\r".encode())
      terminal.wait_for("READY")
      _settle(terminal)
      _type(terminal, typed, becomes)


def _settle(terminal: Terminal) -> None:
  """Waits until nothing more is written for a while: a shell drops what is typed too early."""
  seen, since = len(terminal.raw()), time.monotonic()
  while time.monotonic() < since + 0.3:
    time.sleep(0.02)
    if (now := len(terminal.raw())) != seen:
      seen, since = now, time.monotonic()


def _type(terminal: Terminal, typed: str, becomes: str) -> None:
  """Types what follows main.py, and Tab; waits for what it becomes."""
  before = len(terminal.text())

  def shown() -> str:
    text = terminal.text()[before:].replace("\x07", "")  # the bell
    while "\x08" in text:  # the cursor goes back
      text = re.sub("[^\x08]\x08", "", text.lstrip("\x08"))
    return text

  terminal.press(f"{PYTHON} main.py {typed}".encode())
  terminal.wait_until(lambda: typed in shown(), typed)
  terminal.press(b"\t")
  terminal.wait_until(lambda: becomes in shown(), becomes)
