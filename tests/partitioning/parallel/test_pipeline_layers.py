"""Where the layers of an interleaved pipeline go: to their stages, and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from partitioning.mesh import make_mesh
from partitioning.mesh_sizes import AXES
from partitioning.parallel import pipeline

CASES = [(2, 2), (2, 3), (4, 2), (4, 3), (8, 2), (3, 2)]


@pytest.mark.parametrize(("stages", "chunks"), CASES)
def test_each_chunk_is_sent_once_and_to_its_stage(stages, chunks):
  sent = set()
  for entries in pipeline.exchanges(stages, chunks):
    assert sorted(to for _, to, _ in entries) == list(range(stages))
    for sender, (stored, to, computed) in enumerate(entries):
      number = sender * chunks + stored
      assert (number % stages, number // stages) == (to, computed)
      sent.add(number)
  assert sent == set(range(stages * chunks))


@pytest.mark.parametrize(("stages", "chunks"), CASES)
def test_a_stage_has_every_nth_chunk_in_order(stages, chunks):
  each = 2  # layers of a chunk
  layers = np.arange(stages * chunks * each * 3).reshape(-1, 3)
  mesh = make_mesh({**dict.fromkeys(AXES, 1), "stage": stages}, jax.devices()[:stages])

  def run(function):
    region = jax.shard_map(
      function,
      in_specs=PartitionSpec("stage"),
      out_specs=PartitionSpec("stage"),
      axis_names={"stage"},
      check_vma=False,
    )
    with jax.set_mesh(mesh):
      return np.asarray(jax.jit(region)(jnp.asarray(layers)))

  found = run(lambda x: pipeline.to_compute(x, stages, chunks)[None])
  for stage in range(stages):
    for chunk in range(chunks):
      first = (chunk * stages + stage) * each
      np.testing.assert_array_equal(found[stage, chunk], layers[first : first + each])

  def there_and_back(x):
    computed = pipeline.to_compute(x, stages, chunks)
    return pipeline.to_store(computed + 1, stages, chunks)

  np.testing.assert_array_equal(run(there_and_back), layers + 1)
