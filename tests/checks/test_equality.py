"""`equality`: programs that compute something else on a mesh, modelled on public reports."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checks import equality, jaxprs
from checks.case import Case
from checks.program import Description, Program, make_mesh
from tests.checks import decoder

CONTEXT = {"data": 2, "context": 2}
# Bug -> the mesh, the tensor that is named, and what is said of the cause.
MUTANTS = {
  # An all-reduce is not inserted (openxla/xla#40034).
  "psum_missing": (decoder.MESH, "loss at step 1", "psum"),
  # Gradients too large by the size of an axis: of experts (pytorch/pytorch#160285,
  # NVIDIA/Megatron-LM#5956), or by a psum under grad (jax-ml/jax#3970).
  "scaled_by_axis": (decoder.MESH, "change of params/up", "taken twice"),
  # A mean of the devices' means, although they hold different numbers of tokens
  # (meta-pytorch/torchtune#1875).
  "mean_over_devices": ({"data": 4}, "loss at step 1", ""),
  # The gradients of a replicated parameter are not reduced (areal-project/AReaL#313).
  "not_reduced": ({"data": 4}, "change of params/norm", ""),
  # Clipping by the norm of a device's own shard (areal-project/AReaL#312, pytorch/pytorch#170862).
  "local_norm": (decoder.MESH, "change of params/", ""),
  # Positions counted from the device's own block of the sequence (huggingface/nanoVLM#201 has the
  # same of documents).
  "positions_by_block": (CONTEXT, "loss at step 1", "own block"),
}


@pytest.mark.parametrize("bug", MUTANTS)
def test_a_mutant_is_found(bug, one):
  sizes, tensor, cause = MUTANTS[bug]
  recorded = bug in ("psum_missing", "positions_by_block")
  case = Case(decoder.program(sizes, bug))
  [finding] = equality.check(case, one, record=recorded).findings
  assert finding.what.startswith(tensor)
  assert cause in finding.cause
  assert finding.numbers["relative difference"] > 1e-4
  if recorded:  # the line of the shard_map
    assert finding.where.startswith("shard_map")
    assert "tests/checks/decoder.py:" in finding.where


def test_clean_meshes_are_equal(one, clean):
  for case in (clean, Case(decoder.program({"data": 2, "context": 2}))):
    outcome = equality.check(case, one)
    assert outcome.findings == []
    assert outcome.note.startswith("float64, 19 tensors")


def test_an_initializer_that_depends_on_the_mesh(one):
  """Modelled on jax-ml/jax#40232 and jax-ml/jax#21232."""
  case = Case(decoder.program(decoder.MESH, "init_by_mesh"))
  [finding] = equality.check(case, one).findings
  assert finding.what == "7 of 8 leaves start with other values than on one device"


def test_rounding_is_measured_in_bfloat16():
  """A step in bfloat16 is not held to float32's bound, and is held to a narrower one than any."""

  def program(sizes, factor=1.0):
    mesh = make_mesh(sizes, ("data",))

    def step(w, batch):
      def loss(w):
        y = jnp.tanh(batch.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)
        return jnp.mean(y * y)

      value, gradient = jax.value_and_grad(loss)(w)
      return w - 0.1 * factor * gradient, {"loss": value}

    draw = np.random.default_rng(0)
    w, x = draw.normal(size=(48, 16)), draw.normal(size=(32, 48))
    placed = (jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("data"))
    describe = Description()
    arrays = [lambda seed, x=x: x.astype(np.float32) for x in (w, x)]
    return Program(step, *arrays, mesh, placed, describe)

  first = Case(program({}))
  _, bounds, wide = equality.reference_of(first)
  assert not wide
  assert 1e-5 < bounds["change of value"] < 0.5
  assert not equality.check(Case(program({"data": 4})), first).findings
  [finding] = equality.check(Case(program({"data": 4}, factor=2.0)), first).findings
  assert finding.numbers["times the one on the first mesh"] == 2


def test_halves_add_up_to_the_sum():
  """Sums in two halves are those of NumPy, and are taken in scans and under jit, too."""
  w = np.random.default_rng(0).normal(size=(3, 5, 5)).astype(np.float32)

  def step(state, batch):
    body = lambda x, w: (jnp.tanh(x @ w), x.sum())  # noqa: E731
    x, sums = jax.lax.scan(jax.checkpoint(body), state, batch)
    return jax.jit(jnp.cumsum)(x), sums

  x = np.linspace(-1, 1, 10, dtype=np.float32).reshape(2, 5)
  halved = jaxprs.Replay(step, x, w, rule=jaxprs.in_halves)
  text = str(jax.make_jaxpr(halved)(x, w))
  assert text.count("dot_general[") == 2
  assert text.count("reduce_sum[") == 2
  expected, sums = x, []
  for matrix in w:
    sums.append(expected.sum())
    expected = np.tanh(expected @ matrix)
  found, _ = halved(x, w)
  np.testing.assert_allclose(found[1], sums, rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(found[0], np.cumsum(expected), rtol=1e-4, atol=1e-6)


def test_recorded_values_are_compared_iteration_by_iteration():
  label = jaxprs.Label("dot_general", "f.py:1", (3, 2), "float32", loop=1)
  other = dataclasses.replace(label, line="f.py:2")
  alone = dataclasses.replace(label, operation="gather")
  one, theirs = np.ones((3, 2)), np.ones((2, 3, 2))
  theirs[0, 1:] = 2  # of the second iteration, which is after the first one's last
  theirs[1, 0] = 3

  def differs(*labels):
    first, second, third = labels
    ours, its = [(first, one), (second, one)], [(third, one), *zip(labels, theirs, strict=False)]
    return equality.first_difference(ours, its, 1e-3)

  assert differs(label, other, alone) == (other, 2.0, label, [])
  backwards = [dataclasses.replace(one, backwards=True) for one in (label, other, alone)]
  assert differs(*backwards) == (label, 1.0, None, [alone])
