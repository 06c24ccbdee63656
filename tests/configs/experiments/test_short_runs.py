"""Every experiment: what it opens with, and the first steps of those that a laptop can run."""

import ast
import pathlib
import re

import pytest

from commands import config_flag
from configs.schema import finalize, validate
from partitioning.mesh_sizes import resolve_sizes
from tests.helpers.cli import QUICKLY, lines_of

ROOT = pathlib.Path(__file__).parents[3]
FOLDER = ROOT / "configs" / "experiments"
FILES = sorted(path.name for path in FOLDER.glob("*.py") if path.name != "__init__.py")
PAGE = (ROOT / "docs" / "models.md").read_text()
# Planned for hardware that is not here: (platform, devices, tokens to train on).
PLANNED = {
  "gpt2_fineweb_edu.py": ("gpu", 8, 10e9),
  "llama3_8b_v5p_128.py": ("tpu", 64, 160e9),
}
# Experiment -> (step -> the loss that was measured there, relative tolerance). Images
# and random numbers are the same everywhere, and sums differ in their last bits. The standard
# library differs from one version of Python to the next.
ROUNDING, ANOTHER_PYTHON = 2e-4, 0.03
LOSSES = {
  "digits.py": ({1: 2.295547, 10: 2.142370, 20: 1.522351}, ROUNDING),
  "tutorial.py:data": ({1: 28.216224, 10: 24.485229}, ROUNDING),
  "tutorial.py:tensor": ({1: 28.216224, 10: 24.485233}, ROUNDING),
  "vit.py": ({1: 2.567063, 10: 2.094080, 20: 1.384344}, ROUNDING),
  "default_job.py": ({1: 6.208470, 10: 2.722239}, ANOTHER_PYTHON),
  "python_bpe.py": ({1: 8.817538}, ANOTHER_PYTHON),
  "experts.py:experts": ({1: 5.9501, 10: 2.7665, 20: 2.5634}, ANOTHER_PYTHON),
}
LONG = ("vit.py", "default_job.py", "python_bpe.py", "experts.py:experts")
LONG += ("tutorial.py:data", "tutorial.py:tensor")


def summary(name):
  """Returns the docstring of an experiment."""
  return ast.get_docstring(ast.parse((FOLDER / name).read_text()))


@pytest.mark.parametrize("name", FILES)
def test_opens_with_its_command_and_what_it_gives(name):
  text = summary(name)
  assert f"main.py --config=configs/experiments/{name}" in text
  numbers = text[text.rindex("main.py") :]
  if name in PLANNED:
    assert "NOT RUN" in text.partition("\n")[0]
    assert re.search(r"GiB|GB", numbers), "the memory of its plan"
    assert re.search(r"days?|hours", numbers), "the time of its plan"
  else:
    assert re.search(r"\d\.\d{2}|\d %", numbers), "a loss or an accuracy"
    assert re.search(r"\d+ s\b", numbers), "a time"
    assert "cores" in numbers, "the hardware"


@pytest.mark.parametrize("name", FILES)
def test_the_page_has_it(name):
  assert f"(../configs/experiments/{name})" in PAGE
  assert re.search(rf"main.py (\w+ )?configs/experiments/{name.removesuffix('.py')}\b", PAGE)


@pytest.mark.parametrize("name", PLANNED)
def test_what_is_planned_is_a_config_that_would_start(name):
  platform, devices, tokens = PLANNED[name]
  config = config_flag.load("config", f"{FOLDER}/{name}")
  sizes = resolve_sizes(config.mesh, devices)
  config = finalize.finalize(config, platform, sizes)
  validate.check(config, sizes)
  trained = config.training.steps * config.data.global_batch_size * config.data.sequence_length
  assert trained == pytest.approx(tokens, rel=1e-4)


@pytest.mark.parametrize(
  "name", [name for name in FILES if name not in ("experts.py", "docstring_chat.py")]
)
def test_an_argument_that_it_does_not_have_is_refused(name):
  with pytest.raises(ValueError, match="unknown variant 'other'; there "):
    config_flag.load("config", f"{FOLDER}/{name}:other")


def test_training_without_the_tokenizer_names_the_command(monkeypatch, tmp_path):
  monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
  with pytest.raises(ValueError, match=r"python_bpe\.py:tokenizer --train_tokenizer=4096"):
    config_flag.load("config", f"{FOLDER}/python_bpe.py")


@pytest.mark.parametrize(
  "name", [pytest.param(x, marks=[pytest.mark.long] * (x in LONG)) for x in LOSSES]
)
def test_the_first_steps_have_the_recorded_losses(name, main, tmp_path):
  losses, tolerance = LOSSES[name]
  flag = f"--config=configs/experiments/{name}"
  if name == "python_bpe.py":
    code, out, err = main("prepare", f"{flag}:tokenizer", "--train_tokenizer=4096")
    assert code == 0, (out, err)
  # As many steps as the warm-up has, or the first one of it: their learning rates are those of a
  # complete run.
  steps = max(losses)
  short = [
    *(f"--config.training.steps={steps}", f"--workdir={tmp_path}", QUICKLY),
    *("--config.evaluation.every_steps=0", "--config.evaluation.final_steps=1"),
    *("--config.metrics.every_steps=1", "--config.evaluation.sample_tokens=0"),
  ]
  if "tutorial" not in name:
    short.append(f"--config.optimizer.warmup_steps={steps}")
  code, out, err = main(flag, *short)
  assert code == 0, (out, err)
  found = {line["step"]: line["loss"] for line in lines_of(tmp_path) if "loss" in line}
  assert {step: found[step] for step in losses} == pytest.approx(losses, rel=tolerance)
