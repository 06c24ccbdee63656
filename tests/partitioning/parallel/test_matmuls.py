"""Sequence-parallel regions, ZeRO-1, and what changes the model, beside one device."""

import jax
import pytest

from partitioning import rules
from partitioning.parallel import vocabulary
from tests.parity.comparison import (
  FEATURES,
  MESHES,
  SEQUENCE_PARALLEL,
  ZERO_1,
  assert_equal,
  reference,
  train,
)


# The other meshes: with what is below; in float32: with a ring.
@pytest.mark.parametrize(
  ("mesh", "chunks"),
  [pytest.param("data4_tensor2", 1, marks=pytest.mark.long), ("fsdp2_tensor4", 2)],
)
def test_sequence_parallel_regions_train_as_one_device_does(mesh, chunks):
  ours = train(
    "lm", "float64", {**MESHES[mesh], **SEQUENCE_PARALLEL, "training.loss_chunks": chunks}
  )
  assert_equal(ours, reference("lm", "float64"), "float64")


def test_what_cpus_do_between_processes_instead_of_a_reduce_scatter(monkeypatch):
  monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
  ours = train("lm", "float64", {**MESHES["fsdp4_tensor2"], **SEQUENCE_PARALLEL})
  assert "all-to-all" in ours.trained.text
  assert "reduce-scatter" not in ours.trained.text
  assert_equal(ours, reference("lm", "float64"), "float64")


def test_the_gradient_of_a_table_that_is_summed_by_parts(monkeypatch):
  asked = []
  monkeypatch.setattr(vocabulary, "_parts", lambda *sizes: asked.append(sizes) or 4)
  ours = train("lm", "float64", {**MESHES["fsdp4_tensor2"], **SEQUENCE_PARALLEL})
  assert {rows for rows, _ in asked} == {36}  # of a device: tensor splits 72
  assert_equal(ours, reference("lm", "float64"), "float64")


@pytest.mark.parametrize(
  ("mesh", "microbatches", "chunks"),
  [
    pytest.param("fsdp8", 2, 1, marks=pytest.mark.long),
    pytest.param("tensor8", 8, 1, marks=pytest.mark.long),
    ("data2_fsdp2_tensor2", 4, 2),
  ],
)
def test_tied_embeddings_documents_rematerialization_accumulation_and_chunks(
  mesh, microbatches, chunks
):
  # Microbatches of unequal weight: a mean of means would differ.
  counts = {"training.gradient_accumulation_steps": microbatches, "training.loss_chunks": chunks}
  parallel = SEQUENCE_PARALLEL if "tensor" in mesh else {}
  ours = train("lm", "float64", {**FEATURES, **MESHES[mesh], **counts, **parallel})
  assert_equal(ours, reference("lm", "float64", featured=True), "float64")


def test_the_features_change_what_is_computed():
  plain, featured = reference("lm", "float64"), reference("lm", "float64", featured=True)
  assert abs(plain.trained.losses[0] - featured.trained.losses[0]) > 1e-3
  assert "unembed/kernel" in plain.trained.gradients
  assert "unembed/kernel" not in featured.trained.gradients


def test_zero_1_splits_the_optimizers_state_alone():
  ours = train("lm", "float64", {**MESHES["data8"], **ZERO_1})
  wanted = train("lm", "float64", {"optimizer.momentum": 0.9})
  assert_equal(ours, wanted, "float64")
  sizes, sections = ours.job.devices.sizes, ours.job.placements
  [name] = [name for name in sections["optimizer"] if name.endswith("trace/layers/mlp/up/kernel")]
  kernel = sections["parameters"]["layers/mlp/up/kernel"]
  assert rules.shard_shape(kernel.shape, kernel.spec, sizes) == (2, 40, 56)
  state = sections["optimizer"][name]
  assert rules.shard_shape(state.shape, state.spec, sizes) == (2, 5, 56)


def test_a_residual_that_is_split_over_its_width_too():
  # Each product of a region then has partial sums over the axis of the width.
  tables = {"model": ("context",), "sequence": (), "residual_sequence": ()}
  ours = train(
    "lm",
    "float64",
    {
      **{"mesh.data": 2, "mesh.context": 2, "mesh.tensor": 2, **SEQUENCE_PARALLEL},
      **{f"partitioning.activations.{name}": axes for name, axes in tables.items()},
    },
  )
  assert_equal(ours, reference("lm", "float64"), "float64")


@pytest.mark.parametrize(
  ("mesh", "chunks"),
  # On three axes, and with sequence-parallel regions: above; around a ring: its own tests.
  [({}, 3), pytest.param(MESHES["fsdp8"], 2, marks=pytest.mark.long)],
)
def test_a_loss_in_chunks(mesh, chunks):
  ours = train("lm", "float64", {"training.loss_chunks": chunks, **mesh})
  assert_equal(ours, reference("lm", "float64"), "float64")
