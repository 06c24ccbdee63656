"""The attention kernel, interpreted, beside attention that has all scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import dp8
from configs.keys import table
from configs.schema import finalize, validate
from models import fused_attention
from partitioning.constraints import activation_layout
from partitioning.parallel.attention_blocks import Blocks, Scores
from partitioning.parallel.splash_kernel import SplashBlocks
from partitioning.rules import Dim
from tests.helpers.jobs import make_job
from tests.models import numpy_decoder

B, T, N, K, H = 2, 200, 4, 2, 32  # neither rows nor heads are multiples of 128
U = 24  # the size of the heads of values


def arrays():
  random = np.random.default_rng(0)
  shapes = (N, H), (K, H), (K, U), (N, U)
  return [jnp.asarray(random.standard_normal((B, T, *shape)), jnp.float32) for shape in shapes]


def documents():
  ends_BT = jnp.arange(T, dtype=jnp.int32)[None] >= jnp.array([[50], [190]])
  segments_BT = ends_BT.astype(jnp.int32)
  return segments_BT, segments_BT


def both(function, *inputs):
  """Returns the result and the gradients of queries, keys, values and sinks."""
  *inputs, out_BTNU, sinks = inputs
  if sinks is None:
    result, transpose = jax.vjp(lambda *x: function(*x, None), *inputs)
  else:
    result, transpose = jax.vjp(function, *inputs, sinks)
  return result, *transpose(out_BTNU)


@pytest.mark.parametrize(
  ("mesh", "given", "segments", "sinks"),
  [
    ({}, {"windows": (70,)}, False, True),
    (
      {"mesh.data": 2, "mesh.tensor": 2},
      {"cap": 5.0, "windows": (None, 70), "kind": 0},
      True,
      False,
    ),
  ],
)
def test_results_and_gradients_are_those_of_all_scores(mesh, given, segments, sinks):
  inputs = arrays()
  told = documents() if segments else None
  job = make_job(
    "single", "lm", **{"model.heads": N, "model.kv_heads": K, "model.head_size": H}, **mesh
  )
  slots_BT = jnp.arange(T, dtype=jnp.int32)[None]
  sinks_N = jnp.arange(N, dtype=jnp.float32) if sinks else None
  cap, windows = given.get("cap", 0.0), given["windows"]
  more = {"kind": jnp.int32(given["kind"]) if "kind" in given else None, "value_head": "U"}

  def plain(q, k, v, sinks):
    how = Blocks(Scores(H**-0.5, q.dtype, cap), T, T, complete=True, windows=windows)
    return fused_attention.attention(how, q, k, v, slots_BT, told, sinks_N=sinks, **more)

  def kernel(q, k, v, sinks):
    how = SplashBlocks(H**-0.5, cap, windows, 128, complete=True)
    return fused_attention.attention(how, q, k, v, None, told, sinks_N=sinks, **more)

  tables, legend = job.config.partitioning, {**job.legend, "U": Dim("head", U)}
  with (
    jax.set_mesh(job.mesh),
    activation_layout(legend, tables.activations, parameters=tables.parameters),
    jax.default_matmul_precision("highest"),
  ):
    # Arguments, not constants: XLA would compute with those while it compiles.
    found, wanted = (
      jax.jit(both, static_argnums=0)(function, *inputs, sinks_N) for function in (kernel, plain)
    )
  for ours, theirs in zip(found, wanted, strict=True):
    far = np.linalg.norm(np.asarray(ours) - theirs) / np.linalg.norm(theirs)
    assert far < 2e-5, far


def test_queries_of_other_slots_see_their_window():
  window, random = 70, np.random.default_rng(1)
  slots_T = np.r_[130:194, 0:64].astype(np.int32)
  shapes = (1, 128, 2, H), (1, 256, 2, H), (1, 256, 2, H)
  q, k, v = (random.standard_normal(shape).astype(np.float32) for shape in shapes)
  s_S, t_T1 = np.arange(256), slots_T[:, None]
  seen_TS = (s_S <= t_T1) & (s_S > t_T1 - window)
  scores = np.where(seen_TS, np.einsum("BTNH,BSNH->BNTS", q, k) * H**-0.5, -np.inf)
  wanted = np.einsum("BNTS,BSNH->BTNH", numpy_decoder.softmax(scores), v)
  arrays = *map(jnp.asarray, (q, k, v)), jnp.asarray(slots_T)

  def attend(q, k, v, slots_T):
    how = SplashBlocks(H**-0.5, 0.0, (window,), 128)
    return fused_attention.attention(how, q, k, v, slots_T[None])

  job = make_job("single", "lm", **{"model.head_size": H})
  with job.tracing(), jax.default_matmul_precision("highest"):
    found = jax.jit(attend)(*arrays)
  assert np.linalg.norm(found - wanted) < 2e-5 * np.linalg.norm(wanted)


@pytest.mark.parametrize(
  ("platform", "changes", "kernel"),
  [
    ("tpu", {}, "splash"),
    ("cpu", {}, "blockwise"),
    ("gpu", {}, "xla"),
    ("gpu", {"data.sequence_length": 1024}, "blockwise"),
    ("tpu", {"training.attention_kernel": "xla"}, "xla"),
    ("tpu", {"model.window": 64, "model.global_every": 2}, "splash"),
    ("tpu", {"data.sequence_length": 255}, "xla"),
    ("tpu", {"mesh.context": 2}, "xla"),  # with so few scores it is faster
    ("tpu", {"mesh.context": 2, "data.sequence_length": 2**16 + 4}, "blockwise"),
    ("tpu", {"mesh.context": 2, "data.sequence_length": 512}, "splash"),
    ("tpu", {"mesh.context": 2, "model.context_attention": "gather"}, "splash"),
  ],
)
def test_long_rows_take_a_kernel_without_all_scores(platform, changes, kernel):
  config = dp8.get_config("lm")
  config.update_from_flattened_dict({"data.sequence_length": 300, **changes})
  assert finalize.finalize(config, platform).training.attention_kernel == kernel


def test_it_is_refused_where_it_cannot_be():
  config = dp8.get_config("lm")
  config.training.attention_kernel = "splash"
  config.mesh.context, config.data.sequence_length = 2, 300
  config = finalize.finalize(config, "cpu")
  said = "attention_kernel=splash: data.sequence_length=300 is not a multiple of 512, two pieces"
  with pytest.raises(ValueError, match=said):
    validate.check(config, {**table.section("mesh"), "data": 8})
