"""Which pairs of a block of queries and a block of keys are computed."""

import jax.numpy as jnp
import pytest

from partitioning.parallel import attention_blocks


@pytest.mark.parametrize(
  ("window", "pairs"), [(None, 4 * 5 // 2), (8, 4 + 3), (9, 4 + 3), (10, 4 + 3 + 2)]
)
def test_pairs_without_a_visible_key_are_left_out(window, pairs):
  zeros = jnp.zeros((1, 1, 1, 32, 1))
  slots = jnp.arange(32, dtype=jnp.int32)
  queries = attention_blocks.Queries(zeros, slots[None], None)
  keys = attention_blocks.Keys(zeros[:, 0], zeros[:, 0], slots, None)
  scores = attention_blocks.Scores(1.0, jnp.float32)
  how = attention_blocks.Blocks(scores, 8, 8, complete=True)
  assert len(attention_blocks.Cut(how, queries, keys, window).pairs()) == pairs
