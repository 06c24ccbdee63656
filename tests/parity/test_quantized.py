"""Adapters on quantized kernels: as on the kernels that these decode to, and on every mesh."""

import functools

import jax
import numpy as np
import pytest

from models import model_spec
from partitioning.rules import named_leaves, nested
from tests.helpers.jobs import first_state, host_batch, make_job, place
from tests.parity.comparison import (
  ADAPTERS,
  MESHES,
  PLAIN,
  SEQUENCE_PARALLEL,
  Run,
  assert_equal,
)
from training.parity import take_steps
from training.state import State

SIZES = {
  **PLAIN,
  "training.parameter_dtype": "float64",
  "model.model_size": 128,
  "model.feedforward_size": 256,
  "model.head_size": 16,
}
# Which have no adapters: attention is trained in full.
EXPERTS = {
  "training.trainable": ("layers/attention/*",),
  "model.experts": 4,
  "model.experts_per_token": 2,
  "model.expert_feedforward_size": 128,
}
STAGES = {"mesh.stage": 2, "mesh.data": 2, "mesh.fsdp": 2, "training.microbatches": 2}
ON = {
  "data, fsdp and tensor": (
    "nf4",
    ADAPTERS,
    {**MESHES["data2_fsdp2_tensor2"], **SEQUENCE_PARALLEL},
  ),
  "context": ("int8", ADAPTERS, {"mesh.fsdp": 2, "mesh.context": 2}),
  "experts": ("nf4", EXPERTS, {"mesh.expert": 2, "mesh.tensor": 2}),
  "stages": ("nf4", ADAPTERS, STAGES),
}


def quantized(job, plain: State) -> State:
  """Returns the state of a job with quantized kernels, of another one's with plain kernels."""
  spec, given = model_spec(job.config), named_leaves(jax.device_get(plain.params))
  found = {}
  for name, x in given.items():
    if kind := spec.format_of(name):
      parts = kind.encoded(x, np)
      found |= {f"{name.removesuffix('/kernel')}/{part}": x for part, x in parts.items()}
    else:
      found[name] = x
  wanted = named_leaves(job.state.params)
  found = {name: np.asarray(found[name]).astype(x.dtype) for name, x in wanted.items()}
  state = State(plain.step, nested(found), plain.optimizer, plain.variables)
  return jax.device_put(jax.device_get(state), job.state_shardings)


def trained(job, state: State) -> Run:
  batch = lambda step: place(job, host_batch(job, step))  # noqa: E731
  return Run(job, take_steps(job, batch, state))


@functools.cache
def plain_state(**more):
  return first_state(make_job("single", "lm", **SIZES, **dict(more)))


def on(dtype, keys, **more):
  with jax.enable_x64(True):
    job = make_job("single", "lm", **{**SIZES, **more, "training.frozen_dtype": dtype, **keys})
    return trained(job, quantized(job, plain_state(**more)))


@functools.cache
def on_one_device(dtype, **more):
  return on(dtype, {}, **more)


@pytest.mark.parametrize("mesh", ON)
def test_trains_as_on_one_device(mesh):
  dtype, more, keys = ON[mesh]
  ours = on(dtype, keys, **more)
  assert_equal(ours, on_one_device(dtype, **more), "float64")


def test_trains_as_the_decoded_model():
  wanted = on_one_device("nf4", **ADAPTERS)
  with jax.enable_x64(True):
    job = make_job("single", "lm", **SIZES, **ADAPTERS)
    spec, state = model_spec(wanted.job.config), quantized(wanted.job, plain_state(**ADAPTERS))
    given, found = named_leaves(state.params), {}
    for name in named_leaves(job.state.params):
      if kind := spec.format_of(name):
        layer = name.removesuffix("/kernel")
        found[name] = kind.decoded({part: given[f"{layer}/{part}"] for part in kind.parts})
      else:
        found[name] = given[name]
    found = {name: np.asarray(x).astype(np.float64) for name, x in found.items()}
    state = State(state.step, nested(found), state.optimizer, state.variables)
    decoded = trained(job, jax.device_put(jax.device_get(state), job.state_shardings))
  ours, theirs = wanted.trained, decoded.trained
  assert ours.losses == pytest.approx(theirs.losses, rel=1e-12)
  assert ours.norms == pytest.approx(theirs.norms, rel=1e-12)
