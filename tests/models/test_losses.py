"""Losses beside NumPy, and what every model owes to its contract."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import MODELS, Extending, Generator, Model, Network, losses
from planning import traced_step
from tests.helpers.jobs import first_state, host_batch, make_job

RECIPES = ("lm", "mlp", "mlp_tutorial")


def log_softmax(logits):
  shifted = logits - logits.max(axis=-1, keepdims=True)
  return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def drawn(*shape):
  return np.random.default_rng(len(shape)).normal(size=shape)


@pytest.mark.parametrize("chunks", [1, 3, 6])
def test_numbers_of_chunks_of_classes_are_numpys(chunks):
  logits = drawn(4, 5, 12) * 30
  logits[0, 0, 3:] = logits[0, 0, 4]  # ties: the first one counts
  logits[1, 1, :6] = -1e9
  targets = logits.argmax(-1).astype(np.int32)
  targets[2:] = np.random.default_rng(0).integers(0, 12, (2, 5))
  targets[0, 0] += 1
  numbers = losses.TokenNumbers(("likeliest", "loss", "normalizer"), lambda x, first: x)
  found = numbers.start(jnp.asarray(targets), jnp.dtype("float32"))
  for first in range(0, 12, 12 // chunks):
    part = jnp.asarray(logits[..., first : first + 12 // chunks], jnp.float32)
    found = numbers.add(found, [part], jnp.asarray(targets), first)
  likeliest, loss, normalizer = numbers.finish(found, jnp.asarray(targets), ())
  picked = np.take_along_axis(log_softmax(logits), targets[..., None], -1)[..., 0]
  np.testing.assert_allclose(loss, -picked, rtol=1e-5, atol=2e-5)
  largest = logits.max(-1)
  wanted = np.log(np.exp(logits - largest[..., None]).sum(-1)) + largest
  np.testing.assert_allclose(normalizer, wanted, rtol=1e-5)
  np.testing.assert_array_equal(likeliest, logits.argmax(-1) == targets)
  whole = numbers.of_all(jnp.asarray(logits, jnp.float32), jnp.asarray(targets))
  np.testing.assert_array_equal(whole[0], likeliest)
  assert 0 < likeliest.sum() < 20


@pytest.mark.parametrize("vocabulary", [96, 90])  # the latter is padded
def test_the_loop_over_chunks_has_no_constants_as_large_as_its_logits(vocabulary):
  """JAX moves constants out of a scan at the size that they are broadcast to."""
  job = make_job("single", "lm", **{"training.loss_chunks": 8, "model.vocabulary_size": vocabulary})
  with job.tracing():
    traced = jax.make_jaxpr(job.program.gradients)(job.state.params, job.batch, jax.random.key(0))
  loops = [
    one
    for one in traced_step.equations(traced.jaxpr)
    if one.primitive.name == "scan" and one.params["length"] == 8
  ]
  assert len(loops) == 2  # forward and backward
  columns = job.state.params["embed"]["table"].shape[0] // 8
  for one in loops:
    assert not [x.aval.shape for x in one.invars if x.aval.shape == (16, 12, columns)]


def test_z_loss_is_added_in_training_alone():
  job = make_job("single", "lm", **{"training.z_loss": 0.3, "training.loss_chunks": 2})
  params, batch = first_state(job).params, host_batch(job)
  key = jax.random.key(0)

  def found(params, batch):
    logits = job.program.module(params)(batch["tokens"])
    return logits, job.program.sums(params, batch), job.program.sums(params, batch, key)

  with job.tracing():
    logits, evaluated, trained = jax.jit(found)(params, batch)
  normalizers = np.log(np.exp(np.asarray(logits, np.float64)).sum(-1))
  wanted = 0.3 * (normalizers**2 * batch["weights"]).sum()
  np.testing.assert_allclose(trained["z_loss"], wanted, rtol=1e-4)
  np.testing.assert_allclose(trained["loss"], evaluated["loss"] + wanted, rtol=1e-5)
  assert "z_loss" not in evaluated


def test_classification_sums_losses_and_right_answers_by_weight():
  logits, targets = drawn(6, 4), np.array([0, 1, 2, 3, 0, 1], np.int32)
  weights = np.array([1, 0, 2, 1, 0.5, 1], np.float32)
  batch = {"targets": jnp.asarray(targets), "weights": jnp.asarray(weights)}
  found = losses.classification(jnp.asarray(logits), batch)
  rows = -log_softmax(logits)[np.arange(6), targets]
  right = logits.argmax(-1) == targets
  assert 0 < right.sum() < 6
  assert {*found} == {"loss", "correct"}
  np.testing.assert_allclose(found["loss"], (rows * weights).sum(), rtol=1e-5)
  np.testing.assert_allclose(found["correct"], (right * weights).sum(), rtol=1e-6)


def test_squared_error_sums_over_outputs_and_weighs_rows():
  outputs, targets, weights = drawn(5, 3), drawn(5, 3) + 1, np.arange(5.0)
  batch = {"targets": jnp.asarray(targets), "weights": jnp.asarray(weights)}
  found = losses.squared_error(jnp.asarray(outputs), batch)
  wanted = (((outputs - targets) ** 2).sum(-1) * weights).sum()
  np.testing.assert_allclose(found["loss"], wanted, rtol=1e-5)


def members(protocol):
  """Returns name -> function of what a protocol asks for."""
  return {
    name: function
    for one in protocol.__mro__
    for name, function in vars(one).items()
    if inspect.isfunction(function) and not name.startswith("_")
  }


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_what_its_contract_names(name):
  model = MODELS[name]
  asked = members(Generator if isinstance(model, Generator) else Model)
  assert {"build"} <= {*asked}
  for member, function in asked.items():
    found = getattr(model, member)
    made = inspect.isclass(found)  # what `build` may be
    given = [*inspect.signature(found.__init__ if made else found).parameters]
    assert given[made:] == [*inspect.signature(function).parameters][1:], member
  network = Extending if isinstance(model, Generator) else Network
  for member, function in members(network).items():
    found = inspect.signature(getattr(model.build, member))
    assert [*found.parameters] == [*inspect.signature(function).parameters], member


@pytest.mark.parametrize("recipe", RECIPES)
def test_loss_sums_are_wide_scalars(recipe):
  job = make_job("single", recipe, **{"training.compute_dtype": "bfloat16"})
  with job.tracing():
    found = jax.eval_shape(job.program.sums, job.state.params, job.batch)
  assert {"loss", "weight"} <= {*found}
  assert {(x.shape, x.dtype) for x in found.values()} == {((), jnp.dtype("float32"))}
