"""Rotary positions, the masked softmax and the cache, against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import attention, model_spec, positions, transformer
from tests.helpers.jobs import make_job

FREQUENCY = positions.rotary_frequencies(4, 100.0, dtype=jnp.dtype("float32"))
RANDOM = np.random.default_rng(0)


def normal(*shape):
  """Returns random float32 numbers."""
  return RANDOM.standard_normal(shape).astype(np.float32)


def numpy_rotate(x, position, base):
  """Turns one vector's pairs (i, i + H/2) as complex numbers."""
  half = len(x) // 2
  angle = position * base ** (-np.arange(half) / half)
  turned = (x[:half] + 1j * x[half:]) * np.exp(1j * angle)
  return np.concatenate([turned.real, turned.imag])


def test_each_row_is_turned_by_its_own_positions():
  x_BTNH, positions_BT = normal(2, 3, 5, 4), np.array([[0, 1, 2], [7, 8, 9]], np.int32)
  found = positions.apply_rope(
    jnp.asarray(x_BTNH), positions.rope_table(jnp.asarray(positions_BT), FREQUENCY)
  )
  for b, t, n in np.ndindex(2, 3, 5):
    wanted = numpy_rotate(x_BTNH[b, t, n], positions_BT[b, t], 100.0)
    np.testing.assert_allclose(found[b, t, n], wanted, atol=1e-5)


@pytest.mark.parametrize("sinks", [False, True])
def test_a_query_sees_the_slots_up_to_its_position_and_nothing_of_the_rest(sinks):
  q_BTNH, k_BSNH, v_BSNU = normal(2, 3, 5, 4), normal(2, 7, 5, 4), normal(2, 7, 5, 6)
  positions_BT = np.array([[0, 1, 2], [4, 5, 6]], np.int32)
  sinks_N = normal(5) if sinks else None
  wanted = np.zeros((2, 3, 5, 6), np.float32)
  for b, t, n in np.ndindex(2, 3, 5):
    seen = positions_BT[b, t] + 1
    scores = k_BSNH[b, :seen, n] @ q_BTNH[b, t, n] / 2
    weights = np.exp(scores)
    total = weights.sum() + (np.exp(sinks_N[n]) if sinks else 0)
    wanted[b, t, n] = weights @ v_BSNU[b, :seen, n] / total

  def attend():
    arrays = map(jnp.asarray, (q_BTNH, k_BSNH, v_BSNU, positions_BT))
    given = None if sinks_N is None else jnp.asarray(sinks_N)
    return np.asarray(attention.causal_attention(*arrays, sinks_N=given))

  found = attend()
  np.testing.assert_allclose(found, wanted, atol=1e-5)
  k_BSNH[0, 3:], v_BSNU[0, 3:] = 1e6, -1e6  # what no query of row 0 sees
  np.testing.assert_array_equal(attend()[0], found[0])


def test_a_sink_far_above_all_scores_leaves_finite_gradients():
  # Its exponential alone is beyond float32; beside the others' it takes all of the weight.
  arrays = [jnp.asarray(normal(1, 3, 2, 4)) for _ in range(3)]
  slots_BT, sinks_N = jnp.arange(3, dtype=jnp.int32)[None], jnp.asarray([200.0, -200.0])

  def attend(sinks_N, *arrays):
    return attention.causal_attention(*arrays, slots_BT, sinks_N=sinks_N)

  @jax.jit
  def both(*given):
    out, back = jax.vjp(attend, *given)
    return out, back(jnp.ones_like(out))

  out, gradients = both(sinks_N, *arrays)
  np.testing.assert_array_equal(out[:, :, 0], 0)
  np.testing.assert_allclose(out[0, 0, 1], arrays[2][0, 0, 1], rtol=1e-6)
  assert all(np.isfinite(x).all() for x in gradients)


def test_blocks_of_queries_give_the_same_with_their_gradients():
  slots_BT = jnp.arange(12, dtype=jnp.int32)[None]
  segments_BT = jnp.asarray([[0] * 5 + [1] * 7, [0] * 12], jnp.int32)
  arrays = [jnp.asarray(normal(2, 12, 3, 4)) for _ in range(3)]
  given = {"window": 7, "cap": 1.5}

  def attend(blocks, q, k, v):
    told = (segments_BT, segments_BT)
    return attention.causal_attention(q, k, v, slots_BT, told, blocks=blocks, **given)

  @functools.partial(jax.jit, static_argnums=0)
  def both(blocks, *arrays):
    out, back = jax.vjp(functools.partial(attend, blocks), *arrays)
    return out, *back(jnp.cos(out))

  for found, wanted in zip(both(4, *arrays), both(1, *arrays), strict=True):
    np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize(("length", "blocks"), [(64, 1), (128, 2), (192, 1), (256, 4), (384, 2)])
def test_blocks_skip_masked_scores(length, blocks):
  assert attention.blocks_of(length) == blocks
  zeros = [jnp.zeros((1, length, 1, 64))] * 3
  slots_BT = jnp.arange(length, dtype=jnp.int32)[None]

  def scores(count):
    attend = functools.partial(attention.causal_attention, blocks=count)
    steps = jax.make_jaxpr(attend)(*zeros, slots_BT).eqns
    return sum(one.outvars[0].aval.size for one in steps if one.primitive.name == "exp")

  assert scores(1) == length**2
  assert scores(blocks) / length**2 == (blocks + 1) / (2 * blocks)


@pytest.mark.parametrize(
  ("mesh", "blocks"),
  [({"mesh.tensor": 2}, 2), ({"mesh.context": 2, "model.context_attention": "gather"}, 1)],
)
def test_only_complete_rows_are_computed_in_blocks(mesh, blocks, monkeypatch):
  seen, attend = [], attention.causal_attention

  def noting(*arrays, **given):
    seen.append(given["blocks"])
    return attend(*arrays, **given)

  job = make_job("single", "lm", **{"data.sequence_length": 128, **mesh})
  monkeypatch.setattr(attention, "causal_attention", noting)
  with job.tracing():
    jax.eval_shape(job.program.sums, job.program.abstract_state().params, job.batch)
  assert set(seen) == {blocks}


@pytest.mark.parametrize("strategy", ["single", "dp4_tp2"])
def test_each_row_remembers_behind_its_own_length(strategy):
  job = make_job(strategy, "lm")  # K = 4, H = 6
  lengths, new, past = np.array([0, 3, 5, 1], np.int32), normal(4, 2, 4, 6), normal(4, 7, 4, 6)
  layer = {"keys": past, "values": past + 1, "lengths": lengths}
  with job.tracing():
    found = jax.jit(attention.update_cache)(layer, keys=new, values=new * 2)
  np.testing.assert_array_equal(found["lengths"], lengths)
  for keys, old, fresh in ((found["keys"], past, new), (found["values"], past + 1, new * 2)):
    wanted = old.copy()
    for b, length in enumerate(lengths):
      wanted[b, length : length + 2] = fresh[b]
    np.testing.assert_array_equal(keys, wanted)


def test_the_layers_of_a_cache_are_read_and_replaced_apart():
  job = make_job("single", "lm")
  cache = transformer.empty_cache(model_spec(job.config), rows=3, slots=5)
  assert cache["keys"].shape == cache["values"].shape == (2, 3, 5, 4, 6)
  assert cache["keys"].dtype == job.config.training.compute_dtype

  def replace(cache, layer):
    one = attention.cache_layer(cache, layer, ["keys", "values"])
    new = {"keys": one["keys"] + 1, "values": one["values"] + 2}
    return attention.set_cache_layer(cache, layer, new)

  with job.tracing():
    found = jax.jit(replace)(cache, jnp.int32(1))
  assert np.all(np.asarray(found["keys"][0]) == 0)
  assert np.all(np.asarray(found["keys"][1]) == 1)
  assert np.all(np.asarray(found["values"][1]) == 2)
