"""What the tour says follows from what ran: other layouts make it say something else."""

import jax
import numpy as np
import pytest

from reports.tour import (
  arrays,
  collectives,
  computation_follows_data,
  constraints,
  network,
  pipeline,
  random_numbers,
  scene,
  vmap_to_mesh,
)


def said(module, name, *arguments, show=None, **settings):
  """Returns what a chapter says of one of its scenes, run with other arguments."""
  show = show or f"_{name}"
  shown = getattr(module, show)(getattr(module, name)(*arguments, **settings))
  return "\n".join([*shown.findings, shown.text])


# module, scene, its `show` where that has another name, what it says, other layouts, what it says
# then; (function name, arguments) for scenes that call another one.
FLIPS = {
  "a cut that names no axis": (
    (arrays, "four_cuts", {}, {"spec": (None, "tensor")}),
    [
      ("data=4 x tensor=2: 8 blocks of [4, 4], each on one", "2 blocks of [16, 4], each on 4 dev"),
      ("A device holds 64 Bytes of the", "A device holds 64 Bytes or 128 Bytes or 256 Bytes or"),
    ],
  ),
  "copies": (
    (arrays, "copies", {}, {"spec": ("data", "tensor")}),
    [
      ("4 blocks of [4, 8], each on 2 devices", "8 blocks of [4, 4], each on one device"),
      ("Devices 0 and 1 hold the same block: rows 0 to 3", "No two devices hold the same block"),
      ("together store 1.0 KiB", "together store 512 Bytes"),
    ],
  ),
  "whole copies": (
    (arrays, "copies", {}, {"spec": (None, None)}),
    [
      ("each on 2 devices", "one block of [16, 8], on 8 devices"),
      ("does not name tensor.", "does not name data and tensor."),
    ],
  ),
  "the order of two axes": (
    (arrays, "two_axes_on_one_dim", {}, {"specs": ((("data", "tensor"), None),) * 2}),
    [("6 of 8 devices hold different blocks", "Every device holds the same block under both")],
  ),
  "elementwise": (
    (computation_follows_data, "elementwise", {}, {"spec": ("tensor", None)}),
    [("sin(x) is sharded like x: (data, tensor)", "sin(x) is sharded like x: (tensor, -)")],
  ),
  "a product": (
    (computation_follows_data, "product", {}, {"x_spec": (None, "data"), "y_spec": ("data", None)}),
    [
      ("the product as (data, tensor)", "the product as (-, -)"),
      ("No communication", "sends 1 all-reduce along data (512 Bytes a device)"),
      ("has full rows of x and full columns of y, all 12", "holds 3 numbers of its row of x"),
    ],
  ),
  "committed arrays": (
    (computation_follows_data, "different_devices", {}, {"first": 3, "second": 3}),
    [
      ("x was placed on device 1", "x was placed on device 3"),
      ("x + z is on device 1", "x + z is on device 3"),
      ("x + y is refused (ValueError)", "x + y is on device 3"),
    ],
  ),
  "a layout that is asked for": (
    (computation_follows_data, "before_the_first_step", {}, {"width": 96}),
    [
      ("names all 3 wrong arrays: layer_2/bias", "Accepted: every dim is divisible"),
    ],
  ),
  "a constraint that asks for what is there": (
    (constraints, "before_and_after", {}, {"spec": ("data", None)}),
    [
      ("After: it is sharded as (-, tensor)", "After: it is sharded as (data, -)"),
      ("sends 1 all-gather along data", "the program sends nothing.\nThe numbers"),
      ("The constraint has an effect", "sets what the compiler had chosen: nothing changes"),
    ],
  ),
  "a table": (
    (constraints, "by_letters", {}, {"tables": ((), ())}),
    [
      ("takes tensor: the hidden values BF are sharded as (data, tensor)", "takes no axis"),
      ("sends 1 all-reduce along tensor", "sends nothing.\nThe results"),
      ("The second table saves work: 3,", "The second table saves no work: 6,144"),
    ],
  ),
  "more microbatches": (
    (pipeline, "schedule_by_hand", {}, {"microbatches": 9}),
    [
      ("has 3 forward passes", "has 9 forward passes"),
      ("takes the time of 4 of each: 1 of 4 is", "takes the time of 10 of each: 1 of 10 is"),
    ],
  ),
  "all forward passes first": (
    (pipeline, "schedule_by_hand", {}, {"kind": "gpipe", "microbatches": 9}),
    [("inputs of at most 3 microbatches", "inputs of at most 9 microbatches")],
  ),
  "more stages": (
    (pipeline, "forward_passes", {}, {"stages": 8}),
    [
      ("take 6 ticks on 4 stages; 50 %", "take 10 ticks on 8 stages; 30 %"),
      ("6 collective-permute along stage", "10 collective-permute along stage"),
    ],
  ),
  "a batch that is cut through the signals": (
    (vmap_to_mesh, "batch_over_devices", {}, {"spec": (None, "data")}),
    [
      ("8 blocks of [2, 24]", "8 blocks of [16, 3]"),
      ("No communication", "Communication: the compiled program sends"),
      ("has 2 complete signals", "has 3 numbers of each signal, and their neighbours are on other"),
    ],
  ),
  "a map over no axis": (
    (vmap_to_mesh, "batch_by_shard_map", {}, {"axis": None}),
    [("traced for [2, 24]", "traced for [16, 24]")],
  ),
  "a batch of another size": (
    (vmap_to_mesh, "batch_by_vmap", {}, {"batch": 5, "length": 7}),
    [("16 signals of 24 numbers", "5 signals of 7 numbers")],
  ),
  "strategies": (
    (network, "layouts", {}, {"strategies": ("dp8", "fsdp8")}),
    [
      (
        "dp4_tp2: 462.3 KiB of parameters on each device. Sharded: layer_2/bias, layer_2/kernel",
        "fsdp8: 66.3 KiB of parameters on each device. Sharded: layer_1/bias, layer_1/kernel",
      )
    ],
  ),
}


@pytest.mark.parametrize("case", FLIPS)
def test_another_layout_makes_it_say_something_else(case):
  (module, name, usual, other), pairs = FLIPS[case]
  before, after = said(module, name, **usual), said(module, name, **other)
  for first, then in pairs:
    assert first in before
    assert first not in after
    assert then in after


COLLECTIVES = {
  "broadcast": "1 all-reduce along data (8 Bytes",
  "scatter": "1 reduce-scatter along data (16 Bytes",
  "reduce": "1 all-reduce along data (8 Bytes",
  "all_reduce": "1 all-reduce along data (8 Bytes",
  "gather": "1 all-gather along data (32 Bytes",
  "all_gather": "1 all-gather along data (32 Bytes",
  "reduce_scatter": "1 reduce-scatter along data (16 Bytes",
  "all_to_all": "1 all-to-all along data (16 Bytes",
  "permute": "1 collective-permute along data (8 Bytes",
  "normalise": "1 all-reduce along data (4 Bytes",
}


# What each device should hold, row by row, from the rows before: written apart from the tour's.
def _rooted(x, row):
  return np.stack([row, *(np.zeros_like(row) for _ in x[1:])])


NUMPY = {
  "broadcast": lambda x: np.stack([x[0] for _ in x]),
  "scatter": lambda x: np.array([[x[0, d]] for d in range(len(x))]),
  "reduce": lambda x: _rooted(x, np.add.reduce(x)),
  "all_reduce": lambda x: np.stack([np.add.reduce(x) for _ in x]),
  "gather": lambda x: _rooted(x, np.concatenate(x)),
  "all_gather": lambda x: np.stack([np.concatenate(x) for _ in x]),
  "reduce_scatter": lambda x: np.array([[sum(row[d] for row in x)] for d in range(len(x))]),
  "all_to_all": lambda x: np.array([[row[d] for row in x] for d in range(len(x))]),
  "permute": lambda x: np.stack([x[d - 1] for d in range(len(x))]),
  "normalise": lambda x: x / np.add.reduce(x, axis=None),
}


@pytest.mark.parametrize("count", [4, 8])
@pytest.mark.parametrize("name", NUMPY)
def test_a_collective_does_what_numpy_does(name, count):
  moved, _ = getattr(collectives, name)(count)
  expected = NUMPY[name](np.asarray(moved.before))
  held = np.concatenate([shard.data for shard in moved.after.addressable_shards])
  assert len(moved.after.addressable_shards) == count
  np.testing.assert_allclose(held, expected, rtol=1e-6)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_is_what_was_sent(name):
  four = said(collectives, name, show="_exchange")
  assert f"Communication: the compiled program sends {COLLECTIVES[name]} a device)." in four
  assert "NumPy computes are the same, to " in four
  one = said(collectives, name, 1, show="_exchange")
  assert "No communication" in one
  assert "On 1 device: " in one


def test_a_collective_along_other_axes():
  text = said(collectives, "along_one_axis", show="_exchange")
  assert "1 all-reduce along tensor" in text
  assert "4 different." in text
  both = said(collectives, "along_one_axis", ("data", "tensor"), show="_exchange")
  assert "1 all-reduce along data+tensor" in both
  assert "1 number a device, the same everywhere." in both


def test_a_collective_that_does_something_else_is_reported():
  moved, right = collectives.all_reduce()
  right = right.copy()
  right[3, 1] += 7
  text = "\n".join(collectives._exchange((moved, right)).findings)
  assert "NumPy computes are NOT the same: they differ by up to 9.9 % of the largest" in text


def test_the_network_is_compared():
  runs = network.training(steps=3)
  text = "\n".join(network._training(runs).findings)
  assert "all 3 losses are the same, to " in text
  assert "rows on a device: 16, then 32" in text
  assert "dp4_tp2: the loss goes from 25.697" in text
  name, job, step, losses, seconds = runs[1]
  runs[1] = (name, job, step, [losses[0], losses[1] * 1.01, losses[2]], seconds)
  text = "\n".join(network._training(runs).findings)
  assert "all 3 losses are NOT the same: they differ by up to 1 % of the largest" in text
  text = "\n".join(network._training(runs[:1] * 2).findings)
  assert "What changes: nothing." in text


# module, scene, where in its result the numbers are that are compared, what it says when some of
# them are others.
SPOILED = {
  "put together": (arrays, "four_cuts", (2,), "only 3 of 4 are the original array"),
  "a product": (computation_follows_data, "product", (4,), "The product and NumPy's are NOT"),
  "a product that communicates": (
    computation_follows_data,
    "product_with_communication",
    (4,),
    "The product and NumPy's are NOT the same",
  ),
  "a constraint": (constraints, "before_and_after", (2, 1), "The numbers are NOT the same"),
  "a table": (constraints, "by_letters", (1, 1, 2), "The results are NOT the same"),
  "a pipeline": (pipeline, "forward_passes", (4,), "all layers by NumPy are NOT the same"),
  "by vmap": (vmap_to_mesh, "batch_by_vmap", (2,), "a loop over np.convolve are NOT the same"),
  "over devices": (vmap_to_mesh, "batch_over_devices", (3,), "that of one device are NOT the same"),
  "by shard_map": (vmap_to_mesh, "batch_by_shard_map", (3,), "that of one device are NOT the same"),
  "random numbers": (random_numbers, "draw", (1, 2), "2 of 3 meshes have the numbers of the first"),
}
SHOWS = {"product_with_communication": "_product"}


def spoiled(result, path):
  """Returns a scene's result with another number in one of its arrays, sharded as before."""
  if path:
    return [spoiled(part, path[1:]) if i == path[0] else part for i, part in enumerate(result)]
  numbers = np.array(result)
  numbers.flat[-1] += 1
  return jax.device_put(numbers, result.sharding)


@pytest.mark.parametrize("case", SPOILED)
def test_one_other_number_makes_it_say_so(case):
  module, name, path, text = SPOILED[case]
  show = getattr(module, SHOWS.get(name, f"_{name}"))
  result = getattr(module, name)()
  assert text not in "\n".join(show(result).findings)
  assert text in "\n".join(show(spoiled(result, path)).findings)


def test_random_numbers_of_the_generator_before():
  now, before = said(random_numbers, "draw"), said(random_numbers, "draw", partitionable=False)
  assert "The same numbers on every mesh, and no collective in any of the programs." in now
  assert "no collective in any" not in before
  assert "3 of 3 meshes have the numbers of the first, and 2 of the programs communicate" in before


def test_parameters_that_differ_are_reported():
  results = random_numbers.parameters()
  text = "\n".join(random_numbers._parameters(results).findings)
  assert (
    "dp4_tp2: layer_2/kernel is sharded as (-, tensor). Sent: nothing. 8 of 8 arrays equal" in text
  )
  results[1][3]["layer_1"]["bias"] += 1
  text = "\n".join(random_numbers._parameters(results).findings)
  assert "7 of 8 arrays equal those under single to the last bit" in text


@pytest.mark.parametrize(
  ("ours", "theirs", "same", "close"),
  [
    ([1.0, 2.0], [1.0, 2.0], "the same, to the last bit", "the same, to rounding"),
    ([0.0, 0.0], [0.0, 0.0], "the same, to the last bit", "the same, to rounding"),
    ([1.0, 2.0 + 1e-7], [1.0, 2.0], "NOT the same: they differ by up to 5", "the same, to roundi"),
    ([1.0, 2.1], [1.0, 2.0], "NOT the same: they differ by up to 5 %", "NOT the same: they differ"),
    ([1.0, np.nan], [1.0, 2.0], "NOT the same", "NOT the same"),
    ([1.0], [1.0, 2.0], "NOT the same: the shapes are [1] and [2]", "NOT the same: the shapes"),
  ],
)
def test_same_and_close(ours, theirs, same, close):
  assert scene.same(ours, theirs).startswith(same)
  assert scene.close(ours, theirs).startswith(close)
