"""Steps computed twice: the same to the bit on other devices, and told where they differ."""

import dataclasses

import jax
import pytest

from tests.helpers.flips import altered
from tests.helpers.jobs import first_state, host_batch, make_job, place
from training.bad_steps import TrainingStoppedError
from training.recomputed_steps import RecomputedSteps, StepsDifferError, elsewhere


def test_each_part_moves_to_another_device_of_its_process():
  mesh = make_job("dp2_fsdp2_tp2", "mlp").mesh
  moved = elsewhere(mesh)
  assert [device.id for device in moved.devices.flat] == [1, 2, 3, 4, 5, 6, 7, 0]
  assert moved.axis_names == mesh.axis_names
  assert moved.devices.shape == mesh.devices.shape


def test_a_flip_in_what_one_device_holds_is_found_in_the_step_that_is_computed_twice():
  job = make_job("dp2_fsdp2_tp2", "mlp")
  train, state = job.compile_train_step().function, first_state(job)
  check = RecomputedSteps(job, 2, 0)

  def step(number, state, *, flip=False):
    batch = place(job, host_batch(job, number - 1))
    check.before_step(number, state, batch)
    if flip:  # after the copy: what happens while the step is computed
      first, *rest = state.optimizer
      leaf = altered(first.mu["layer_3"]["kernel"], 5, (9, 6))
      mu = {**first.mu, "layer_3": {**first.mu["layer_3"], "kernel": leaf}}
      state = dataclasses.replace(state, optimizer=(first._replace(mu=mu), *rest))
    state, _ = train(state, batch)
    jax.block_until_ready(state)
    check.after_step(number, state)
    return state

  for number in range(1, 5):
    state = step(number, state)
  state = step(5, state, flip=True)  # not computed twice: neither the flip nor what it leaves
  state = step(6, state)
  with pytest.raises(StepsDifferError) as found:
    step(8, state, flip=True)
  text = str(found.value)
  assert text.startswith("step 8: computed twice from the same state and batch, it gave other bits")
  assert "layer_3/kernel: devices 5 and 6" in text
  assert "layer_2" not in text
  assert isinstance(found.value, TrainingStoppedError)  # exit code 1, said once for all processes
