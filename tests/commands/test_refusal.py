"""What the command line refuses: by name, with the way out, code 2, before anything changes."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]

DP8 = "--config=configs/dp8.py"
# Of the command line itself; those of a verb are below.
PARSED = {
  "unknown key": (
    [DP8, "--config.training.stepz=3"],
    ["unknown config key 'training.stepz'", "did you mean 'training.steps'?"],
  ),
  "a key by what it is called elsewhere": (
    [DP8, "--config.model.n_embd=64"],
    ["unknown config key 'model.n_embd'", "did you mean 'model.model_size'?"],
  ),
  "likewise without --config": (
    [DP8, "--lr=1e-3"],
    ["unknown flag --lr; did you mean '--config.optimizer.learning_rate'?"],
  ),
  "a part of a step": (
    [DP8, "--config.training.steps=15e-1"],
    ["training.steps is a whole number, not '15e-1'"],
  ),
  "a section is no key": ([DP8, "--config.mesh=3"], ["mesh is a section"]),
  "missing config file": (
    ["--config=configs/dp9.py"],
    ["there is no config file 'configs/dp9.py'", "did you mean 'configs/dp8.py'?", "fsdp8.py"],
  ),
  "a config that is no Python": (["--config=README.md"], ["README.md is not a Python file; give"]),
  "what strategies are made of": (
    ["--config=configs/base.py"],
    ["get_config of a strategy takes only the recipe", "takes argument, mesh"],
  ),
  "a module without a config": (
    ["--config=configs/schema/recipes.py"],
    ["configs/schema/recipes.py defines no function get_config; give a strategy, such as configs/"],
  ),
  "a flag of another type": (
    ["sample", DP8, "--seed=x"],
    ["--seed=x: it is a whole number, not 'x'"],
  ),
  "a key without --config": (
    [DP8, "--training.steps=10"],
    ["unknown flag --training.steps; did you mean '--config.training.steps'?"],
  ),
  "no config of a checkpoint": (
    ["evaluate", "--checkpoint=docs"],
    ["no config, and --checkpoint=docs is no run's, whose config would be taken; give --config="],
  ),
  "unknown flag": ([DP8, "--workdri=x"], ["unknown flag --workdri", "did you mean 'workdir'?"]),
  "set without a value": (
    ["compare", DP8, "--against=configs/tp8.py", "--set=seed"],
    ["--set seed: give key=value"],
  ),
}
REFUSALS = {
  "a value by what it is called elsewhere": (
    [DP8, "--config.model.activation=relu2"],
    ["did you mean 'relu_squared'?"],
  ),
  "compare without a second config": (
    ["compare", DP8],
    ["compare needs a second config: --against=configs/single.py"],
  ),
  "compare what is not comparable": (
    [
      "compare",
      DP8 + ":mlp",
      "--against=configs/tp8.py:mlp",
      "--against.seed=1",
      "--against.model.model_size=64",
    ],
    ["seed: 0 and 1", "layer_1/kernel: float64[64, 128] and float64[64, 64]", "--set key=value"],
  ),
  "an unknown split": (
    [DP8, "--config.data.evaluation_split=dev"],
    ["dev", "train", "test"],
  ),
}


@pytest.mark.parametrize("case", PARSED)
def test_a_command_line_is_refused(parse, case):
  arguments, messages = PARSED[case]
  with pytest.raises(ValueError, match=r".") as refused:
    parse(*arguments)
  for message in messages:
    assert message in str(refused.value)


@pytest.mark.parametrize("case", REFUSALS)
def test_is_refused_before_anything_changes(main, case, tmp_path):
  arguments, messages = REFUSALS[case]
  workdir = tmp_path / "run"
  code, out, err = main(*arguments, f"--workdir={workdir}")
  assert code == 2, (out, err)
  assert err.startswith("refused: "), err
  assert "Traceback" not in err
  for message in messages:
    assert message in err
  assert not workdir.exists()


@pytest.mark.parametrize("wrong", ["--config.mesh.expert=2", "--config.mesh=3"])
def test_debug_shows_the_traceback_and_keeps_the_exit_code(main, wrong):
  # A supervisor restarts a run that ends with 1, and never one that is refused.
  code, _, err = main(DP8, wrong, "--debug")
  assert code == 2
  assert err.startswith("Traceback"), err
  assert "\nrefused: " in err


@pytest.mark.parametrize(
  ("source", "said"),
  [
    ("def get_config(:\n", "cannot be imported: {file}:1: SyntaxError"),
    ("raise SystemExit(0)\n", "cannot be imported: {file}:1: SystemExit: 0"),
    ("get_config = 3\n", "defines no function get_config"),
    ("def get_config(argument=None):\n  return {}\n", "returns a dict, not what base.get_config"),
    (
      "def get_config(argument=None):\n  1 / 0\n",
      "fails: {file}:2: ZeroDivisionError: division by",
    ),
    (
      "from ml_collections import ConfigDict\n\ndef get_config(argument=None):\n"
      "  return ConfigDict({'seed': 0})\n",
      "returns a config without argument, checkpoint, ",
    ),
  ],
)
def test_a_config_file_that_is_no_strategy_is_refused(parse, tmp_path, source, said):
  file = tmp_path / "mine.py"
  file.write_text(source)
  with pytest.raises(ValueError, match=r".") as refused:
    parse("layout", f"--config={file}")
  assert str(refused.value).startswith(f"--config={file}: ")
  assert said.replace("{file}", str(file)) in str(refused.value)


@pytest.mark.parametrize(
  ("verb", "flag"), [("train", "--workdir="), ("plan", "--topology="), ("coordcheck", "--widths=")]
)
def test_an_empty_value_is_refused(main, verb, flag):
  code, out, err = main(verb, DP8, flag)
  assert code == 2, (out, err)
  assert err == f"refused: {flag} is empty; give a value, or leave the flag out\n"


def test_a_file_of_prompts_that_cannot_be_read_is_refused_at_once(main, tmp_path):
  os.mkfifo(path := tmp_path / "prompts")
  code, _, err = main("sample", DP8, "--chat", f"--prompt_file={path}")
  assert code == 2, err
  assert err.startswith(f"refused: --prompt_file={path} ")
  assert "it is a FIFO, not a plain file" in err


def test_a_value_that_is_quoted_is_no_message_and_no_escape_sequence(main):
  code, _, err = main(DP8, "--config.training.steps=\x1b[31ma\nrefused: b\x07")
  assert code == 2
  assert err.startswith("refused: --config.training.steps=\\x1b[31ma\n  refused: b\\x07: training.")
  assert "\x1b" not in err


def test_a_variable_that_jax_refuses_is_one_message():
  done = subprocess.run(
    [sys.executable, "main.py", "layout", DP8],
    cwd=ROOT,
    env={**os.environ, "JAX_ENABLE_X64": "maybe"},
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 2, done.stderr
  assert done.stderr.startswith("refused: invalid truth value 'maybe' for environment 'JAX_EN")
  assert done.stderr.count("\n") == 1
