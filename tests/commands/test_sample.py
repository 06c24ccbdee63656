"""`sample` in a terminal: it asks for prompts, streams, says how fast, and Ctrl-C ends a text."""

import re
import time

import pytest

from tests.helpers import terminals
from tests.helpers.cli import TINY_LM
from tests.helpers.terminals import Terminal

SINGLE = ["--config=configs/single.py", *TINY_LM, "--config.data.global_batch_size=8"]


@pytest.mark.long
def test_prompts_in_a_terminal(main, forks, tmp_path):
  code, _, err = main(*SINGLE, f"--workdir={tmp_path}/run", "--config.training.steps=1")
  assert (code, err) == (0, "")
  sample = ["sample", *SINGLE, f"--checkpoint={tmp_path}/run"]
  # Rows whose many slots take time.
  longer = ["--config.data.sequence_length=32768", "--max_new_tokens=30000", "--temperature=0"]
  with Terminal(terminals.main(*sample, *longer), forks=forks, columns=80) as terminal:
    terminal.wait_for("as Ctrl-D does\n> ")
    terminal.press(b"def \n")
    before = len(terminal.text())
    terminal.wait_until(lambda: len(terminal.text()) > before + 20, "a stream")
    terminal.press()
    terminal.wait_until(lambda: terminal.text().endswith("]\n> "), "the next prompt")
    assert re.search(r"\[[\d,]+ tokens?(, [\d.,]+ tokens/s)?; the first after", terminal.text())
    assert terminal.popen.poll() is None
    time.sleep(1.1)  # before that, it would count as the same one
    terminal.press()
    assert terminal.end() == 75
    assert "Traceback" not in terminal.text()
  with Terminal(terminals.main(*sample), forks=forks, columns=80) as terminal:
    terminal.wait_for("prompts of up to 16 tokens")
    terminal.wait_for("as Ctrl-D does\n> ")
    terminal.press(b"0123456789abcdefgh\n")
    terminal.wait_for("prompt 1 is 18 tokens (bytes) long")
    terminal.press(b"x\n")
    terminal.wait_for("; the first after")
    terminal.press(b"\x04")
    assert terminal.end() == 0
  # Of a pipe nothing is asked for: a document is begun, as before, for as long as a row has room.
  code, out, err = main(*sample, "--prompt=0123456789abcde")
  assert (code, err) == (0, "")
  code, out, err = main(*sample, "--temperature=0", "--max_new_tokens=3")
  assert (code, err) == (0, "")
  assert "> " not in out
