"""Steps with bad numbers: the run stops, or goes back and skips their batches."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from input_pipeline import position
from processes.preemption import StopRequest
from tests.helpers.jobs import SMALL, first_state, make_job
from tests.training import runs
from tests.training.runs import (
  ROLL_BACK,
  STEPS,
  assert_same,
  numbers,
  rollbacks,
  saved,
  source,
  train,
)
from training import bad_steps as rollback
from training.bad_steps import BadSteps, TrainingStoppedError
from training.callbacks import CALLBACKS, Callback
from training.metrics.reader import DebugNans
from training.metrics.sinks import SINKS

NAN, HUGE = math.inf, 1e7
WINDOW = {"training.bad_step_deviations": 10.0, "training.bad_step_window": 4}


@pytest.fixture(scope="session")
def told(tmp_path_factory):
  """Returns a function from batches to the workdir of a run that was told to skip them."""
  found = {}

  def of(*skipped: int, **overrides):
    key = (skipped, tuple(overrides.items()))
    if key not in found:
      found[key] = tmp_path_factory.mktemp("told")
      train(found[key], source(), **{"data.skip_batches": skipped, **overrides})
    return found[key]

  return of


# ------------------------------ whole runs ------------------------------


def test_a_bad_step_stops_the_run_by_default_and_is_not_saved(tmp_path, monkeypatch):
  with pytest.raises(
    TrainingStoppedError, match=r"step 13: .*nan.*training\.on_bad_step=roll_back"
  ):
    train(tmp_path, source({12: NAN}))
  assert saved(tmp_path) == [5, 10]
  assert [line["step"] for line in numbers(tmp_path) if "loss" in line] == list(range(1, 13))
  # The same command goes on once it may go back: nothing has to be accepted.
  heard = {"sink": [], "callback": []}
  train(tmp_path, source({12: NAN}), **ROLL_BACK, **notified(monkeypatch, heard))
  assert [line["step"] for line in rollbacks(tmp_path)] == [10]
  # The run resumes from step 10, and step 13 is bad again.
  losses = [*range(11, 13), "back to 10", *range(11, STEPS + 1)]
  assert [one for one in heard["sink"] if not str(one).startswith("eval")] == losses
  assert heard["callback"] == [11, 12, ("back to", 10, 10, {}), *range(11, STEPS + 1)]


def notified(monkeypatch, heard):
  """Returns keys of a run whose sink and callback note what they are called with."""

  class Noting:
    def __init__(self, config, workdir, step):
      assert step == 10

    def write(self, step, values):
      heard["sink"].append(step if "loss" in values else f"eval {step}")

    def on_rollback(self, step):
      heard["sink"].append(f"back to {step}")

    def close(self):
      pass

  def back(context):
    heard["callback"].append(
      ("back to", context.step, int(context.state.step), dict(context.metrics))
    )

  noting = Callback(1, lambda context: heard["callback"].append(context.step), on_rollback=back)
  monkeypatch.setitem(SINKS, "noting", Noting)
  monkeypatch.setitem(CALLBACKS, "noting", noting)
  return {"metrics.sinks": ("noting",), "training.callbacks": ("noting",)}


def _long(*values):
  return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(
  ("factors", "keys", "went_back", "skipped"),
  [
    ({2: NAN}, {}, [(3, 0)], (2,)),  # before the first checkpoint
    _long({STEPS - 1: NAN}, {}, [(STEPS, 15)], (STEPS - 1,)),  # the last step
    ({12: NAN, 17: HUGE}, WINDOW, [(13, 10), (17, 15)], (12, 17)),
    # The batches to skip begin before the newest checkpoint.
    _long({16: NAN}, {"training.bad_step_skips": 4}, [(17, 10)], (13, 14, 15, 16)),
    # Bad again at once: the checkpoint is taken for bad, and what it was saved after.
    ({12: NAN, 13: NAN}, {}, [(13, 10), (13, 5)], (9, 12, 13)),
  ],
)
def test_it_equals_to_the_bit_a_run_that_skips_from_the_start(
  tmp_path, told, factors, keys, went_back, skipped
):
  train(tmp_path, source(factors), **ROLL_BACK, **keys)
  assert_same(tmp_path, told(*skipped))
  made = rollbacks(tmp_path)
  assert [(line["rolled_back"], line["step"]) for line in made] == went_back
  rows = position.merged(rows for line in made for rows in line["skipped_rows"])
  assert rows == position.merged((n * runs.BATCH, (n + 1) * runs.BATCH) for n in skipped)
  for line in made:
    if "standard deviations" in line["why"]:
      loss, mean = float(line["why"].split()[2].rstrip(",")), float(line["why"].split()[10][:-1])
      assert loss > 10_000 * mean
    else:
      assert "loss is nan, grad_norm is nan" in line["why"]


def test_skipping_another_batch_gives_other_numbers(told):
  assert numbers(told(2)) != numbers(told(12, 17))


def test_a_run_goes_back_only_so_many_times(tmp_path):
  bad = source({7: NAN, 9: NAN, 16: NAN})
  with pytest.raises(TrainingStoppedError) as caught:
    train(tmp_path, bad, **ROLL_BACK, **{"training.max_rollbacks": 2})
  assert "step 15: loss is nan" in str(caught.value)
  said = "it was rolled back 2 times (training.max_rollbacks=2), and skipped the rows 56-63, 72-79"
  assert said in str(caught.value)
  # Also where it was started anew in between: the third rollback is still one too many.
  with pytest.raises(TrainingStoppedError, match="it was rolled back 2 times"):
    train(tmp_path, bad, **ROLL_BACK, **{"training.max_rollbacks": 2})


class KilledError(Exception):
  """In place of a SIGKILL."""


def dying(rows, batch):
  """Returns the rows; those of a batch cannot be read."""
  ids = runs.TrainingBatches(rows, global_batch_size=runs.BATCH, seed=0).row_ids(batch)

  def read(indices):
    if set(ids) & set(np.asarray(indices).tolist()):
      raise KilledError
    return rows.read(indices)

  return dataclasses.replace(rows, read=read)


def test_a_killed_run_decides_as_one_that_is_not(tmp_path, whole_story):
  factors, keys, expected = whole_story
  with pytest.raises(KilledError):
    train(tmp_path, dying(source(factors), 13), **ROLL_BACK, **keys)
  train(tmp_path, source(factors), **ROLL_BACK, **keys)
  assert runs.lines(tmp_path) == runs.lines(expected)
  assert_same(tmp_path, expected)


@pytest.fixture(scope="module")
def whole_story(tmp_path_factory):
  """Returns a run with three rollbacks that nothing kills: its bad batches, keys and workdir."""
  factors, workdir = {6: NAN, 12: HUGE, 17: HUGE}, tmp_path_factory.mktemp("whole")
  train(workdir, source(factors), **ROLL_BACK, **WINDOW)
  assert [line["rolled_back"] for line in rollbacks(workdir)] == [7, 12, 16]
  return factors, WINDOW, workdir


def late(job):
  """Returns a job of one device as on an accelerator: metrics are read a step late."""
  return dataclasses.replace(job, devices=dataclasses.replace(job.devices, simulated=False))


def test_a_stop_right_after_a_bad_step_saves_nothing_bad_and_late_reading_changes_nothing(
  tmp_path, capsys
):
  told = tmp_path / "told"
  train(told, source(), prepared=runs.job("single", **{"data.skip_batches": (12,)}))
  stop, rows = StopRequest(), source({12: NAN})
  ids = runs.TrainingBatches(rows, global_batch_size=runs.BATCH, seed=0).row_ids(13)

  def read(indices):  # the batch after the bad one never comes
    if set(ids) & set(np.asarray(indices).tolist()):
      stop.request("SIGTERM")
    return rows.read(indices)

  stopping = dataclasses.replace(rows, read=read)
  keys = {**ROLL_BACK, "data.prefetch_batches": 1}
  end = train(tmp_path, stopping, prepared=late(runs.job("single", **keys)), stop=stop)
  assert end.stopped
  assert "WARNING: step 13: loss is nan" in capsys.readouterr().out
  assert saved(tmp_path)[-1] <= 12
  train(tmp_path, rows, prepared=late(runs.job("single", **keys)))
  assert [line["rolled_back"] for line in rollbacks(tmp_path)] == [13]
  assert_same(tmp_path, told, runs.job("single"))


# ------------------------------ the judge ------------------------------


def judge(record=None, done=0, ramp=(), **keys) -> BadSteps:
  """Returns a judge of a run with these keys of `training`."""
  training = {
    "on_bad_step": "roll_back",
    "bad_step_deviations": 3.0,
    "bad_step_window": 4,
    "bad_step_skips": 1,
    "max_rollbacks": 3,
    **keys,
  }
  data = {"skip_rows": (), "global_batch_size": 4, "sequence_length": 0}
  data |= {"batch_size_ramp": ramp, "sequence_length_ramp": ()}
  return BadSteps(ConfigDict(training), ConfigDict(data), record or {}, done)


def judged(bad_steps, *losses) -> list[bool]:
  """Returns which losses are bad."""
  return [bool(bad_steps.check({"loss": loss, "grad_norm": 1.0})) for loss in losses]


def test_a_loss_is_compared_with_the_last_ones():
  # Of 1, 2, 3, 4 the mean is 2.5, the standard deviation 1.118.
  assert judged(judge(), 1, 2, 3, 4, 5.86) == [False] * 4 + [True]
  assert judged(judge(), 1, 2, 3, 4, 5.85) == [False] * 5
  assert judged(judge(), 1, 2, 3, 4, -99) == [False] * 5  # only above
  assert judged(judge(), 1, 1e9, 1, 2) == [False] * 4  # the window is not full
  # A bad loss does not enter the window, and an old one leaves it.
  found = judged(judge(), 1, 2, 3, 4, 50, 50, 5, 6, 50)
  assert [number for number, bad in enumerate(found) if bad] == [4, 5, 8]
  assert judged(judge(bad_step_deviations=0.0), 1, 2, 3, 4, 1e30) == [False] * 5
  assert judged(judge(), 1.0, math.nan, math.inf) == [False, True, True]


def test_going_back_forgets_the_losses_of_the_undone_steps():
  bad_steps = judge()
  judged(bad_steps, 1, 2, 3)
  record = bad_steps.record()
  judged(bad_steps, 4, 5)
  bad_steps.roll_back(6, "", 3, (3,), record)
  assert bad_steps.record()[rollback.RECORD]["losses"] == [1, 2, 3]


def test_how_far_it_goes_back():
  bad_steps = judge(bad_step_skips=3)
  assert bad_steps.target(9, ()) == 0
  assert bad_steps.target(9, (2, 4, 6)) == 6
  assert bad_steps.target(8, (2, 4, 6)) == 4
  assert bad_steps.target(8, (6,)) == 6, "there is none before"
  made = bad_steps.roll_back(8, "", 6, (6,), {})
  assert made.skipped_rows == ((24, 32),), "what the checkpoint has done cannot be skipped"
  # The batches 8, 9, 10 were the steps 7, 8, 9 of now.
  assert bad_steps.roll_back(9, "", 6, (6,), {}).skipped_rows == ((32, 44),)


def test_a_rollback_skips_the_rows_that_the_ramp_gave_the_step():
  bad_steps = judge(ramp=((0, 2), (5, 4)))
  rollback = bad_steps.roll_back(7, "bad", 5, [5], bad_steps.record())
  assert rollback.skipped_rows == ((14, 18),)  # after 5 steps of 2 rows and one of 4
  rows = [bad_steps.position.rows(step) for step in (4, 5, 6, 7)]
  assert rows == [((8, 10),), ((10, 14),), ((18, 22),), ((22, 26),)]


# ------------------------------ JAX_DEBUG_NANS ------------------------------


@pytest.fixture
def debug():
  """Returns a function that sets a variable of JAX for this test."""
  yield lambda variable: jax.config.update(variable, True)
  for variable in ("jax_debug_nans", "jax_debug_infs"):
    jax.config.update(variable, False)


def test_with_jax_debug_nans_a_run_stops_at_once_and_names_replay(tmp_path, debug):
  debug("jax_debug_nans")
  fresh = make_job("dp8", "mlp", **{**runs.KEYS, "mesh.data": 2, **ROLL_BACK})
  with pytest.raises(TrainingStoppedError) as error:  # without the variable it would roll back
    train(tmp_path, source({0: NAN}), prepared=fresh)
  found = "step 1: JAX_DEBUG_NANS has found grad_norm (1 of 1 elements), layer_1/bias ("
  assert str(error.value).startswith(found)
  said = "`replay --step=1` with this run's --config and --workdir finds its cause"
  assert str(error.value).endswith(said)
  assert saved(tmp_path) == []
  assert jax.config.jax_debug_nans


def test_jax_debug_infs_finds_what_is_infinite_alone(debug):
  job = make_job("single", "mlp", **SMALL["mlp"])
  state = first_state(job)
  metrics = {"loss": jnp.ones(())}
  infinite, nan = (dict(metrics, own=jnp.full((), value)) for value in (math.inf, math.nan))
  DebugNans(job.compile, job.mesh).after_step(1, state, infinite)
  debug("jax_debug_infs")
  DebugNans(job.compile, job.mesh).after_step(1, state, metrics)
  DebugNans(job.compile, job.mesh).after_step(1, state, nan)
  with pytest.raises(
    TrainingStoppedError, match=r"step 2: JAX_DEBUG_INFS has found own \(1 of 1 el"
  ):
    DebugNans(job.compile, job.mesh).after_step(2, state, infinite)
