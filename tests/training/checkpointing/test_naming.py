"""Trees by name, as they are stored, and the strict comparison of two."""

import collections

import numpy as np

from training.checkpointing import naming

Moments = collections.namedtuple("Moments", "count mu")


def test_names_are_paths_through_containers_of_every_kind():
  tree = {"a": [np.zeros(2), {"b": np.ones(3)}], "c": Moments(np.int32(1), (np.ones(5),))}
  assert [*naming.named_leaves(tree)] == ["a/0", "a/1/b", "c/count", "c/mu/0"]


def test_stored_trees_are_dicts_alone():
  leaves = {"a/0": 1, "a/1/b": 2, "c": 3}
  assert naming.nested(leaves) == {"a": {"0": 1, "1": {"b": 2}}, "c": 3}


def test_names_shapes_and_types_are_compared_both_ways():
  half, whole = np.zeros((2, 3), np.float32), np.zeros((4, 3), np.float32)
  stored = {"same": half, "shape": half, "type": half, "gone": half}
  wanted = {"same": half, "shape": whole, "type": half.astype(np.float64), "new": half}
  assert naming.differences(stored, wanted) == [
    "gone: float32[2, 3] in the checkpoint, absent here",
    "new: absent in the checkpoint, float32[2, 3] here",
    "shape: float32[2, 3] in the checkpoint, float32[4, 3] here",
    "type: float32[2, 3] in the checkpoint, float64[2, 3] here",
  ]
