"""Rows that are cut: which tokens are in the batch of each step, beside plain slicing."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from input_pipeline.batches import TrainingBatches, cut_rows
from input_pipeline.position import Position
from input_pipeline.ramp import Ramp
from input_pipeline.row_source import array_source

ROWS, T = 24, 12


def source():
  """Returns rows of tokens whose numbers tell where they are."""
  random = np.random.default_rng(0)
  stream = np.arange(ROWS * (T + 1), dtype=np.int32).reshape(ROWS, T + 1)
  starts = random.random((ROWS, T)) < 0.3
  return array_source(
    "numbered",
    {
      "tokens": stream[:, :-1],
      "targets": stream[:, 1:],
      "weights": random.integers(0, 2, (ROWS, T)).astype(np.float32),
      "segments": np.cumsum(starts, axis=1, dtype=np.int32),
    },
  )


def test_pieces_are_slices_of_rows_and_number_their_documents_from_zero():
  whole, pieces = source(), 3
  parts = cut_rows(whole, pieces)
  assert len(parts) == 3 * ROWS
  numbers = np.array([5, 4, 70, 3, 5])
  found, rows = parts.read(numbers), whole.read(np.arange(ROWS))
  assert {name: shape for name, (shape, _) in parts.fields.items()} == {
    name: array.shape[1:] for name, array in found.items()
  }
  for at, number in enumerate(numbers):
    row, first = number // pieces, number % pieces * 4
    for name in ("tokens", "targets", "weights"):
      np.testing.assert_array_equal(found[name][at], rows[name][row, first : first + 4])
    segments = rows["segments"][row, first : first + 4]
    np.testing.assert_array_equal(found["segments"][at], segments - segments[0])
    assert found["segments"].dtype == np.int32
  # The target of a piece's last token is the next one of the text.
  np.testing.assert_array_equal(found["targets"][:, -1], found["tokens"][:, -1] + 1)


def test_each_step_has_the_tokens_of_its_rows_whatever_they_are_cut_into():
  ramp = Ramp(((0, 2), (3, 4), (6, 8)), ((0, 4), (2, 2), (5, 1)))
  whole = source()
  batches = TrainingBatches(whole, global_batch_size=8, seed=3, ramp=ramp)
  mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
  shardings = {name: NamedSharding(mesh, PartitionSpec("data")) for name in whole.fields}
  position, seen = Position.of(ramp.rows), []
  for step in range(7):
    rows, pieces = ([2] * 3 + [4] * 3 + [8])[step], [4, 4, 2, 2, 2, 1, 1][step]
    ids = batches.row_ids(step)
    seen += ids.tolist()
    stored, found = whole.read(ids), batches.batch(step, shardings, position)
    assert len(ids) == rows
    for name in ("tokens", "targets", "weights"):
      assert found[name].shape == (rows * pieces, T // pieces)
      wanted = np.concatenate([np.split(row, pieces) for row in stored[name]])
      np.testing.assert_array_equal(np.asarray(found[name]), wanted)
  assert len(seen) == 2 * 3 + 4 * 3 + 8
  plain = TrainingBatches(whole, global_batch_size=1, seed=3)
  assert seen == [int(plain.row_ids(number)[0]) for number in range(len(seen))]


def test_the_same_rows_in_each_step_are_not_taken_for_the_same_batch():
  whole = source()
  ramp = Ramp(((0, ROWS),), ((0, 2), (1, 1)))
  batches = TrainingBatches(whole, global_batch_size=ROWS, seed=0, shuffle=False, ramp=ramp)
  mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
  shardings = {name: NamedSharding(mesh, PartitionSpec()) for name in whole.fields}
  shapes = [batches.batch(step, shardings)["tokens"].shape for step in range(3)]
  assert shapes == [(2 * ROWS, T // 2), (ROWS, T), (ROWS, T)]
