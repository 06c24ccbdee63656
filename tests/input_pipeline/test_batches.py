"""The batch is a function of the step, also where rows are cut; prefetching."""

import dataclasses
import pathlib
import threading
import time
import types

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.sharding import PartitionSpec as P

from input_pipeline import batches
from input_pipeline.batches import Prefetcher, TrainingBatches, cut_rows
from input_pipeline.position import Position
from input_pipeline.ramp import Ramp
from input_pipeline.row_source import array_source

# ------------------------------ rows that are cut ------------------------------

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


# ------------------------------ batches ------------------------------

_ROOT = pathlib.Path(__file__).parents[2]


def _mesh(*sizes, devices=None):
  devices = jax.devices()[: int(np.prod(sizes))] if devices is None else devices
  axes = ("data", "context")[: len(sizes)]
  return Mesh(np.array(devices).reshape(sizes), axes, axis_types=(AxisType.Auto,) * len(sizes))


def _shardings(source, rows_on, tokens_on=None):
  tokens_on = rows_on if tokens_on is None else tokens_on
  return {
    field: tokens_on if len(shape) == 1 else rows_on for field, (shape, _) in source.fields.items()
  }


def _layouts(source):
  """Yields (name, shardings): every way a batch of 8 rows can lie on the devices."""
  eight, four_by_two = _mesh(8), _mesh(4, 2)
  yield "rows over 8", _shardings(source, NamedSharding(eight, P("data")))
  yield "4x2, replicated twice", _shardings(source, NamedSharding(four_by_two, P("data")))
  rows = NamedSharding(four_by_two, P("data"))
  yield "sequence split", _shardings(source, rows, NamedSharding(four_by_two, P("data", "context")))
  split = NamedSharding(_mesh(2, 4), P(None, "data"))
  yield "only the sequence split", _shardings(source, NamedSharding(_mesh(2, 4), P()), split)
  mixed = _mesh(8, devices=[jax.devices()[i] for i in (3, 0, 7, 1, 6, 2, 5, 4)])
  yield "devices out of order", _shardings(source, NamedSharding(mixed, P("data")))


def test_the_same_examples_on_every_mesh(numbered):
  source = numbered(21)
  for name, shardings in _layouts(source):
    training = batches.TrainingBatches(source, global_batch_size=8, seed=3)
    for step in (0, 2, 100):
      batch = training.batch(step, shardings)
      expected = source.read(training.row_ids(step))
      for field, array in batch.items():
        np.testing.assert_array_equal(np.asarray(array), expected[field], err_msg=name)
        assert array.sharding == shardings[field]
        abstract = training.abstract[field]
        assert (array.shape, array.dtype) == (abstract.shape, abstract.dtype)


# Both ways to shuffle: a whole epoch at a time, and number by number.
SIZES = [(21, 8), (8, 8), (1, 1), (2**10 + 7, 300)]


@pytest.mark.parametrize(("rows", "batch_size"), SIZES)
def test_an_epoch_shows_each_row_once(numbered, rows, batch_size):
  training = batches.TrainingBatches(
    numbered(rows, 1), global_batch_size=batch_size, seed=5, shuffle=True
  )
  epochs = 3
  steps = -(-epochs * rows // batch_size)
  ids = np.concatenate([training.row_ids(step) for step in range(steps)])
  assert ids.dtype == np.int64
  for epoch in ids[: epochs * rows].reshape(epochs, rows):
    np.testing.assert_array_equal(np.sort(epoch), np.arange(rows))
  if rows > 1:
    later = ids[rows : 2 * rows]
    assert not (ids[: len(later)] == later).all()
    assert not (ids[:rows] == np.arange(rows)).all()


@pytest.mark.parametrize("steps_per_epoch", [3, 676])
def test_neighbouring_seeds_share_no_epoch(numbered, steps_per_epoch):
  source = numbered(97 * steps_per_epoch, 1)
  beginnings = set()
  for seed in (5, 6, 2**40):
    training = batches.TrainingBatches(source, global_batch_size=97, seed=seed)
    beginnings |= {training.row_ids(steps_per_epoch * epoch).tobytes() for epoch in range(3)}
  assert len(beginnings) == 9


@pytest.mark.parametrize("rows", [21, 2**10 + 7])
def test_steps_need_no_steps_before(numbered, rows):
  source = numbered(rows, 1)
  forward = batches.TrainingBatches(source, global_batch_size=8, seed=1)
  backward = batches.TrainingBatches(source, global_batch_size=8, seed=1)
  steps = [*range(12), 10**6, 2**50]
  expected = [forward.row_ids(step) for step in steps]
  for step, ids in reversed(list(zip(steps, expected, strict=True))):
    np.testing.assert_array_equal(backward.row_ids(step), ids)
    assert ids.min() >= 0
    assert ids.max() < rows


def test_the_order_is_pinned(numbered):
  """A change here makes every run go on with other examples than it began with."""
  small = batches.TrainingBatches(numbered(21), global_batch_size=8, seed=3)
  large = batches.TrainingBatches(numbered(2**16 + 7, 1), global_batch_size=4, seed=3)
  assert small.row_ids(2).tolist() == [11, 9, 8, 4, 3, 16, 10, 18]
  assert large.row_ids(10**6).tolist() == [48559, 50718, 55931, 33088]


def test_one_unshuffled_batch_is_read_once(numbered):
  source = numbered(8)
  training = batches.TrainingBatches(source, global_batch_size=8, seed=0, shuffle=False)
  (_, first), (_, second), *_ = _layouts(source)
  batch = training.batch(0, first)
  again = training.batch(7, dict(first))
  assert all(again[field] is batch[field] for field in batch)
  elsewhere = training.batch(8, second)
  assert all(elsewhere[field].sharding == second[field] for field in batch)
  for array in elsewhere.values():
    array.delete()  # as a step does that donates its batch
  np.testing.assert_array_equal(np.asarray(training.batch(9, second)["labels"]), np.arange(8))


@pytest.mark.parametrize(("rows", "batch_size"), [(13, 1), (16, 8), (5, 8), (17, 16)])
def test_evaluation_covers_each_row_once(numbered, rows, batch_size):
  source = numbered(rows)
  evaluation = batches.EvaluationBatches(source, global_batch_size=batch_size)
  devices = int(np.gcd(batch_size, 8))
  shardings = _shardings(source, NamedSharding(_mesh(devices), P("data")))
  found = []
  for index in range(len(evaluation)):
    batch = {f: np.asarray(a) for f, a in evaluation.batch(index, shardings).items()}
    assert all(batch[f].shape == evaluation.abstract[f].shape for f in batch)
    there = batch["weights"][:, 0] == 1
    assert not any(array[~there].any() for array in batch.values())
    np.testing.assert_array_equal(
      batch["tokens"][there], source.read(batch["labels"][there])["tokens"]
    )
    found += batch["labels"][there].tolist()
  assert sorted(found) == list(range(rows))
  with pytest.raises(IndexError, match=f"batch {len(evaluation)} of {len(evaluation)}"):
    evaluation.batch(len(evaluation), shardings)


def test_evaluation_draws_the_same_rows_each_time_all_over_the_split(numbered):
  source = numbered(1000)
  ids = [batches.EvaluationBatches(source, global_batch_size=8).row_ids(i) for i in range(4)]
  larger = batches.EvaluationBatches(source, global_batch_size=16)
  assert np.concatenate([larger.row_ids(i) for i in range(2)]).tolist() == np.ravel(ids).tolist()
  assert ids[0].tolist() == [652, 293, 617, 707, 693, 382, 793, 151]
  quarters = np.bincount(np.ravel(ids) // 250, minlength=4)
  assert quarters.min() >= 3, quarters


class OfProcess:
  """What `jax.sharding.Sharding` says in one of two processes, each with half of the rows."""

  def __init__(self, index):
    self.index = index

  def addressable_devices_indices_map(self, shape):
    half = shape[0] // 2
    return {"here": (slice(self.index * half, (self.index + 1) * half), slice(0, shape[1]))}


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("pieces", [1, 3])
def test_each_of_two_processes_reads_its_own_rows(numbered, monkeypatch, index, pieces):
  whole, read = array_source("numbers", {"tokens": numbered(21).read(np.arange(21))["tokens"]}), []
  watched = dataclasses.replace(
    whole, read=lambda ids: read.append(ids.tolist()) or whole.read(ids)
  )
  monkeypatch.setattr(
    jax,
    "make_array_from_callback",
    lambda shape, sharding, shard: shard(sharding.addressable_devices_indices_map(shape)["here"]),
  )
  monkeypatch.setattr(batches.transfers, "placed", lambda make: make())
  ramp = Ramp(((0, 8),), ((0, pieces),))
  training = TrainingBatches(watched, global_batch_size=8, seed=3, ramp=ramp)
  found = training.batch(2, {"tokens": OfProcess(index)})["tokens"]
  mine = training.row_ids(2)[4 * index : 4 * index + 4]
  expected = whole.read(mine)["tokens"].reshape(4 * pieces, -1)
  np.testing.assert_array_equal(found, expected)
  assert read == [mine.tolist() if pieces == 1 else sorted(mine.tolist())]


# ------------------------------ prefetched ------------------------------


def test_no_more_than_depth_ahead():
  made = []
  with Prefetcher(made.append, start=0, stop=100, depth=3) as prefetcher:
    prefetcher.get(0)
    while len(made) < 4:
      time.sleep(0.001)
    time.sleep(0.1)
    assert made == [0, 1, 2, 3]


def test_steps_out_of_order_are_refused():
  with Prefetcher(lambda step: step, start=0, stop=2) as prefetcher:
    with pytest.raises(ValueError, match=r"step 1 was asked for, but the next one is 0 of 0..1"):
      prefetcher.get(1)
    prefetcher.get(0)
    prefetcher.get(1)
    with pytest.raises(ValueError, match="step 2 was asked for"):
      prefetcher.get(2)


def test_an_error_is_raised_at_its_step():
  def make(step):
    if step == 2:
      raise OSError("disk gone")
    return step

  with Prefetcher(make, start=0, stop=10, depth=4) as prefetcher:
    assert [prefetcher.get(0), prefetcher.get(1)] == [0, 1]
    for _ in range(2):  # and stays, rather than leaving the caller to wait for ever
      with pytest.raises(OSError, match="disk gone"):
        prefetcher.get(2)


def test_waiting_is_counted(monkeypatch):
  clock, asked = types.SimpleNamespace(now=5.0), threading.Event()
  clock.perf_counter = lambda: clock.now
  monkeypatch.setattr(batches, "time", clock)

  def while_waiting():
    clock.now += 3.0 * (not asked.is_set())
    asked.set()

  with Prefetcher(lambda step: asked.wait(), start=0, stop=2, depth=1) as prefetcher:
    prefetcher.get(0, while_waiting)
    assert prefetcher.wait_seconds == 3.0
    clock.now += 4.0
    prefetcher.get(1)
    assert prefetcher.wait_seconds == 3.0


def test_closing_ends_the_thread():
  prefetcher = Prefetcher(lambda step: step, start=0, stop=10**9)
  prefetcher.get(0)
  prefetcher.close()
  prefetcher.close()
  assert "prefetch" not in {thread.name for thread in threading.enumerate()}
  with pytest.raises(RuntimeError, match="closed"):
    prefetcher.get(1)


def test_closing_does_not_wait_for_a_read_that_hangs():
  release = threading.Event()
  prefetcher = Prefetcher(lambda step: release.wait(60), start=0, stop=1)
  begin = time.perf_counter()
  prefetcher.close(timeout_seconds=0.1)
  assert time.perf_counter() - begin < 30
  release.set()


def test_depth():
  with pytest.raises(ValueError, match="depth=0"):
    Prefetcher(lambda step: step, start=0, stop=1, depth=0)
