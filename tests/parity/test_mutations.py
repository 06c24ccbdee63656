"""Each test breaks one reduction of the production code, and names the test that catches it.

A proof of equality that cannot fail proves nothing. What is patched in is the kind of mistake that
Adam hides: a factor, a sum that is left out, a mean of means.
"""

import jax
import optax
import pytest

from partitioning.parallel import collectives
from tests.helpers.jobs import first_state, host_batch, make_job, place
from tests.parity.comparison import (
  MESHES,
  PLAIN,
  assert_equal,
  reference,
  train,
)
from training import step
from training.parity import BOUNDS, CopiesDifferError

psum, psum_scatter, all_gather = jax.lax.psum, jax.lax.psum_scatter, jax.lax.all_gather


def assert_caught(mesh, overrides=None, *, recipe="lm"):
  """Trains on a mesh; the comparison with one device, trained before, must fail.

  Args:
    mesh: one of `MESHES`.
    overrides: further keys.
    recipe: `mlp`, where what is broken is not of the transformer: it compiles in a third.
  """
  wanted = assert_caught.references[recipe]
  try:
    ours = train(recipe, "float64", {**MESHES[mesh], **(overrides or {})})
  except CopiesDifferError:  # devices differ in what should be a copy
    return
  with pytest.raises(AssertionError, match=r"Difference\(what='(loss|gradient|norm|parameter)'"):
    assert_equal(ours, wanted, "float64")


def assert_caught_by_the_loss(mesh, overrides=None):
  """Computes the first loss on a mesh; the comparison of losses with one device must fail.

  Without gradients, where the forward pass is broken: it compiles in a third.
  """
  wanted = assert_caught.references["lm"].trained.losses[0]
  keys = {**PLAIN, "training.parameter_dtype": "float64", **MESHES[mesh], **(overrides or {})}
  with jax.enable_x64(True):
    job = make_job("single", "lm", **keys)
    found = job.compile_eval_step().function(first_state(job).params, place(job, host_batch(job)))
    loss = float(found["loss"] / found["weight"])
  assert not abs(loss - wanted) <= BOUNDS["float64"] * abs(wanted)


@pytest.fixture(autouse=True)
def _references():
  """Trains on one device before anything is patched."""
  assert_caught.references = {recipe: reference(recipe, "float64") for recipe in ("lm", "mlp")}


def test_a_norm_of_one_shard(monkeypatch):
  # test_trains_as_one_device_does: norms, and parameters after clipping.
  def of_one(self, grads):
    return optax.tree.norm(jax.tree.map(lambda g: g[..., : max(1, g.shape[-1] // 2)], grads))

  monkeypatch.setattr(step.Program, "norm", of_one)
  assert_caught("fsdp8", recipe="mlp")


def test_gradients_that_are_not_summed_over_fsdp(monkeypatch):
  # test_trains_as_one_device_does[fsdp8]: the transpose of the kernels' gather.
  @jax.custom_vjp
  def gather(shard):
    return all_gather(shard, ("fsdp",), axis=1, tiled=True)

  def backward(_, ct):
    length = ct.shape[1] // jax.lax.axis_size("fsdp")
    start = jax.lax.axis_index("fsdp") * length
    return (jax.lax.dynamic_slice_in_dim(ct, start, length, 1),)

  gather.defvjp(lambda shard: (gather(shard), None), backward)

  def gathered(shard, moves):
    if moves == ((1, ("fsdp",)),):
      return gather(shard)
    return regions_gather(shard, moves)

  regions_gather = collectives.gather
  monkeypatch.setattr(collectives, "gather", gathered)
  assert_caught("fsdp8")


def test_a_sum_over_tensor_left_out(monkeypatch):
  # test_trains_as_one_device_does[fsdp4_tensor2], where the products are written by hand.
  monkeypatch.setattr(jax.lax, "psum", lambda x, axes: x)
  assert_caught_by_the_loss("fsdp4_tensor2")
