"""commands/words.py: what a word of a command line is."""

import types

import pytest

from commands import config_flag, flags, words
from tests.helpers.terminals import ROOT

OWNERS = {flag.name: verbs for flag, verbs in flags.OWNERS}


@pytest.fixture
def rewritten(tmp_path, monkeypatch):
  """Returns a function from words to the words and flags that they become."""
  for file in (
    "dp8.py",
    "lr=0.1",
    "runs/a/given.json",
    "runs/b/checkpoints/100/x",
    "runs/c.py",
    "mine/metrics.jsonl",
  ):
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).touch()
  for folder in ("empty", "sample", "runs/a/checkpoints/4", "runs/c"):
    (tmp_path / folder).mkdir(parents=True)
  (tmp_path / "layout").mkdir()
  monkeypatch.chdir(tmp_path)

  return lambda line, **more: shown(words.read(line.split(), OWNERS, **more))


def shown(line):
  """Returns a command line with its words as flags, configs first."""
  configs = [f"--{flag}={config}" for flag, config in sorted(line.configs.items(), reverse=True)]
  keys = [f"--{flag}.{key}={value}" for flag, key, value in line.settings]
  parts = [line.verb, *configs, *line.flags, *keys, *line.words]
  return " ".join(filter(None, parts)).replace(config_flag.of_run(""), "RUN:")


A = "--config=RUN:runs/a --workdir=runs/a"


@pytest.mark.parametrize(
  ("line", "wanted"),
  [
    ("", ""),
    ("dp8 seed=1", "--config=dp8.py --config.seed=1"),
    ("--config.seed=1 --config=dp8:mlp", "--config=dp8.py:mlp --config.seed=1"),
    ("train --config dp8.py --config.seed 1", "train --config=dp8.py --config.seed=1"),
    ("mesh.data=-1 layout dp8:model=lm,data=text", None),
    ("layout dp8 ./lr=0.1", "layout --config=dp8.py --against=./lr=0.1"),
    ("layout", "layout"),  # which is a folder, too
    ("compare dp8 --against=dp8", "compare --config=dp8.py --against=dp8.py"),
    ("compare dp8 runs/a", "compare --config=dp8.py --against=RUN:runs/a"),
    ("compare dp8 --against runs/a/", "compare --config=dp8.py --against=RUN:runs/a"),
    ("runs/a training.steps=9", f"{A} --config.training.steps=9"),
    ("runs/c", "--config=runs/c.py"),  # the folder beside it is no run's
    ("train runs/a/ --workdir=new", "train --config=RUN:runs/a --workdir=new"),
    (
      "sample runs/a --prompt training.steps=9",
      "sample --config=RUN:runs/a --prompt=training.steps=9 --workdir=runs/a",
    ),
    ("evaluate --simulate runs/b", "evaluate --config=RUN:runs/b --simulate --workdir=runs/b"),
    (
      "export runs/a/checkpoints/4 --to=x",
      "export --config=RUN:runs/a --to=x --checkpoint=runs/a/checkpoints/4 --workdir=runs/a",
    ),
    ("config seed runs/a training", "config --config=RUN:runs/a seed training"),
    ("config seed mine", "config --config=RUN:mine seed"),
    ("prepare runs/a", "prepare --config=RUN:runs/a"),  # which has no --workdir
    ("report runs/a lr=0.1 seed=1", "report runs/a lr=0.1 seed=1"),
    ("completion bash", "completion bash"),
  ],
)
def test_words_become_flags(rewritten, line, wanted):
  wanted = (
    "layout --config=dp8.py:model=lm,data=text --config.mesh.data=-1" if wanted is None else wanted
  )
  assert rewritten(line) == wanted


def test_help_is_about_any_word(rewritten):
  assert rewritten("help ./dp8 training", asks=True) == "help --config=./dp8.py training"
  assert rewritten("runs/none trian --help", asks=True) == "--help runs/none trian"


@pytest.mark.parametrize(
  ("line", "said"),
  [
    ("trian", "unknown verb 'trian'; there are train, prepare"),
    (
      "train dp9",
      "unexpected 'dp9' after the verb; a config file, a run's folder or key=value may",
    ),
    ("train layout", "unexpected 'layout' after the verb; a config"),
    ("tour training.steps=1", "unexpected 'training.steps=1' after"),
    ("runs/none", "runs/none: there is no run, and there is no config file 'runs/none' (shipped"),
    ("configs/dp8", "did you mean 'configs/dp8.py'?"),
    ("empty", "empty is no run's folder: it has none of given.json, metrics.jsonl, checkpoints"),
    ("dp8 dp8", "dp8 and dp8.py: two configs; give one"),
    (
      "sample runs/a --config=dp8",
      "runs/a has its own config, and dp8.py is given, too: leave that out, or name the run with "
      "--config=dp8.py --checkpoint=runs/a",
    ),
    ("runs/a runs/b", "--config=runs/a --workdir=runs/b"),
    ("train runs/a/4", "runs/a/4: train takes a run, not one of its checkpoints; give runs/a"),
  ],
)
def test_refusals_say_what_to_do(rewritten, line, said):
  with pytest.raises(ValueError, match=r".") as refused:
    rewritten(line)
  assert said in str(refused.value)


def test_without_a_config_it_is_the_runs_or_the_one_of_the_readme(rewritten, monkeypatch, capsys):
  def of(line):
    words.add_default(found := words.read(line.split(), OWNERS))
    return shown(found)

  assert of("sample --checkpoint=runs/a/4") == (
    "sample --config=RUN:runs/a --checkpoint=runs/a/4 --workdir=runs/a"
  )
  assert of("train --workdir=runs/a") == "train --config=RUN:runs/a --workdir=runs/a"
  assert of("doctor") == "doctor"
  assert capsys.readouterr().err == ""
  default = f"--config={ROOT}/{words.DEFAULT}"
  assert of("train --workdir=runs/new") == f"train {default} --workdir=runs/new"
  assert capsys.readouterr().err == f"config: {words.DEFAULT}, since none is given\n"


@pytest.mark.parametrize(
  ("config", "recipe", "wanted"),
  [
    ("configs/dp8.py", "lm", "dp8_lm"),
    ("configs/dp8.py:model=lm,data=text", "model=lm,data=text", "dp8_model-lm_data-text"),
    ("configs/experiments/shakespeare_char.py", "model=lm,data=text", "shakespeare_char"),
    ("configs/experiments/shakespeare_char.py:gpt", "model=lm,data=text", "shakespeare_char_gpt"),
  ],
)
def test_the_default_workdir_is_named_by_the_file_and_what_was_asked_of_it(config, recipe, wanted):
  flag = types.SimpleNamespace(location=config, value=types.SimpleNamespace(argument=recipe))
  assert config_flag.name(flag) == wanted
