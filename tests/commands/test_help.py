"""Help: the verbs, the flags of one, config keys; at the width of the terminal."""

import re
import shlex
import subprocess
import sys

import pytest

from commands import flags, help, words
from commands.verbs import VERBS
from tests.helpers.terminals import ROOT

OWNERS = {flag.name: owners for flag, owners in flags.OWNERS}


def text(*given):
  return help.text(words.read(given, OWNERS, asks=True), OWNERS)


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch):
  monkeypatch.setenv("COLUMNS", "80")


def test_help_is_short_and_names_every_verb():
  shown = text("-h")
  assert text("help") == text("--help") == shown
  assert len(shown.splitlines()) <= 50
  assert max(map(len, shown.splitlines())) <= 90  # a command that is copied is not wrapped
  for name, verb in VERBS.items():
    assert re.search(rf"^  {name} +{re.escape(verb.summary)}$", shown, re.MULTILINE)
  assert "help VERB" in shown
  assert "75 stopped, after saving" in " ".join(shown.split())


def test_every_verb_says_its_flags_and_no_others():
  shown = text("help", "sample")
  assert re.search(r"^  --max_new_tokens=64 +Tokens to generate, at most\.$", shown, re.MULTILINE)
  assert "--config  " in shown
  for other in ("--html", "--topology", "--accept_changes"):
    assert other not in shown
  assert "The run to read" in shown
  assert "Where plan.html and plan.json are written" in text("help", "plan")
  assert "Where the run is kept" in text("help", "train")
  assert "against" not in text("help", "report").partition("Flags:")[2]  # none internal
  assert text("sample", "--help") == text("--help=sample") == shown
  assert "--config" not in text("help", "tour").partition("Flags")[2]


@pytest.mark.parametrize("verb", VERBS)
def test_examples_of_a_verb_parse(verb):
  shown = text(verb, "--help")
  for example in VERBS[verb].examples:
    assert f"  python main.py {example}\n" in shown
    words = example.split()
    assert words[0] == verb or (verb == "train" and words[0].startswith("--"))
    for word in words:
      if word.startswith("--") and not word.startswith("--config."):
        name = word.lstrip("-").partition("=")[0]
        assert name in flags.flags.FLAGS
        assert verb in OWNERS.get(name, VERBS)


def test_keys_and_sections_and_flags():
  assert "--config.training.steps=200\n      optimizer steps" in text("help", "training")
  assert "--config.seed=0" in text("help", "seed")
  shown = text("help", "optimizer.clip_n")
  assert "--config.optimizer.clip_norm=1.0\n      of the global gradient norm; 0: off" in shown
  assert "steps" not in shown
  assert re.search(r"^Taken by plan, .*config\.$", text("help", "--topology"), re.MULTILINE)
  everything = text("help", "keys")
  for key in ("checkpoint.keep=2", "model.head_size=unset", "metrics.every_steps=10", "seed=0"):
    assert f"--config.{key}" in everything


def test_a_word_is_looked_for_in_names_and_then_in_texts():
  rate = "--config.optimizer.learning_rate=0.008\n      Peak learning rate"
  for word in ("learning_rate", "lr", "max_lr"):
    assert rate in text("help", word)
  shown = text("help", "width")
  assert "--config.model.model_size=128" in shown
  assert shown.endswith("Also: --widths, model.base_width")
  shown = text("help", "beta")
  assert re.findall(r"^  (\S+)", shown, re.MULTILINE) == [
    *("optimizer.beta_1", "optimizer.beta_2", "training.dpo_beta")
  ]
  shown = text("help", "steps")  # keys, and a flag of a verb
  assert re.findall(r"^  (\S+)", shown, re.MULTILINE)[:4] == [
    *("--steps", "evaluation.steps", "profile.steps", "training.steps")
  ]
  assert "model.base_width" in text("help", "muP")  # named in its text


def test_the_long_help_has_everything():
  shown = text("--helpfull")
  for what in ("evaluate  ", "--max_new_tokens=64", "--config.lora.rank=0", "--config.seed=0"):
    assert what in shown


def test_defaults_are_those_of_the_recipe():
  recipe = "--config=configs/dp8.py:mlp_tutorial"
  assert "--config.mesh.data=8" in text("help", "mesh", recipe)
  shown = text("help", "model", recipe)
  assert "--config.model.model_size=unset\n      [dims] W: 8192 on an accelerator" in shown
  assert "model.layers" not in shown


@pytest.mark.parametrize(
  ("words", "said"),
  [
    (["help", "trian"], "help trian: there is no verb.* did you mean 'train'?"),
    (["help", "training.step_"], "there is no verb.*did you mean 'training.steps'?"),
    (["help", "--config=configs/dp8.py:mpl"], "did you mean 'mlp'?"),
  ],
)
def test_unknown_topics_are_refused(words, said):
  with pytest.raises(ValueError, match=said.replace("?", r"\?")):
    text(*words)


def test_a_reader_that_has_seen_enough_is_no_error():
  command = f"set -o pipefail; {shlex.quote(sys.executable)} main.py help keys | true"
  done = subprocess.run(
    ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False
  )
  assert (done.returncode, done.stderr) == (0, "")


def test_no_colors_where_there_is_no_terminal(monkeypatch):
  class Stream:
    def isatty(self):
      return True

  monkeypatch.setenv("TERM", "xterm")
  monkeypatch.delenv("NO_COLOR", raising=False)
  assert help.styles(Stream()).bold("a") == "\x1b[1ma\x1b[0m"
  monkeypatch.setenv("NO_COLOR", "1")
  assert help.styles(Stream()).bold("a") == "a"
