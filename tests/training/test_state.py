"""What a state carries: parameters that are trained or not, and a model's own variables."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from flax import nnx

from input_pipeline.batches import EvaluationBatches
from models import MODELS, mlp
from partitioning.rules import named_leaves
from processes.coordination import Lockstep, current
from processes.preemption import StopRequest
from processes.watchdog import Watchdog
from tests.helpers.jobs import first_state, host_batch, make_job, place
from tests.training import runs
from training import base_parameters
from training.checkpointing import integrity, reading
from training.evaluation import Evaluator
from training.state import merged, split, trainable

NAMES = ["layer_1/kernel", "layer_1/bias", "layer_2/kernel", "layer_2/bias"]


# ---- Which parameters are trained ----


def test_patterns_match_names():
  assert trainable(("*",), NAMES) == {*NAMES}
  assert trainable(("layer_2/*", "*/bias"), NAMES) == {*NAMES} - {"layer_1/kernel"}


def test_a_pattern_that_matches_nothing_is_refused_with_near_names():
  with pytest.raises(ValueError, match=r"training\.trainable") as refusal:
    trainable(("layer_2/*", "layr_1/kernels"), NAMES)
  line = str(refusal.value)
  assert line.startswith("training.trainable: 'layr_1/kernels' matches no parameter; near are ")
  assert "near are layer_1/kernel, " in line
  assert "layer_2/*" not in line
  with pytest.raises(ValueError, match="no parameter would be trained"):
    trainable((), NAMES)


def test_a_config_with_an_unknown_pattern_is_refused():
  with pytest.raises(ValueError, match=r"'layer_9/\*' matches no parameter; near are layer_"):
    make_job("single", "mlp", **{"training.trainable": ("layer_9/*",)})
  with pytest.raises(ValueError, match=r"training\.trainable: 3 is not a pattern"):
    make_job("single", "mlp", **{"training.trainable": (3,)})


def test_a_tree_is_taken_apart_and_put_together():
  tree = {"a": {"b": 1, "c": {"d": 2}}, "e": 3, "f": {"g": 4}}
  ours, others = split(tree, {"a/c/d", "f/g"}.__contains__)
  assert ours == {"a": {"c": {"d": 2}}, "f": {"g": 4}}
  assert others == {"a": {"b": 1}, "e": 3}
  assert merged(ours, others) == tree
  assert split(tree, lambda name: True) == (tree, {})


def two_steps(**overrides):
  """Returns the gradients of a second step, and how parameters were before both and after."""
  job = make_job("single", "mlp", **overrides)
  compiled = job.compile(
    job.program.step_and_gradients,
    job.state,
    job.batch,
    in_shardings=(job.state_shardings, job.batch_shardings),
    out_shardings=(job.state_shardings, None, None),
  ).function
  state = first_state(job)
  first = jax.device_get(named_leaves(state.params))
  for number in range(2):
    state, _, gradients = compiled(state, place(job, host_batch(job, seed=number)))
  return jax.device_get((named_leaves(gradients), first, named_leaves(state.params)))


def test_frozen_parameters_have_no_optimizer_state():
  chosen = {"training.trainable": ("layers/attention/*", "final_norm/*")}
  job = make_job("dp4_tp2", "lm", **chosen)
  names = named_leaves(job.state.params)
  wanted = {name for name in names if name.startswith(("layers/attention/", "final_norm/"))}
  assert 0 < len(wanted) < len(names)
  assert job.program.trained == wanted
  assert {n.split("/", 3)[3] for n in job.placements["optimizer"] if "/mu/" in n} == wanted


def test_gradients_of_trained_parameters_are_those_of_training_all_and_the_others_stay():
  keys = {"optimizer.name": "sgd", "optimizer.learning_rate": 0.0, "optimizer.weight_decay": 0.0}
  everything, *_ = two_steps(**keys)
  keys["training.trainable"] = ("layer_2/*", "layer_4/bias")
  found, *_ = two_steps(**keys)
  assert {*found} == {"layer_2/kernel", "layer_2/bias", "layer_4/bias"}
  for name, gradient in found.items():
    np.testing.assert_allclose(gradient, everything[name], rtol=1e-5, atol=1e-7, err_msg=name)
  _, before, after = two_steps(**{**keys, "optimizer.learning_rate": 0.1})
  assert {n for n in before if before[n].tobytes() != after[n].tobytes()} == {*found}


# ---- Variables that are no parameters ----


class Counting(mlp.MLP):
  """A classifier that counts its training batches, and adds up their first inputs."""

  def __init__(self, config, *, rngs):
    super().__init__(config, rngs=rngs)
    self.batches = nnx.Variable(jnp.zeros((), jnp.int32))
    self.seen = nnx.BatchStat(jnp.zeros((), jnp.float32))

  def loss_sums(self, batch, key=None):
    self.batches[...] = self.batches[...] + 1
    self.seen[...] = self.seen[...] + jnp.sum(batch["inputs"][:, 0])
    return {**super().loss_sums(batch, key), "counted": self.batches[...].astype(jnp.float32)}


@pytest.fixture
def counting(monkeypatch):
  """Returns a function of config keys that makes a job of this model, in place of the MLP."""
  monkeypatch.setitem(MODELS, "mlp", types.SimpleNamespace(SPEC=mlp.SPEC, build=Counting))
  monkeypatch.setattr(runs.QuickJob, "_programs", {})  # there is no other model in its keys
  keys = {**runs.KEYS, "training.steps": 10, "evaluation.every_steps": 5}
  return lambda **more: runs.quick(make_job("dp8", "mlp", **{**keys, "mesh.data": 2, **more}))


def test_variables_are_updated_saved_and_resumed(counting, tmp_path):
  rows, ends = runs.source(), []
  ends.append(runs.train(tmp_path / "whole", rows, prepared=counting()))
  shorter = counting(**{"training.steps": 5})
  assert int(runs.train(tmp_path / "cut", rows, prepared=shorter).state.variables["batches"]) == 5
  ends.append(
    runs.train(
      tmp_path / "cut",
      rows,
      prepared=counting(),
      accept=["optimizer.warmup_steps"] if shorter.config.optimizer.warmup_steps else [],
    )
  )
  batches, seen = ([end.state.variables[name] for end in ends] for name in ("batches", "seen"))
  assert [int(x) for x in batches] == [10, 10]
  assert np.asarray(seen[0]).tobytes() == np.asarray(seen[1]).tobytes()
  order = runs.TrainingBatches(rows, global_batch_size=runs.BATCH, seed=0)
  ids = np.concatenate([order.row_ids(step) for step in range(10)])
  assert float(seen[0]) == pytest.approx(rows.read(ids)["inputs"][:, 0].sum(), rel=1e-3)
  stored = reading.stored_arrays(epath.Path(tmp_path / "cut") / integrity.FOLDER / "10")
  assert {"variables/batches", "variables/seen"} < {*stored}
  assert_evaluated_as_when_saved(counting(), tmp_path / "cut")
  # A sum that the task does not know is a metric; an evaluation counts on, and leaves no trace.
  counted = [line["counted"] for line in runs.lines(tmp_path / "whole") if "counted" in line]
  weights = runs.BATCH
  assert counted == pytest.approx([step / weights for step in range(1, 11)], rel=1e-5)


def assert_evaluated_as_when_saved(job, workdir):
  """Asserts that what the verb `evaluate` reads and computes is what training wrote last."""
  step, *restored = base_parameters.model_state(job, str(workdir))
  assert step == 10
  assert int(restored[1]["batches"]) == 10
  batches = EvaluationBatches(runs.source(), global_batch_size=runs.BATCH)
  with Watchdog(current(), StopRequest()) as watch:
    compiled = job.compile_eval_step().function
    found = Evaluator(job, batches, compiled, watch, Lockstep(watch.group, watch.stop))(*restored)
  [written] = [x for x in runs.lines(workdir) if "eval_loss" in x and x["step"] == 10]
  assert {"step": 10, **found.line()} == written
  # 10 batches of training, and the one of the evaluation itself.
  assert written["eval_counted"] == pytest.approx(11 / runs.BATCH)
