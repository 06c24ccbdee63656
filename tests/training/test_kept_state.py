"""Bits of the state that change in memory between two updates are found at the next update."""

import dataclasses

import numpy as np
import pytest

from tests.helpers.flips import altered
from tests.helpers.jobs import first_state, host_batch, make_job, place
from tests.training import runs
from training.bad_steps import TrainingStoppedError
from training.kept_state import KeptState, StateChangedError


def with_flip(state, where: str):
  """Returns a state of which a bit of a kernel on device 5, or of its first moment, has changed."""
  first, *rest = state.optimizer
  kernels = {"params": state.params, "mu": first.mu}[where]
  leaf = altered(kernels["layer_3"]["kernel"], 5, (9, 6))
  changed = {**kernels, "layer_3": {**kernels["layer_3"], "kernel": leaf}}
  if where == "params":
    return dataclasses.replace(state, params=changed)
  return dataclasses.replace(state, optimizer=(first._replace(mu=changed), *rest))


def digested_late_and_in_place(job, train):
  """Checks that the state itself is digested, after the backward pass; else little is covered."""
  texts = [step.as_text() for step in (job.compile_train_step().function, train)]
  plain, lines = (text[text.index("\nENTRY") :].splitlines() for text in texts)
  copies = [sum("copy(%param" in line for line in one) for one in (plain, lines)]
  assert copies[1] <= copies[0] + 1, "the digests, of a scalar too, read copies"
  last_product = max(n for n, line in enumerate(lines) if " dot(" in line)
  digests = [n for n, line in enumerate(lines) if "shard_map/reduce" in line]
  assert last_product < min(digests)


@pytest.fixture(scope="module")
def compiled():
  """Returns a job, its step with digests, and what compares them."""
  job = make_job("fsdp8", "mlp")
  kept = KeptState(job, late=False)
  train = kept.compile_train_step().function
  digested_late_and_in_place(job, train)
  return job, train, kept


@pytest.mark.parametrize("late", [False, True])
def test_a_flip_in_what_one_device_holds_is_found_by_the_next_update(compiled, late):
  job, train, kept = compiled
  kept._late = late

  def step(number, state):
    batch = place(job, host_batch(job, number - 1))
    state, found = train(state, batch)
    metrics = kept.after_step(number, found)
    assert np.isfinite(float(metrics["loss"]))
    return state

  def after_three():
    kept.forget()
    state = first_state(job)
    for number in (1, 2, 3):
      state = step(number, state)
    return state

  for where in ("params", "mu"):
    state = with_flip(after_three(), where)
    if late:
      state = step(4, state)
    with pytest.raises(StateChangedError) as found:
      step(5 if late else 4, state)
    text = str(found.value)
    assert text.startswith("step 3: bits of its state have changed in memory before step 4")
    assert "layer_3/kernel: device 5" in text
    assert text.count("device 5") == 1
    assert isinstance(found.value, TrainingStoppedError)
  state = after_three()
  kept.before_save(3, state)
  with pytest.raises(StateChangedError, match=r"optimizer/.*layer_3/kernel: device 5"):
    kept.before_save(3, with_flip(state, "mu"))


def test_a_run_with_it_has_the_losses_of_one_without(tmp_path):
  keys = {"training.steps": 5, "checkpoint.every_steps": 2}
  losses = []
  for name in ("without", "with"):
    job = runs.job(**keys, **{"training.check_memory": name == "with"})
    runs.train(tmp_path / name, runs.source(), prepared=job)
    losses.append([line["loss"] for line in runs.lines(tmp_path / name) if "loss" in line])
  assert len(losses[0]) == 5
  assert losses[0] == losses[1]
