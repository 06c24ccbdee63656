"""Copies of the state: the same to the bit on shipped strategies, and told when they are not."""

import dataclasses

import jax
import pytest

from tests.helpers.flips import altered
from tests.helpers.jobs import first_state, host_batch, make_job, place, replica_check
from training.bad_steps import TrainingStoppedError
from training.replica_check import CopiesDifferError

EVERY = {"training.replica_check_every_steps": 3}
UP = ("hidden", "kernel")


def stepped(job, train, state, steps, check):
  """Makes the steps of these numbers, each followed by the check; returns the last state."""
  for step in steps:
    state, _ = train(state, place(job, host_batch(job, step)))
    jax.block_until_ready(state)
    check.after_step(step, state)
  return state


def test_copies_stay_the_same_to_the_bit():
  job = make_job("dp2_fsdp2_tp2", "lm", **{"training.replica_check_every_steps": 1})
  check = replica_check(job)
  state = stepped(job, job.compile_train_step().function, first_state(job), range(1, 4), check)
  check.before_save(3, state)


@pytest.fixture(scope="module")
def tried():
  """Returns (job, its step, its check) of a classifier on data=4 x tensor=2."""
  job = make_job("dp4_tp2", "mlp", **EVERY)
  return job, job.compile_train_step().function, replica_check(job)


def flipped(state, where, device, *bits):
  """Returns the state with bits flipped in one leaf (path of keys below params) on one device."""
  leaf, key = where
  inner = state.params[leaf]
  params = {**state.params, leaf: {**inner, key: altered(inner[key], device, *bits)}}
  return dataclasses.replace(state, params=params)


def caught(call, *arguments):
  """Returns the error that a call must raise."""
  with pytest.raises(CopiesDifferError) as found:
    call(*arguments)
  return found.value


def test_a_flipped_bit_is_caught_at_the_next_check_and_its_device_named(tried):
  job, train, check = tried
  state = stepped(job, train, first_state(job), range(1, 5), check)
  state = flipped(state, ("layer_2", "kernel"), 5, (2, 7))  # the exponent's last bit
  state = stepped(job, train, state, [5], check)  # not due
  error = caught(stepped, job, train, state, [6], check)
  assert error.step == 6
  assert [device.id for device in error.wrong] == [5]
  text = str(error)
  assert text.startswith("step 6: copies of the state differ, which must be the same to the bit: ")
  assert "device 5 differs from the other replicas:" in text
  assert "\n  layer_2/kernel [40, 56]: device 5 against devices 1, 3, 7\n" in text
  assert "This step is not saved. Run the same command again to resume" in text
  assert isinstance(error, TrainingStoppedError)  # exit code 1, said once for all processes


def test_nothing_is_saved_unchecked(tried):
  job, _, check = tried
  state = first_state(job)
  check.before_save(7, state)
  wrong = flipped(state, ("layer_1", "bias"), 0, (0, 0))
  error = caught(check.before_save, 8, wrong)
  assert [device.id for device in error.wrong] == [0]
  check.before_save(10, state)  # nothing is left behind of the one before


def test_many_differences_are_one_message(tried):
  job, _, check = tried
  state = first_state(job)
  for layer in ("layer_1", "layer_2", "layer_3", "layer_4"):
    for key in ("bias", "kernel"):
      state = flipped(state, (layer, key), 3, (0, 1))
  state = dataclasses.replace(state, step=altered(state.step, 4, (0, 0)))
  error = caught(check.before_save, 12, state)
  assert "devices 3, 4 differ from the other replicas" in str(error)
  assert "\n  step []: device 4 against devices 0, 1, 2, 3, 5, 6, 7\n" in str(error)
  assert "\n  and 1 more\n" in str(error)


def test_of_two_copies_both_are_named():
  job = make_job("dp4_tp2", "mlp", **EVERY, **{"mesh.data": 2, "mesh.tensor": 4})
  state = flipped(first_state(job), ("layer_2", "kernel"), 1, (0, 0))
  text = str(caught(replica_check(job).before_save, 1, state))
  assert "there is no majority, so it is not known which device is wrong" in text
  assert "layer_2/kernel [40, 56]: the copies on devices 1, 5 differ" in text


@pytest.mark.parametrize(
  ("strategy", "overrides"),
  [("dp4_tp2", {"training.replica_check_every_steps": 0}), ("single", {})],
)
def test_off_and_without_copies_nothing_is_compiled(strategy, overrides, monkeypatch):
  job = make_job(strategy, "mlp", **overrides)
  state = first_state(job)
  monkeypatch.setattr(type(job), "compile", None)
  check = replica_check(job)
  check.after_step(10, flipped(state, ("layer_1", "bias"), 0, (0, 0)))
  check.before_save(10, state)
