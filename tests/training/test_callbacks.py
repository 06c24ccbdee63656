"""training/callbacks.py: when a callback is called, with what, and what its failure does."""

import jax
import numpy as np
import pytest

from tests.training import runs
from training import callbacks
from training.callbacks import CALLBACKS, Callback, CallbackError


def test_it_is_called_every_n_steps_with_the_state_and_metrics_of_that_step(tmp_path, monkeypatch):
  seen = {}

  def keep(context):
    params = jax.device_get(context.state.params)
    seen[context.step] = (int(context.state.step), context.metrics["loss"], params)
    assert context.workdir.exists()
    assert context.job.mesh.shape["data"] == 2

  monkeypatch.setitem(CALLBACKS, "keep", Callback(3, keep))
  keys = {"training.steps": 7, "checkpoint.every_steps": 6, "metrics.every_steps": 5}
  job = runs.job(**keys, **{"training.callbacks": ("keep",)})
  runs.train(tmp_path / "with", runs.source(), prepared=job)
  assert [(step, state) for step, (state, *_) in seen.items()] == [(3, 3), (6, 6)]
  # Step 3 has no line; a run that writes all of them, and has no callbacks, has the same losses.
  runs.train(
    tmp_path / "all", runs.source(), prepared=runs.job(**{**keys, "metrics.every_steps": 1})
  )
  losses = {line["step"]: line["loss"] for line in runs.lines(tmp_path / "all") if "loss" in line}
  assert [loss for _, loss, _ in seen.values()] == [losses[3], losses[6]]
  saved = runs.arrays(tmp_path / "all", 6, runs.job(**keys))
  ours = jax.tree.leaves(seen[6][2])
  assert all(any(np.array_equal(one, other) for other in saved) for one in ours)


def test_one_that_raises_ends_the_run_with_its_name_and_place(tmp_path, monkeypatch):
  def fail(context):
    raise KeyError("nothing")

  monkeypatch.setitem(CALLBACKS, "failing", Callback(2, fail))
  job = runs.job(**{"training.callbacks": ("failing",)})
  with pytest.raises(CallbackError, match=r"callback 'failing' fails after step 2: .*KeyError"):
    runs.train(tmp_path, runs.source(), prepared=job)


def test_one_that_raises_on_a_rollback_is_named():
  context = callbacks.Context(5, None, {}, None, None)
  table = {"quiet": Callback(2, print), "failing": Callback(2, print, on_rollback=lambda _: 1 / 0)}
  with pytest.raises(
    CallbackError, match=r"'failing' fails on the rollback to step 5: .*ZeroDivisionError"
  ):
    callbacks.call(table, context, rollback=True)


def test_a_period_below_one_step_is_refused():
  with pytest.raises(ValueError, match="every_steps=0: at least 1"):
    Callback(0, print)


def test_names_that_are_not_registered_are_refused():
  with pytest.raises(ValueError, match=r"training\.callbacks: unknown callback 'norm'; none is"):
    runs.job(**{"training.callbacks": ("norm",)})
  with pytest.raises(
    ValueError, match=r"metrics\.sinks: unknown sink 'wand'; registered are csv, "
  ):
    runs.job(**{"metrics.sinks": ("wand",)})
