"""The batch is a function of the step."""

import os
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from input_pipeline import batches

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
  yield "one device", _shardings(source, SingleDeviceSharding(jax.devices()[0]))
  rows = NamedSharding(four_by_two, P("data"))
  yield "sequence split", _shardings(source, rows, NamedSharding(four_by_two, P("data", "context")))
  yield "replicated", _shardings(source, NamedSharding(eight, P()))
  split = NamedSharding(_mesh(2, 4), P(None, "data"))
  yield "only the sequence split", _shardings(source, NamedSharding(_mesh(2, 4), P()), split)
  mixed = _mesh(8, devices=[jax.devices()[i] for i in (3, 0, 7, 1, 6, 2, 5, 4)])
  yield "devices out of order", _shardings(source, NamedSharding(mixed, P("data")))


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_same_examples_on_every_mesh(numbered, shuffle):
  source = numbered(21)
  for name, shardings in _layouts(source):
    training = batches.TrainingBatches(source, global_batch_size=8, seed=3, shuffle=shuffle)
    for step in (0, 2, 100):
      batch = training.batch(step, shardings)
      expected = source.read(training.row_ids(step))
      for field, array in batch.items():
        np.testing.assert_array_equal(np.asarray(array), expected[field], err_msg=name)
        assert array.sharding == shardings[field]
        abstract = training.abstract[field]
        assert (array.shape, array.dtype) == (abstract.shape, abstract.dtype)


# Both ways to shuffle: a whole epoch at a time, and number by number.
SIZES = [(21, 8), (24, 8), (8, 8), (1, 1), (2**16, 1000), (2**16 + 7, 30000)]


@pytest.mark.parametrize(("rows", "batch_size"), SIZES)
def test_an_epoch_shows_each_row_once(numbered, rows, batch_size):
  training = batches.TrainingBatches(
    numbered(rows, 1), global_batch_size=batch_size, seed=5, shuffle=True
  )
  steps = -(-3 * rows // batch_size)
  ids = np.concatenate([training.row_ids(step) for step in range(steps)])[: 3 * rows]
  assert ids.dtype == np.int64
  epochs = ids.reshape(3, rows)
  for epoch in epochs:
    np.testing.assert_array_equal(np.sort(epoch), np.arange(rows))
  if rows > 1:
    assert not (epochs[0] == epochs[1]).all()
    assert not (epochs[0] == np.arange(rows)).all()


@pytest.mark.parametrize("steps_per_epoch", [3, 676])
def test_neighbouring_seeds_share_no_epoch(numbered, steps_per_epoch):
  source = numbered(97 * steps_per_epoch, 1)
  beginnings = set()
  for seed in (5, 6, 2**40):
    training = batches.TrainingBatches(source, global_batch_size=97, seed=seed)
    beginnings |= {training.row_ids(steps_per_epoch * epoch).tobytes() for epoch in range(3)}
  assert len(beginnings) == 9


def test_without_shuffling_the_order_is_the_sources(numbered):
  training = batches.TrainingBatches(numbered(5), global_batch_size=3, seed=0, shuffle=False)
  assert [training.row_ids(s).tolist() for s in range(4)] == [
    [0, 1, 2],
    [3, 4, 0],
    [1, 2, 3],
    [4, 0, 1],
  ]


@pytest.mark.parametrize("rows", [21, 2**16 + 7])
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


@pytest.mark.parametrize(("rows", "batch_size"), [(13, 1), (13, 8), (16, 8), (5, 8), (17, 16)])
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


_PROCESS = """
import sys
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from input_pipeline import batches, row_source
from input_pipeline.ramp import Ramp
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize("localhost:" + sys.argv[1], 2, int(sys.argv[2]))
numbers = np.arange(21, dtype=np.int32)
tokens = numbers[:, None] * 100 + np.arange(6, dtype=np.int32)
source = row_source.array_source("n", {"tokens": tokens})
read = []
def recording(ids):
  read.append(ids.tolist())
  return source.read(ids)
watched = row_source.Source("n", "", 21, source.fields, recording)
devices = np.array(jax.devices()).reshape(4, 2)
mesh = Mesh(devices, ("data", "context"), axis_types=(AxisType.Auto,) * 2)
training = batches.TrainingBatches(watched, global_batch_size=8, seed=3)
array = training.batch(2, {"tokens": NamedSharding(mesh, P("data", "context"))})["tokens"]
ids = training.row_ids(2)
expected = source.read(ids)["tokens"]
for shard in array.addressable_shards:
  np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index])
half = ids.tolist()[4 * int(sys.argv[2]):][:4]
assert read == [half], (read, half)
ramp = Ramp(((0, 4), (2, 8)), ((0, 3),))  # rows of 2 tokens: three pieces of each
training = batches.TrainingBatches(watched, global_batch_size=8, seed=3, ramp=ramp)
for step, rows in ((1, 4), (2, 8)):
  read.clear()
  array = training.batch(step, {"tokens": NamedSharding(mesh, P("data", "context"))})["tokens"]
  ids = training.row_ids(step)
  expected = source.read(ids)["tokens"].reshape(-1, 2)
  assert array.shape == expected.shape == (3 * rows, 2)
  for shard in array.addressable_shards:
    np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index])
  half = ids.tolist()[rows // 2 * int(sys.argv[2]):][:rows // 2]
  assert read == [sorted(half)], (read, half)
print("right")
"""


def test_each_of_two_processes_reads_its_own_rows():
  with socket.socket() as probe:
    probe.bind(("localhost", 0))
    port = str(probe.getsockname()[1])
  environment = os.environ | {"PYTHONPATH": str(_ROOT), "JAX_PLATFORMS": "cpu"}
  processes = [
    subprocess.Popen(
      [sys.executable, "-c", _PROCESS, port, str(process)],
      stdout=subprocess.PIPE,
      text=True,
      env=environment,
    )
    for process in range(2)
  ]
  outputs = [process.communicate(timeout=60)[0] for process in processes]
  assert all("right" in output for output in outputs)
