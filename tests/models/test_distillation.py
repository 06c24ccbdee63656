"""Distillation: numbers and gradients by NumPy in float64, alike on every mesh; its teacher."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from configs.keys import table
from configs.schema import teachers as teachers_of
from input_pipeline.row_source import array_source
from input_pipeline.source import Part
from models import distillation, model_spec
from partitioning.rules import named_leaves
from planning import traced_step
from planning.step_facts import of_job
from runtime import forms
from tests.configs.loading import checked
from tests.helpers.jobs import first_state, host_batch, make_job, place
from tests.models import numpy_decoder
from tests.parity.comparison import MESHES, PLAIN, SEQUENCE_PARALLEL, assert_equal, train
from training import restore, setup, teacher_rows
from training.checkpointing import integrity, reading
from training.checkpointing.checkpointer import Checkpointer
from training.parity import take_steps
from training.state import without_teacher

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


def by_classes(student, teacher, top, temperature):
  """Returns the forward divergence of the teacher's likeliest classes and the rest as one.

  And its gradient by the student's logits.
  """
  log_q, log_p = log_softmax(student / temperature), log_softmax(teacher / temperature)
  p, q = np.exp(log_p), np.exp(log_q)
  kept = teacher >= np.sort(teacher, axis=-1)[..., -top:][..., :1]
  found, gradient = np.where(kept, p * (log_p - log_q), 0).sum(-1), np.where(kept, q - p, 0)
  if not kept.all():
    p_rest, q_rest = (np.where(kept, 0, x).sum(-1) for x in (p, q))
    found += p_rest * (np.log(p_rest) - np.log(q_rest))
    gradient += np.where(kept, 0, q * (1 - p_rest / q_rest)[..., None])
  return found, gradient / temperature


@pytest.mark.parametrize("top", [5, 12])
@pytest.mark.parametrize("chunks", [1, 3])
def test_numbers_of_a_stored_teacher_are_numpys(top, chunks):
  random, temperature, size = np.random.default_rng(0), 0.6, 12 // chunks
  student, teacher = (8 * random.standard_normal((4, 5, 12)) for _ in range(2))
  student[0, 0, 1] = 300.0
  targets = random.integers(0, 12, (4, 5)).astype(np.int32)
  log_p, ids = log_softmax(teacher / temperature), np.argsort(-teacher, axis=-1)[..., :top]
  with np.errstate(divide="ignore"):
    rest = np.log(np.exp(np.sort(log_p, axis=-1)[..., : 12 - top]).sum(-1, keepdims=True))
  stored = np.concatenate([np.take_along_axis(log_p, ids, -1), rest], axis=-1)
  ids = np.concatenate([ids, np.full((4, 5, 1), distillation.REST)], axis=-1)
  with jax.enable_x64(True):
    numbers = distillation.TopDivergence(temperature, lambda x, first: x)
    of_tokens = tuple(map(jnp.asarray, (targets, ids.astype(np.int32), stored)))

    def found(student):
      known = numbers.start(of_tokens, jnp.dtype("float64"))
      for first in range(0, 12, size):
        known = numbers.add(known, [student[..., first : first + size]], of_tokens, first)
      return numbers.finish(known, of_tokens, ())

    (loss, divergence), pull = jax.vjp(found, jnp.asarray(student))
    [of_divergence] = pull((jnp.zeros((4, 5)), jnp.ones((4, 5))))
  wanted, gradient = by_classes(student, teacher, top, temperature)
  np.testing.assert_allclose(divergence, wanted, rtol=1e-12, atol=1e-11)
  np.testing.assert_allclose(of_divergence, gradient, rtol=1e-12, atol=1e-12)
  hot = np.eye(12)[targets]
  np.testing.assert_allclose(loss, -(log_softmax(student) * hot).sum(-1), rtol=1e-12, atol=1e-12)
  every, _ = by_numpy(student, teacher, "forward", temperature)
  divergence = np.asarray(divergence)
  assert np.all(divergence <= every + 1e-9), "classes that are one diverge less"
  if top == 12:
    np.testing.assert_allclose(divergence, every, rtol=1e-12, atol=1e-11)


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


def logits_by_numpy(job, batch):
  """Returns the logits of a student, and of the teacher that it has in memory, of a batch."""
  with jax.enable_x64(True):
    params = jax.device_get(first_state(job).params)
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
  return logits


def loss_by_numpy(student, divergence, batch):
  """Returns the loss of a batch with the weight and the temperature of KEYS."""
  picked = np.take_along_axis(log_softmax(student), batch["targets"][..., None], -1)[..., 0]
  losses = -0.3 * picked + 0.7 * 1.7**2 * divergence
  weights = batch["weights"]
  return (losses * weights).sum() / weights.sum()


def test_the_loss_is_that_of_numpy(alone):
  batch = host_batch(alone.job)
  logits = logits_by_numpy(alone.job, batch)
  divergence, _ = by_numpy(*logits, "forward", 1.7)
  wanted = loss_by_numpy(logits[0], divergence, batch)
  assert alone.trained.losses[0] == pytest.approx(wanted, rel=1e-12)
  assert not [name for name in alone.trained.gradients if name.startswith("teacher")]


@pytest.mark.parametrize("mesh", ON)
def test_it_trains_as_on_one_device(mesh, alone, teachers):
  ours = train("lm", "float64", {**KEYS, "distillation.teacher": teachers[0], **ON[mesh]})
  assert_equal(ours, alone, "float64")
  # Neither has all logits of a device's tokens.
  assert ("[4,24,36]" if "all" in mesh else "[4,12,72]") not in ours.trained.text


# ------------------------------ a stored teacher ------------------------------


@pytest.fixture(scope="module")
def store(alone, tmp_path_factory):
  """Returns a function that stores the teacher of `alone`; it returns the rows and the folder.

  The rows are those of its three steps, in another order, and of a mixture.
  """
  steps = [host_batch(alone.job, seed=step) for step in range(3)]
  arrays = {name: np.concatenate([one[name] for one in steps])[::-1] for name in steps[0]}
  rows, data_dir = array_source("rows", arrays), tmp_path_factory.mktemp("stored")
  parts = (Part("first", 20, 480), Part("second", 28, 672))
  rows = dataclasses.replace(rows, parts=parts, stages=((0, {"first": 0.1, "second": 0.9}),))

  def stored(top, dtype, **other):
    with jax.enable_x64(True):
      student = alone.job
      model = teachers_of.of_teacher(student.config)
      with model.unlocked():
        model.distillation = table.section("distillation")
        model.data.update(data_dir=str(data_dir), global_batch_size=20)
      job = setup.prepare(model, student.devices)
      params = jax.tree.map(jnp.asarray, first_state(student).params["teacher"])
      given = {"location": "theirs", "temperature": 1.7, "top": top, "dtype": dtype, **other}
      return rows, teacher_rows.stored(job, params, {}, rows, model.data, **given)

  return stored


def train_on(rows, shard, alone, keys):
  """Takes the steps of `alone`, from the same parameters, on its batches where they are now."""
  source = teacher_rows.attached(rows, str(shard.folder))
  given = {**PLAIN, **KEYS, "distillation.teacher": str(shard.folder), **keys}
  with jax.enable_x64(True):
    job = make_job("single", "lm", **{**given, "training.parameter_dtype": "float64"})
    params = without_teacher(jax.device_get(first_state(alone.job).params))
    state = dataclasses.replace(
      first_state(job), params=jax.device_put(params, job.state_shardings.params)
    )
    numbers = lambda step: len(rows) - 1 - np.arange(16) - 16 * step  # noqa: E731
    return take_steps(job, lambda step: place(job, source.read(numbers(step))), state)


def test_all_tokens_of_a_stored_teacher_are_the_teacher_in_memory(alone, store):
  rows, shard = store(61, "float32")
  assert shard.manifest["tokens"] == 48 * 24 * 62 * 5, "one byte for an id, four for log p"
  assert teacher_rows.size_text(shard) == "48 rows, 0.4 MiB"
  ours = train_on(rows, shard, alone, {})
  np.testing.assert_allclose(ours.losses, alone.trained.losses, rtol=1e-6)
  for name, gradient in alone.trained.gradients.items():
    distance = np.linalg.norm(ours.gradients[name] - gradient)
    assert distance < 1e-6 * np.linalg.norm(gradient), name


def test_a_few_tokens_of_a_stored_teacher_on_a_mesh_give_the_loss_of_numpy(alone, store):
  rows, shard = store(7, "float16")
  mesh = {"mesh.fsdp": 2, "mesh.tensor": 2, "mesh.context": 2, "model.context_attention": "ring"}
  others = {"training.loss_chunks": 3, "training.gradient_accumulation_steps": 2}
  ours = train_on(rows, shard, alone, {**mesh, **others})
  batch = host_batch(alone.job)
  student, teacher = logits_by_numpy(alone.job, batch)
  divergence, _ = by_classes(student, teacher, 7, 1.7)
  wanted = loss_by_numpy(student, divergence, batch)
  assert ours.losses[0] == pytest.approx(wanted, rel=1e-3)  # float16
  every, _ = by_numpy(student, teacher, "forward", 1.7)
  assert abs(ours.losses[0] / loss_by_numpy(student, every, batch) - 1) > 0.01


def test_a_stored_teacher_is_of_these_rows_and_known_on_resume(store, teachers, tmp_path):
  rows, shard = store(7, "float16")
  again = store(7, "float16", location="moved")[1]
  assert again.folder == shard.folder, "it is not computed again"
  other = dataclasses.replace(rows, fingerprint="of others")
  with pytest.raises(ValueError, match=r"48 rows with the digest .* of rows are 48 with"):
    teacher_rows.attached(other, str(shard.folder))
  zeros = teacher_rows.unattached(rows, str(shard.folder))
  assert not zeros.read(np.arange(3))["teacher_log_p"].any()
  assert zeros.fields == teacher_rows.attached(rows, str(shard.folder)).fields

  given = {**KEYS, **PLAIN, "distillation.teacher": str(shard.folder)}
  checkpoints = restore.RunCheckpoints(make_job("single", "lm", **given), epath.Path(tmp_path))
  branch, record = checkpoints.teacher({})
  assert (branch, checkpoints.teacher(record)[1]) == ({}, record)
  known = record["teacher"]
  assert len(known["digest"]) == 64
  for wrong in ({"digest": "0" * 64}, {"dtype": "float16, the 8 likeliest tokens"}):
    with pytest.raises(ValueError, match=r"trained with .* of theirs .*, and this is float16"):
      checkpoints.teacher({"teacher": {**known, **wrong}})
  in_memory = {**given, "distillation.teacher": teachers[0]}
  checkpoints = restore.RunCheckpoints(make_job("single", "lm", **in_memory), checkpoints.workdir)
  with pytest.raises(ValueError, match=r"with the teacher theirs \(float16, the 7 like"):
    checkpoints.teacher(record)


@pytest.mark.parametrize(
  ("settings", "what"),
  [
    ("distillation.temperature=2", "distillation.temperature=2.0 here, and 1.7 there"),
    ("model.vocabulary_size=60", "model.vocabulary_size=60 here, and 61 there"),
    ("model.separate_documents=False", "model.separate_documents=False here, and True there"),
    ("distillation.divergence=reverse", "all but the teacher's 7 likeliest tokens only the sum"),
    ("data.sequence_length_ramp=((0,12),)", "cuts rows that the teacher has read as a whole"),
    ("training.z_loss=0.1", "the loss is of two parts already"),
  ],
)
def test_what_does_not_go_with_a_stored_teacher_is_refused(settings, what, store):
  _, shard = store(7, "float16")
  sizes = "model.vocabulary_size=61 model.vocabulary_multiple=72 data.sequence_length=24"
  given = f"{sizes} model.separate_documents=True distillation.temperature=1.7"
  with pytest.raises(ValueError, match=re.escape(what)):
    checked(f"{given} distillation.teacher={shard.folder} {settings}")


@pytest.mark.parametrize(("top", "dtype"), [(62, "float16"), (7, "float8")])
def test_what_cannot_be_stored_is_refused(top, dtype, store):
  with pytest.raises(ValueError, match=r"--teacher_top=62: 1 to .*=61|float16 or float32"):
    store(top, dtype)


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
