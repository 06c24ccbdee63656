"""The matrix of `make test-all`: what is in it, that it can fail, and its page."""

import dataclasses

from tests.parity import matrix
from tests.parity.matrix import MESHES, Combination, Result


def test_every_mesh_and_every_variant_is_in_it():
  found = matrix.combinations()
  assert len(found) == len(set(found)) > 100
  assert {c.mesh for c in found} == set(MESHES)
  assert {c.variant for c in found} == set(matrix.VARIANTS)
  assert {c.dtype for c in found} == {"float32", "float64", "bfloat16"}


def test_accumulation_is_more_than_one_microbatch_everywhere():
  for one in matrix.combinations():
    if one.variant.endswith("accumulated"):
      assert matrix.overrides(one)["training.gradient_accumulation_steps"] > 1


def test_a_wrong_gradient_is_reported(monkeypatch):
  right = Combination("mlp", "data8", "plain", "float64")
  assert matrix.compare(right).wrong == ()
  train = matrix.train

  def scaled(recipe, dtype, overrides):
    run = train(recipe, dtype, overrides)
    if not overrides:  # the reference
      return run
    gradients = {name: 2 * value for name, value in run.trained.gradients.items()}
    return dataclasses.replace(run, trained=dataclasses.replace(run.trained, gradients=gradients))

  monkeypatch.setattr(matrix, "train", scaled)
  result = matrix.compare(right)
  assert len(result.wrong) == 8
  assert result.wrong[0].startswith("gradient layer_1/bias: 1.00e+00")
  assert "1 combinations beyond the bound" in matrix.page([result])


def test_the_page_counts_what_was_compared():
  found = [Result(Combination("lm", mesh, "plain", "float64"), 30, 1.5e-15, ()) for mesh in MESHES]
  text = matrix.page(found)
  assert f"{len(MESHES)} combinations, {30 * len(MESHES)} tensors compared, 0 combin" in text
  assert "- float64: at most 1.5e-15; bound 1e-12" in text
