"""The matrix of `make test-all`: what is in it, that it can fail, and its page."""

import dataclasses

from tests.parity import matrix
from tests.parity.matrix import MESHES, VARIANTS
from tests.parity.results import HEADING, Combination, Result


def test_every_mesh_and_every_variant_is_in_it():
  found = matrix.combinations()
  assert len(found) == len(set(found)) > 100
  assert {c.mesh for c in found} == set(MESHES)
  assert {c.variant for c in found} == set(VARIANTS)
  for recipe in ("lm", "mlp", "vit"):
    axes = {axis for c in found if c.recipe == recipe for axis in matrix.overrides(c)}
    assert {"mesh.data", "mesh.fsdp", "mesh.tensor"} <= axes
  assert {c.dtype for c in found} == {"float32", "float64", "bfloat16"}


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


def result_of(combination, code):
  return Result(combination, 30, 1.5e-15, (), (code, "3.11.7", "0.10.2", "0.10.2", "0.12.8", "0"))


def test_a_run_takes_what_has_no_result_of_this_code():
  vit = [one for one in matrix.combinations() if one.recipe == "vit"]
  old, new = (result_of(one, code) for one, code in zip(vit, ("old", "new"), strict=False))
  before = {one.combination: one for one in (old, new)}
  assert matrix.chosen("vit", False, before, new.made) == vit
  assert matrix.chosen("vit", True, before, new.made) == [vit[0], *vit[2:]]
  assert matrix.chosen("no such", False, before, new.made) == []


def test_results_of_what_is_no_longer_in_the_matrix_are_not_kept(tmp_path, monkeypatch):
  written = tmp_path / "compare.md"
  written.write_text(f"# Compare\n\n{HEADING}\n\nstale\n")
  monkeypatch.setattr(matrix, "PAGE", written)
  saved = []
  monkeypatch.setattr(matrix, "save", saved.extend)
  first, *others = matrix.combinations()
  gone = Combination("lm", "a mesh of before", "plain", "float64")
  assert matrix.kept({one: result_of(one, "x") for one in (gone, first)}) == len(others)
  assert [one.combination for one in saved] == [first]
  page = written.read_text()
  assert page.startswith("# Compare\n")
  assert "stale" not in page
  assert f"{len(others)} combinations of the matrix have not been run." in page
