"""Two and four processes give what one process with the same mesh gives."""

import pathlib

import pytest

from tests.helpers.cli import TINY_LM, lines_of
from tests.input_pipeline.text import corpora
from tests.processes.command_lines import MLP, evaluations, losses

LM = [  # on packed rows of a mixture
  "--config=configs/dp2_fsdp2_tp2.py:model=lm,data=text",
  *TINY_LM,
  "--config.data.global_batch_size=8",
  "--config.training.steps=3",
  "--config.metrics.every_steps=1",
  "--config.metrics.tensorboard=False",
  "--config.optimizer.warmup_steps=0",
  "--config.data.evaluation_split=test",
]
# Both processes have experts, so tokens are exchanged between them.
EXPERTS = [
  *LM,
  *("--config.mesh.data=1", "--config.mesh.fsdp=1", "--config.mesh.expert=4"),
  *("--config.model.experts=4", "--config.model.expert_feedforward_size=24"),
  *("--config.model.router_correction=True", "--config.training.router_bias_rate=0.05"),
  *("--config.training.balance_loss=0.02", "--config.optimizer.schedule=constant"),
]
SHARDED = [*MLP, "--config.mesh.data=1", "--config.mesh.fsdp=4"]
TENSOR = [*MLP, "--config.mesh.data=1", "--config.mesh.tensor=4"]
# All of a small evaluation split, whose last batch is padded; saves and evaluations in between.
WHOLE = ["--config.evaluation.steps=0", "--config.evaluation.every_steps=2"]
WHOLE += ["--config.evaluation.final_steps=0", "--config.data.evaluation_split=test[:40]"]
WHOLE += ["--config.checkpoint.every_steps=1", "--config.data.global_batch_size=16"]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> list[str]:
  """Returns the arguments that name two sources, and where their tokens are stored."""
  return corpora.mixture(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def alone(main, tmp_path_factory):
  """Returns a function that gives the workdir of a run of one process, made once."""
  made = {}

  def run(arguments) -> pathlib.Path:
    key = " ".join(arguments)
    if key not in made:
      made[key] = tmp_path_factory.mktemp("alone") / "run"
      code, out, err = main(*arguments, f"--workdir={made[key]}")
      assert code == 0, (out, err)
    return made[key]

  return run


@pytest.mark.parametrize(
  ("name", "count"),
  [
    ("data", 2),
    pytest.param("tensor", 4, marks=pytest.mark.long),
    *(
      pytest.param(name, count, marks=pytest.mark.faults)
      for name, count in (("data", 4), ("fsdp", 4), ("tensor", 2), ("lm", 2), ("lm", 4))
    ),
  ],
)
def test_losses_are_those_of_one_process(well, alone, mixed, tmp_path, name, count):
  arguments = {"data": MLP + WHOLE, "fsdp": SHARDED + WHOLE, "tensor": TENSOR + WHOLE}
  arguments["lm"] = LM + mixed
  one = alone(arguments[name])
  out, *others = well(count, *arguments[name], f"--workdir={tmp_path}")
  assert f"simulated CPU devices, made for this run, of {count} processes" in out
  for other in others:  # gloo's own lines apart, process 0 alone prints
    assert _without_gloo(other) == ""
  expected, found = losses(one), losses(tmp_path)
  assert list(found) == list(expected) == [1, 2, 3]
  assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-5)
  assert list(evaluations(tmp_path)) == list(evaluations(one))
  assert list(evaluations(tmp_path).values()) == pytest.approx(
    list(evaluations(one).values()), rel=1e-5
  )


@pytest.mark.long
def test_experts_of_two_processes_train_as_in_one_which_resumes_their_run(
  main, well, alone, mixed, tmp_path
):
  one = alone(EXPERTS + mixed)
  well(2, *EXPERTS, *mixed, "--config.training.steps=2", f"--workdir={tmp_path}")
  code, out, err = main(*EXPERTS, *mixed, f"--workdir={tmp_path}")
  assert code == 0, (out, err)
  expected, found = losses(one), losses(tmp_path)
  assert list(found) == list(expected) == [1, 2, 3]
  assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-5)
  rounds = [line["exchange_rounds"] for line in lines_of(tmp_path) if "loss" in line]
  assert min(rounds) >= 1


# ------------------------------ other verbs ------------------------------


def test_evaluate_gives_the_same_number(main, well, alone):
  arguments = [*MLP, *WHOLE]
  one = alone(arguments)
  code, alone_out, err = main("evaluate", *arguments, f"--workdir={one}")
  assert code == 0, err
  out, other = well(2, "evaluate", *arguments, f"--workdir={one}")
  assert _without_gloo(out) == _without_gloo(alone_out)
  assert "evaluation after step 3 (the whole split): eval_loss " in out
  assert _without_gloo(other) == ""


@pytest.mark.faults
def test_sample_gives_the_same_words(main, well, alone):
  one = alone(LM)
  more = ["--prompt=def ", "--prompt=import os", "--max_new_tokens=6", "--temperature=0.7"]
  code, alone_out, err = main("sample", *LM, *more, f"--workdir={one}")
  assert code == 0, err
  for count in (2, 4):
    out, *others = well(count, "sample", *LM, *more, f"--workdir={one}")
    assert _without_gloo(out) == _without_gloo(alone_out)
    assert [_without_gloo(other) for other in others] == [""] * (count - 1)


@pytest.mark.faults
def test_prompts_that_differ_in_a_file_are_refused(start, alone, tmp_path):
  # One name on all hosts, and what is in it differs: the processes would draw other shapes.
  one = alone(LM)
  files = [tmp_path / str(index) for index in range(2)]
  for index, folder in enumerate(files):
    folder.mkdir()
    (folder / "prompts.txt").write_text("a\n" * (index + 1))
  ended = start(
    2,
    "sample",
    *LM,
    "--prompt_file=prompts.txt",
    "--max_new_tokens=4",
    f"--workdir={one}",
    environments={index: {"TEST_FOLDER": str(folder)} for index, folder in enumerate(files)},
    script=pathlib.Path(__file__).parent / "elsewhere.py",
  )
  assert [process.code for process in ended] == [2, 2], ended
  assert "prompt" in ended[0].err


def _without_gloo(out: str) -> str:
  # Its threads print pieces of lines between one another.
  noise = ("[Gloo]", "peer ranks")
  lines = [line for line in out.splitlines() if line.strip()]
  return "\n".join(line for line in lines if not any(text in line for text in noise))
