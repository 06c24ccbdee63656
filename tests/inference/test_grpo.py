"""Answers of GRPO: sampler and trainer agree on every mesh; what does not is refused; resume."""

import dataclasses
import json
import pathlib
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from inference import grpo
from input_pipeline.position import Position
from models.spec import LORA_B
from processes.coordination import current
from processes.preemption import StopRequest
from processes.watchdog import Watchdog
from tests.helpers.cli import TINY_LM, lines_of
from tests.helpers.jobs import first_state, make_job
from tests.parity import mixers
from tests.parity.latents import LATENTS
from training import splits
from training.bad_steps import TrainingStoppedError
from training.rewards import Scores

RECIPE = "model=lm,data=prompts"
LENGTH, ROWS, GROUP = 16, 8, 4
KEYS = {
  "data.sequence_length": LENGTH,
  "data.global_batch_size": ROWS,
  "grpo.answers": GROUP,
  "grpo.rewards": "number",
  "grpo.new_tokens": 7,
  "grpo.temperature": 0.8,
  "training.parameter_dtype": "float64",
  "training.compute_dtype": "float64",
}
FLOAT32 = dict.fromkeys(("training.parameter_dtype", "training.compute_dtype"), "float32")
WINDOW = {"model.window": 5, "model.global_every": 2, "model.attention_sinks": True}
TENSOR = {"mesh.data": 2, "mesh.tensor": 2}
DENSE_FIRST = {"model.experts": 4, "model.experts_per_token": 2, "model.dense_layers": 1}
CASES = {
  "windows, sinks, adapters": {
    **{"mesh.fsdp": 2, **TENSOR, **WINDOW},
    **{"lora.rank": 3, "grpo.kl": 0.1},
  },
  "a ring over context": {"mesh.context": 2, **TENSOR, "model.context_attention": "ring"},
  "latent attention, dense and other layers, vocabulary in chunks": {
    **{"mesh.data": 2, "mesh.expert": 2, "training.loss_chunks": 3},
    **{**LATENTS, **DENSE_FIRST},
  },
  "a hybrid": {**TENSOR, **mixers.DELTA},
}


class LetterRewards:
  """Rewards by the ids of an answer: some answers are better than others, one of them fails."""

  def __init__(self, *_, **__):
    pass

  def score(self, prompts, answers, rows):
    values = np.array([[sum(one.encode()) % 7 / 7 for one in group] for group in answers])
    values[0, 1] = np.nan
    return Scores(values, {"letters": values}, {"letters: failed": 1}, "the first")

  def close(self):
    pass


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory):
  """Returns a file of prompts of tokens below the small model's vocabulary of 61."""
  random = np.random.default_rng(0)
  lines = [
    json.dumps({"prompt": bytes(random.integers(1, 60, size).tolist()).decode(), "answer": size})
    for size in (1, 5, 3, 8, 2, 4, 7, 6, 2, 5)
  ]
  path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
  path.write_text("\n".join(lines))
  return path


@pytest.fixture(scope="module")
def made(prompts_file):
  """Returns a function of keys that returns (rollouts that have begun, their job)."""

  def make(**keys):
    job = make_job("single", RECIPE, **{**KEYS, "data.files": str(prompts_file), **keys})
    make_rollouts = grpo.checked(job, splits.open_data(job))
    return make_rollouts(None, Watchdog(current(), StopRequest())), job

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(grpo, "Rewards", LetterRewards)
    yield make


def batch_of(rollouts, state, step=0):
  """Returns the batch of a step on the host, and its metrics."""
  batch, metrics = rollouts.batch(state, step, Position.start(ROWS))
  return jax.device_get(batch), metrics


def without_zeros(state):
  """Returns a state whose adapters do something."""

  def filled(path, leaf):
    return leaf + 0.1 if LORA_B in jax.tree_util.keystr(path) else leaf

  return dataclasses.replace(state, params=jax.tree_util.tree_map_with_path(filled, state.params))


@pytest.mark.parametrize("case", CASES)
def test_sampler_and_trainer_agree_in_float64(case, made):
  with jax.enable_x64(True):
    rollouts, job = made(**CASES[case])
    state = without_zeros(first_state(job))
    batch, metrics = batch_of(rollouts, state)
  assert metrics["sampler_difference"] <= 1e-12
  assert batch["sampled"].dtype == np.float64
  check_rows(batch)
  if job.config.grpo.kl:
    distance = np.abs(batch["reference"] - batch["sampled"])[batch["token_weights"] > 0]
    assert distance.max() > 0.01, "the reference is the model without its adapters"


def check_rows(batch):
  """Checks that answers are behind the prompts of their groups, and nothing else has weight."""
  drawn = batch["token_weights"] > 0
  assert np.all(batch["sampled"][drawn] < 0)
  assert not batch["sampled"][~drawn].any()
  assert batch["weights"].tolist() == [1, 0, *[1] * (ROWS - 2)], "the second reward has failed"
  for row, taken in enumerate(drawn):
    first, last = taken.argmax(), LENGTH - taken[::-1].argmax() - 1
    assert taken[first : last + 1].all()
    # Each target is the next token, and the prompt, from the start of a document on, the group's.
    tokens, of_group = batch["tokens"][row], batch["tokens"][row // GROUP * GROUP]
    np.testing.assert_array_equal(batch["targets"][row, :last], tokens[1 : last + 1])
    np.testing.assert_array_equal(tokens[: first + 1], of_group[: first + 1])
    assert tokens[0] == 0
    assert np.all(tokens[1 : first + 1] > 0)
  means = (batch["rewards"] * batch["weights"]).reshape(-1, GROUP).sum(1)
  means /= batch["weights"].reshape(-1, GROUP).sum(1)
  above = (batch["rewards"].reshape(-1, GROUP) - means[:, None]).ravel()
  there = batch["weights"] > 0
  assert np.all(np.sign(batch["advantages"][there]) == np.sign(above[there]).round())


@pytest.fixture(scope="module")
def two_devices(made):
  """Returns rollouts in float32 on a small mesh, with their first state."""
  rollouts, job = made(**FLOAT32, **{"mesh.data": 2, "grpo.updates": 2})
  return rollouts, first_state(job)


def changed(state, factor=1.05):
  return dataclasses.replace(state, params=jax.tree.map(lambda x: x * factor, state.params))


def test_what_is_drawn_follows_from_seed_step_and_parameters(two_devices):
  rollouts, state = two_devices
  first, metrics = batch_of(rollouts, state)
  assert metrics["sampler_difference"] < 1e-4
  assert 0 < metrics["answer_tokens_per_second"] < 1e7
  again, nothing = batch_of(rollouts, changed(state), step=1)
  assert nothing == {}, "of the second update on the same answers"
  other, _ = batch_of(rollouts, state, step=2)
  repeated, _ = batch_of(rollouts, state)
  for name, array in first.items():
    np.testing.assert_array_equal(array, again[name])
    np.testing.assert_array_equal(array, repeated[name])
  assert not np.array_equal(first["tokens"], other["tokens"])
  assert [rollouts.between(step) for step in range(4)] == [True, False, True, False]


def stale(rollouts, state, monkeypatch):
  """Draws from parameters of before an update."""
  kind, old = type(rollouts._sampler), jax.tree.map(lambda x: x.copy(), state.params)
  draw = kind.__call__
  monkeypatch.setattr(
    kind, "__call__", lambda self, _, *rest, **more: draw(self, old, *rest, **more)
  )
  return changed(state)


def another_temperature(rollouts, state, monkeypatch):
  request = dataclasses.replace(rollouts._sampler._request, temperature=1.0)
  monkeypatch.setattr(rollouts._sampler, "_request", request)
  return state


def shifted(rollouts, state, monkeypatch):
  """Puts log p of a token at the place of the one before it."""
  rows_of = grpo.rows_of

  def moved(*given):
    rows = rows_of(*given)
    return {**rows, "sampled": np.roll(rows["sampled"], -1, axis=1)}

  monkeypatch.setattr(grpo, "rows_of", moved)
  return state


@pytest.mark.parametrize("fault", [stale, another_temperature, shifted])
def test_a_step_on_answers_of_another_policy_is_refused(fault, two_devices, monkeypatch):
  rollouts, state = two_devices
  state = fault(rollouts, state, monkeypatch)
  message = (
    r"step 1: sampler and trainer do not agree on [\d,]+ of [\d,]+ drawn tokens: the first is "
    r"token \d+ \(.*\) of row \d, place \d+: log p -[\d.]+ when it was drawn, -[\d.]+ by the whole "
    r"row; they may differ by grpo.ratio_bound=0.001 .* The step is refused"
  )
  with pytest.raises(TrainingStoppedError, match=message):
    batch_of(rollouts, state)


def test_advantages_and_weights_of_tokens():
  values = np.array([[1.0, 0.0, np.nan, 0.5], [2.0, 2.0, 2.0, 2.0]])
  wanted = np.array([[0.5, -0.5, 0, 0], [0, 0, 0, 0]])
  np.testing.assert_allclose(grpo.advantages(values, "centered"), wanted)
  deviation = np.std([1.0, 0.0, 0.5])
  np.testing.assert_allclose(
    grpo.advantages(values, "deviations"), wanted / (deviation + grpo.EPSILON)
  )
  assert not grpo.advantages(np.full((1, 8), 0.1), "deviations").round(9).any()
  drawn = np.array([[False, True, True, True], [False, True, False, False], [True] * 4])
  there = np.array([True, True, False])
  for kind, divisors in (("tokens", [2, 2, 2]), ("answers", [3, 1, 4]), ("constant", [6, 6, 6])):
    found = grpo.token_weights(drawn, there, kind, 6)
    np.testing.assert_allclose(found, drawn / np.array(divisors)[:, None])


def test_prompts_that_leave_no_place_are_refused(made):
  said = (
    r"prompts are longer than 6 tokens, the first at .*prompts.jsonl:\d+ \(\d\): with grpo.new_t"
  )
  with pytest.raises(ValueError, match=said):
    made(**FLOAT32, **{"grpo.new_tokens": 10})


# ------------------------------ whole runs ------------------------------

REWARD = """
def reward(prompt, answer, row):
  return sum(map(ord, answer)) % 5 / 4
"""


@pytest.fixture
def arguments(tmp_path):
  """Returns the arguments of a run, without its workdir."""
  (tmp_path / "own.py").write_text(REWARD)
  lines = [json.dumps({"prompt": f"{n} and {n + 1}"}) for n in range(40)]
  (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
  keys = {
    "data.files": tmp_path / "prompts.jsonl",
    "data.data_dir": tmp_path / "data",
    "data.global_batch_size": 8,
    "data.sequence_length": 20,
    "data.evaluation_split": "test",
    "grpo.rewards": tmp_path / "own.py",
    "grpo.answers": 4,
    "grpo.new_tokens": 5,
    "grpo.updates": 2,
    "grpo.kl": 0.1,
    "grpo.reward_processes": 1,
    "metrics.every_steps": 1,
    "metrics.tensorboard": False,
    "training.steps": 8,
    "checkpoint.every_steps": 2,
    "evaluation.every_steps": 4,
  }
  tiny = [flag for flag in TINY_LM if flag.split("=")[0][len("--config.") :] not in keys]
  config = "--config=configs/single.py:model=lm,data=prompts"
  return [config, *tiny, *(f"--config.{key}={value}" for key, value in keys.items())]


def numbers(workdir):
  """Returns what a run has computed, by step, without times."""
  clocks = ("seconds", "per_second")
  return [
    {key: value for key, value in line.items() if not key.endswith(clocks)}
    for line in lines_of(workdir)
  ]


@pytest.mark.long
def test_a_killed_run_draws_the_same_answers_again(main, arguments, tmp_path):
  whole, killed = tmp_path / "whole", tmp_path / "killed"
  code, out, err = main(*arguments, f"--workdir={whole}")
  assert code == 0, (out, err)
  found = numbers(whole)
  assert found[0]["kl"] == pytest.approx(0, abs=1e-6), "model and reference are the same"
  assert found[1]["kl"] > 0
  assert [line["step"] for line in found if "sampler_difference" in line] == [1, 3, 5, 7]
  assert len({line["reward"] for line in found if "reward" in line}) > 2
  # Killed at a step that is in the middle of its updates, and after the newest checkpoint.
  process = subprocess.Popen(
    [sys.executable, "main.py", *arguments, f"--workdir={killed}"],
    cwd=pathlib.Path(__file__).parents[2],
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
  )
  log = killed / "metrics.jsonl"
  while process.poll() is None and not (log.exists() and b'{"step": 5, "a' in log.read_bytes()):
    time.sleep(0.005)
  process.kill()
  process.wait()
  code, out, err = main(*arguments, f"--workdir={killed}")
  assert code == 0, (out, err)
  assert "resumes from the checkpoint of step" in out
  assert numbers(killed) == found
  code, out, err = main("evaluate", *arguments, f"--checkpoint={killed}")
  assert code == 0, (out, err)
  assert f"eval_reward {found[-1]['eval_reward']:.4f}" in out
