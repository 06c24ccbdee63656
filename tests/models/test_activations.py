"""Recording activations: nothing happens outside of a recording; layers are stacked."""

import jax
import jax.numpy as jnp
import pytest

from models import activations
from models.activations import recording
from tests.helpers.jobs import host_batch, make_job


def test_nothing_is_recorded_outside_and_a_recording_ends():
  activations.record("early", jnp.ones(3))
  with recording() as found:
    activations.record("here", jnp.ones(3))
    activations.record("padded", jnp.arange(4), length=3)
  activations.record("late", jnp.ones(3))
  assert {name: x.shape for name, x in found.items()} == {"here": (3,), "padded": (3,)}


def test_layers_record_nothing_but_their_own():
  with activations.layer() as found:
    activations.record("here", jnp.ones(3))
  assert found == {}
  with recording() as everything:
    with activations.layer() as found:
      activations.record("here", jnp.ones(3))
    assert (list(found), list(everything)) == (["here"], [])
    activations.record_layers(found)
  assert list(everything) == ["layers/here"]


@pytest.mark.parametrize("rematerialization", ["none", "full"])
def test_what_a_decoder_records(rematerialization):
  job = make_job("single", "lm", **{"training.rematerialization": rematerialization})

  def forward(params, batch):
    with recording() as found:
      sums = job.program.sums(params, batch)
    return found, sums

  with job.tracing():
    found, _ = jax.eval_shape(forward, job.state.params, host_batch(job))
  between = (2, 16, 12, 40)  # layers, rows, tokens, width
  assert {name: x.shape for name, x in found.items()} == {
    "embedding": between[1:],
    "layers/attention": between,
    "layers/mlp": between,
    "layers/residual": between,
    "logits": (16, 12, 61),  # without padding
  }


def test_a_layer_s_update_is_what_the_residual_gains():
  job = make_job("single", "lm")
  state, batch = job.initial_state(), host_batch(job)

  def gained(params, batch):
    with recording() as found:
      job.program.sums(params, batch)
    before = jnp.concatenate([found["embedding"][None], found["layers/residual"][:-1]])
    return found["layers/residual"] - before, found["layers/attention"] + found["layers/mlp"]

  with job.tracing():
    ours, wanted = jax.jit(gained)(state.params, batch)
  assert float(jnp.max(jnp.abs(ours - wanted))) < 1e-5
  assert float(jnp.min(jnp.std(wanted, axis=(1, 2, 3)))) > 0.1
