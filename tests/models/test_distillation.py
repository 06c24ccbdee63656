"""Distillation: numbers and gradients by NumPy in float64, alike on every mesh; its teacher."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from models import distillation, model_spec
from partitioning.rules import named_leaves
from planning import traced_step
from planning.step_facts import of_job
from runtime import forms
from tests.configs.loading import checked
from tests.helpers.jobs import first_state, host_batch, make_job
from tests.models import numpy_decoder
from tests.parity.comparison import MESHES, PLAIN, SEQUENCE_PARALLEL, assert_equal, train
from training import restore
from training.checkpointing import integrity, reading
from training.checkpointing.checkpointer import Checkpointer

TEACHER = {
  "model.layers": 3,
  "model.model_size": 48,
  "model.feedforward_size": 64,
  "model.tied_embeddings": True,
  "model.logits_soft_cap": 5.0,
  "data.sequence_length": PLAIN["data.sequence_length"],
}
KEYS = {
  "model.separate_documents": True,
  "distillation.weight": 0.7,
  "distillation.temperature": 1.7,
}


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
  """Returns the workdirs of two runs of different seeds."""
  folder = tmp_path_factory.mktemp("teachers")
  for seed in (1, 2):
    job = make_job("single", "lm", **TEACHER, seed=seed)
    state = dataclasses.replace(first_state(job), step=jnp.int32(4))
    with Checkpointer(epath.Path(folder) / str(seed) / integrity.FOLDER) as checkpoints:
      record = {"versions": {}, "data": {"name": "rows", "rows": ""}}
      checkpoints.save(4, vars(state), config=forms.plain(job.config), record=record)
  return [f"{folder}/{seed}" for seed in (1, 2)]


def log_softmax(x):
  shifted = x - x.max(-1, keepdims=True)
  return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def by_numpy(student, teacher, direction, temperature):
  """Returns the divergence of each token, and its gradient by the student's logits."""
  log_q, log_p = log_softmax(student / temperature), log_softmax(teacher / temperature)
  p, q = np.exp(log_p), np.exp(log_q)
  if direction == "forward":
    return (p * (log_p - log_q)).sum(-1), (q - p) / temperature
  found = (q * (log_q - log_p)).sum(-1)
  return found, q * (log_q - log_p - found[..., None]) / temperature


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("chunks", [1, 3])
def test_numbers_and_gradients_of_logits_are_numpys(direction, chunks):
  random, temperature = np.random.default_rng(0), 0.6
  student, teacher = (20 * random.standard_normal((4, 5, 12)) for _ in range(2))
  student[0, 0, 1] = teacher[0, 0, 5] = 300.0
  targets = random.integers(0, 12, (4, 5)).astype(np.int32)
  with jax.enable_x64(True):
    same = lambda x, first: x  # noqa: E731
    numbers = distillation.Divergence(direction, temperature, (same, same))

    def found(student):
      known = numbers.start(jnp.asarray(targets), jnp.dtype("float64"))
      for first in range(0, 12, 12 // chunks):
        part = [jnp.asarray(x)[..., first : first + 12 // chunks] for x in (student, teacher)]
        known = numbers.add(known, part, jnp.asarray(targets), first)
      return numbers.finish(known, jnp.asarray(targets), ())

    (loss, divergence), pull = jax.vjp(found, jnp.asarray(student))
    ones, zeros = jnp.ones((4, 5)), jnp.zeros((4, 5))
    [of_loss], [of_divergence] = pull((ones, zeros)), pull((zeros, ones))
  wanted, gradient = by_numpy(student, teacher, direction, temperature)
  np.testing.assert_allclose(divergence, wanted, rtol=1e-12, atol=1e-12)
  np.testing.assert_allclose(of_divergence, gradient, rtol=1e-12, atol=1e-12)
  hot = np.eye(12)[targets]
  np.testing.assert_allclose(loss, -(log_softmax(student) * hot).sum(-1), rtol=1e-12, atol=1e-12)
  np.testing.assert_allclose(of_loss, np.exp(log_softmax(student)) - hot, rtol=1e-12, atol=1e-12)


ON = {
  "all three, sequence-parallel, in chunks": {
    **MESHES["data2_fsdp2_tensor2"],
    **SEQUENCE_PARALLEL,
    "training.loss_chunks": 4,
  },
  "context, in chunks, microbatches": {
    "mesh.fsdp": 2,
    "mesh.context": 2,
    "model.context_attention": "ring",
    "training.loss_chunks": 3,
    "training.gradient_accumulation_steps": 2,
  },
}


@pytest.fixture(scope="module")
def alone(teachers):
  return train("lm", "float64", {**KEYS, "distillation.teacher": teachers[0]})


def test_the_loss_is_that_of_numpy(alone):
  job = alone.job
  with jax.enable_x64(True):
    params = jax.device_get(first_state(job).params)
  batch, arrays = host_batch(job), {}
  config = job.config.copy_and_resolve_references()
  with config.unlocked():
    logits = []
    for which in ("student", "teacher"):
      if which == "teacher":
        config.model.update(dict(job.config.distillation.model))
        config.model.separate_documents = True
      arrays = named_leaves(params["teacher"] if which == "teacher" else params)
      rows = zip(batch["tokens"], batch["segments"], strict=True)
      logits.append(np.stack([numpy_decoder.logits(config, arrays, *row) for row in rows]))
  divergence, _ = by_numpy(*logits, "forward", 1.7)
  picked = np.take_along_axis(log_softmax(logits[0]), batch["targets"][..., None], -1)[..., 0]
  losses = -0.3 * picked + 0.7 * 1.7**2 * divergence
  weights = batch["weights"]
  wanted = (losses * weights).sum() / weights.sum()
  assert alone.trained.losses[0] == pytest.approx(wanted, rel=1e-12)
  assert not [name for name in alone.trained.gradients if name.startswith("teacher")]


@pytest.mark.parametrize("mesh", ON)
def test_it_trains_as_on_one_device(mesh, alone, teachers):
  ours = train("lm", "float64", {**KEYS, "distillation.teacher": teachers[0], **ON[mesh]})
  assert_equal(ours, alone, "float64")
  # Neither has all logits of a device's tokens.
  assert ("[4,24,36]" if "all" in mesh else "[4,12,72]") not in ours.trained.text


def test_plans_count_the_forward_pass_of_the_teacher(alone, teachers):
  spec, tokens = model_spec(alone.job.config), 24
  own = dataclasses.replace(spec, teacher=None).train_flops_per_example()
  kernels = sum(
    math.prod(leaf.shape)
    for name, leaf in named_leaves(alone.job.state.params["teacher"]).items()
    if name.endswith(("kernel", "table"))  # tied: that of the logits
  )
  scores = tokens * 3 * 8 * 2 * 6  # of 3 layers with 8 heads of size 6, keys and values
  assert spec.train_flops_per_example() - own == 2 * tokens * (kernels + scores)
  keys = {"data.sequence_length": tokens, "distillation.teacher": teachers[0]}
  job = make_job("dp4_tp2", "lm", **KEYS, **keys)
  found = sum(work.flops * runs for work, runs, _ in traced_step.operations(of_job(job)))
  wanted = spec.train_flops_per_example() * job.config.data.global_batch_size / 8
  assert found == pytest.approx(wanted, rel=0.01)


def begun(job, workdir):
  """Returns what a run begins with, after its record was read."""
  checkpoints = restore.RunCheckpoints(job, epath.Path(workdir))
  return checkpoints.begin({"versions": {}, "data": {"name": "rows", "rows": ""}})


def test_its_parameters_are_read_and_not_saved_and_no_other_teachers_are_taken(teachers, tmp_path):
  given = {"distillation.teacher": teachers[0], "data.sequence_length": 24}
  job = make_job("dp2_fsdp2_tp2", "lm", **given)
  start = begun(job, tmp_path)
  taught, theirs = (
    named_leaves(jax.device_get(tree))
    for tree in (
      start.state.params["teacher"],
      first_state(make_job("single", "lm", **TEACHER, seed=1)).params,
    )
  )
  assert all(theirs[name].tobytes() == x.tobytes() for name, x in taught.items())
  start.start_writing()
  with start.checkpointer as checkpointer:
    saved = start.saved_part(dataclasses.replace(start.state, step=jnp.int32(2)))
    checkpointer.save(2, saved, config=forms.plain(job.config), record=start.record)
  stored = reading.stored_arrays(tmp_path / integrity.FOLDER / "2")
  assert stored
  assert not [name for name in stored if "teacher" in name]

  again = begun(make_job("single", "lm", **given), tmp_path)  # on another mesh
  assert again.step == 2
  assert again.record["teacher"] == start.record["teacher"]
  for name, x in named_leaves(jax.device_get(again.state.params)).items():
    known = named_leaves(jax.device_get(start.state.params))[name]
    assert known.tobytes() == x.tobytes()
  other = make_job("single", "lm", **{**given, "distillation.teacher": teachers[1]})
  with pytest.raises(ValueError, match=r"(?s)other frozen parameters than those of .*/2: .*distil"):
    begun(other, tmp_path)
  without = make_job("single", "lm", **{**given, "distillation.teacher": ""})
  with pytest.raises(ValueError, match=r"been trained with the teacher .*checkpoints/4; set it ba"):
    begun(without, tmp_path)


@pytest.mark.parametrize(
  ("settings", "what"),
  [
    ("model.vocabulary_size=60", "model.vocabulary_size=60 here, and 61 there"),
    ("model.vocabulary_size=61 model.vocabulary_multiple=64", "64 here, and 72 there"),
    ("mesh.stage=3", "mesh.stage=3: a teacher has no pipeline"),
    ("training.z_loss=0.1", "the loss is of two parts already"),
    ("distillation.weight=-1", "distillation.weight=-1.0: at least 0"),
    ("distillation.divergence=both", "one of forward, reverse"),
    (
      "model.context_attention=ulysses mesh.context=16 model.heads=16 model.kv_heads=16 "
      "data.sequence_length=32",
      "/1: model.context_attention=ulysses: model.heads=8 is not a multiple",
    ),
    ("distillation.teacher=none_there", "none_there"),
    ("distillation.teacher= distillation.weight=0.3", "is about distillation.teacher"),
  ],
)
def test_what_does_not_go_with_a_teacher_is_refused(settings, what, teachers):
  sizes = "model.vocabulary_size=61 model.vocabulary_multiple=72"
  with pytest.raises(ValueError, match=re.escape(what)):
    checked(f"{sizes} distillation.teacher={teachers[0]} {settings}")
