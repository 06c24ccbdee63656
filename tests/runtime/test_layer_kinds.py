"""Which layers have experts."""

import types

import pytest

from runtime import layer_kinds


def model(layers, **keys):
  given = {"dense_layers": 0, "sparse_every": 1, "mlp_only_layers": (), "experts": 4, **keys}
  return types.SimpleNamespace(layers=layers, layer_types=(), global_every=0, window=0, **given)


@pytest.mark.parametrize(
  ("given", "sparse"),
  [
    (model(4, experts=0), []),
    (model(4), [0, 1, 2, 3]),
    (model(5, dense_layers=2), [2, 3, 4]),
    (model(6, sparse_every=3), [2, 5]),
    (model(7, dense_layers=1, sparse_every=2), [2, 4, 6]),
    (model(3, sparse_every=2), [1]),
    (model(7, dense_layers=1, sparse_every=2, mlp_only_layers=(3, 4)), [2, 6]),
  ],
)
def test_sparse_layers_follow_the_pattern(given, sparse):
  found = [layer for layer in range(given.layers) if layer_kinds.is_sparse(given, layer)]
  assert found == sparse
  assert layer_kinds.sparse_layers(given) == len(sparse)
  assert layer_kinds.beside_sparse(given) == (given.layers - len(sparse) if given.experts else 0)
