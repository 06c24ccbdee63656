"""Mixers: values and gradients beside NumPy, packed documents, caches, memory, and meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import recurrence
from partitioning.rules import named_leaves
from tests.helpers.jobs import first_state, host_batch, make_job
from tests.models import numpy_decoder
from tests.models.test_transformer import assert_pieces_give_what_the_whole_gives
from tests.parity import budgets
from tests.parity.comparison import assert_equal, train
from tests.parity.mixers import (
  BESIDE,
  CONVOLUTION,
  DELTA,
  EACH,
  KIMI,
  LIGHTNING,
  MAMBA,
  MESHES,
  NEMOTRON,
  OFTEN,
  OLMO,
  QWEN,
)
from tests.parity.variants import MUON as LARGE_STEPS

FLOAT64 = {
  "training.parameter_dtype": "float64",
  "training.compute_dtype": "float64",
  "training.matmul_precision": "highest",
}
DENSE = "model.mlp_only_layers"
MUON = {**LARGE_STEPS, "optimizer.learning_rate": 0.001}  # as those of `EACH`

# ------------------------------ the recurrence ------------------------------

SIZES = {"B": 2, "N": 4, "H": 5, "U": 3}
GROUPS = 2  # of queries and keys


def drawn(length, *, rows, seed=0):
  """Returns inputs of a recurrence: decays strong, weak, none, and to zero."""
  random = np.random.default_rng(seed)
  batch, heads, size, values = SIZES.values()
  q, k = random.standard_normal((2, batch, length, GROUPS, size))
  k /= np.linalg.norm(k, axis=-1, keepdims=True)
  v = random.standard_normal((batch, length, heads, values))
  strength = random.uniform(0, 2, (batch, length, heads))
  strength[random.random(strength.shape) < 0.1] = 0
  log_decay = -np.exp(random.uniform(-9, 5, (batch, length, heads, *([size] if rows else []))))
  log_decay[random.random(log_decay.shape) < 0.1] = 0
  log_decay[random.random(log_decay.shape) < 0.05] = -np.inf
  return q, k, v, log_decay, strength, random.standard_normal((batch, heads, size, values))


def token_by_token(arrays, delta):
  """Returns what NumPy gives for each row and head."""
  *of_tokens, start = arrays
  batch, length, heads = of_tokens[4].shape
  out = np.zeros((batch, length, heads, start.shape[-1]), np.result_type(*arrays))
  end = np.zeros(start.shape, out.dtype)
  for b, n in np.ndindex(batch, heads):
    given = (x[b, :, n * x.shape[2] // heads] for x in of_tokens)
    out[b, :, n], end[b, n] = numpy_decoder.recurrence(*given, start[b, n], delta=delta)
  return out, end


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize(("length", "rows"), [(70, False), (37, True)])
def test_outputs_and_gradients_are_those_of_the_recurrence_token_by_token(length, rows, delta):
  arrays = drawn(length, rows=rows)
  function = functools.partial(recurrence.recurrence, delta=delta)
  wanted = token_by_token(arrays, delta)
  random = np.random.default_rng(1)
  weights = [random.standard_normal(x.shape) for x in wanted]
  with jax.enable_x64(True):
    found, transpose = jax.jit(lambda *x: jax.vjp(function, *x))(*arrays)
    gradients = jax.device_get(jax.jit(transpose)(tuple(map(jnp.asarray, weights))))
  for one, two in zip(found, wanted, strict=True):
    np.testing.assert_allclose(one, two, rtol=0, atol=1e-13 * np.abs(two).max())
  step = 1e-30  # the imaginary part of a function of x + i step d is its derivative, exactly
  for number, gradient in enumerate(gradients):
    direction = random.standard_normal(gradient.shape)
    direction[~np.isfinite(arrays[number])] = 0
    moved = [x + 1j * step * direction if n == number else x for n, x in enumerate(arrays)]
    with np.errstate(invalid="ignore"):
      moved[number] = np.where(np.isfinite(arrays[number]), moved[number], arrays[number])
      out = token_by_token(moved, delta)
    slope = sum(np.sum(x.imag / step * w) for x, w in zip(out, weights, strict=True))
    assert float(np.sum(gradient * direction)) == pytest.approx(slope, rel=1e-11, abs=1e-11)


@pytest.mark.parametrize("delta", [True, False])
def test_pieces_in_their_order_give_the_whole(delta):
  with jax.enable_x64(True):
    q, k, v, log_decay, strength, start = map(jnp.asarray, drawn(60, rows=False))
    pieces = [slice(n, n + 20) for n in (0, 20, 40)]

    def both():
      given = [[x[:, piece] for x in (q, k, v, log_decay, strength)] for piece in pieces]
      pairs = [recurrence.summary(*one[1:], delta=delta) for one in given]
      starts = recurrence.first_states(*map(jnp.stack, zip(*pairs, strict=True)), delta=delta)
      found = [
        recurrence.recurrence(*one, first, delta=delta)[0]
        for one, first in zip(given, starts, strict=True)
      ]
      whole = recurrence.recurrence(q, k, v, log_decay, strength, 0 * start, delta=delta)
      return jnp.concatenate(found, axis=1), whole[0]

    np.testing.assert_allclose(*jax.jit(both)(), rtol=0, atol=1e-13)


def test_float32_neither_overflows_nor_loses_weak_decays_behind_strong_ones():
  """Equal keys: powers of the triangular matrix would reach 1e18; decays of exp(-1,920) in all."""
  random = np.random.default_rng(0)
  length, size = 256, 16
  k = np.broadcast_to(np.eye(size)[0], (1, length, 1, size)).copy()
  q, v = random.standard_normal((2, 1, length, 1, size))
  log_decay = np.full((1, length, 1), -1e-3)
  log_decay[:, ::2] = -30.0
  log_decay[:, 128:] = -1e-3
  arrays = q, k, v, log_decay, np.ones((1, length, 1)), np.zeros((1, 1, size, size))
  wanted, _ = token_by_token(arrays, True)
  function = jax.jit(functools.partial(recurrence.recurrence, delta=True))
  found, _ = function(*(np.float32(x) for x in arrays))
  assert np.linalg.norm(found - wanted) < 1e-6 * np.linalg.norm(wanted)


def test_the_gradient_takes_linear_memory_and_does_not_call_lapack():
  """Beside its inputs: fewer than six arrays of keys, at 2,048 tokens and at 16,384.

  LAPACK on a batch waits for threads of the pool that it runs in: two layers at a time would wait
  for ever on two cores.
  """
  heads, size, found = 4, 64, []
  for length in (2048, 16_384):
    shape = (1, length, heads, size)
    arrays = [jax.ShapeDtypeStruct(shape[:n], jnp.float32) for n in (4, 4, 4, 3, 3)]
    arrays.append(jax.ShapeDtypeStruct((1, heads, size, size), jnp.float32))

    def total(*given):
      return jnp.sum(recurrence.recurrence(*given, delta=True)[0])

    compiled = jax.jit(jax.grad(total, argnums=range(6))).lower(*arrays).compile()
    assert "lapack" not in compiled.as_text()
    found.append(compiled.memory_analysis().temp_size_in_bytes / (4 * length * heads * size))
  assert found[1] <= found[0] < 6


# ------------------------------ a hybrid decoder ------------------------------


HYBRIDS = {
  "olmo": OLMO,
  "kimi": KIMI,
  "mamba": MAMBA,
  "lightning": LIGHTNING,
  "beside": BESIDE,
  "convolution": CONVOLUTION,
}


@pytest.mark.parametrize("keys", HYBRIDS.values(), ids=HYBRIDS)
def test_the_loss_is_numpys_and_documents_have_no_influence_on_others(keys):
  with jax.enable_x64(True):
    more = {"model.separate_documents": True, "data.sequence_length": 24}
    job = make_job("single", "lm", **{**keys, **FLOAT64, **more})
    params, batch = first_state(job).params, host_batch(job)
    random = np.random.default_rng(2)  # of biases and scales too
    params = jax.tree.map(lambda x: x + 0.2 * random.standard_normal(x.shape), params)

    def read(params, batch):
      model = nnx.merge(job.program.graphdef, params)
      return model.loss_sums(batch), model(batch["tokens"], segments_BT=batch["segments"])

    function = job.compile(read, job.state.params, job.batch).function
    sums, logits = jax.device_get(function(params, batch))
    names = ("tokens", "targets", "weights", "segments")
    arrays = {name: np.asarray(x) for name, x in named_leaves(params).items()}
    wanted = numpy_decoder.loss(job.config, arrays, *(batch[name] for name in names))
    assert float(sums["loss"]) / float(batch["weights"].sum()) == pytest.approx(wanted, rel=1e-12)

    first = batch["segments"] == batch["segments"][:, :1]
    assert 0 < first.sum() < first.size
    other = {**batch, "tokens": np.where(first, (batch["tokens"] + 1) % 61, batch["tokens"])}
    _, changed = jax.device_get(function(params, other))
    assert np.array_equal(changed[~first], logits[~first])  # to the bit
    assert np.all(np.any(changed[first] != logits[first], axis=-1))


@pytest.mark.parametrize(
  ("mesh", "keys"),
  [
    ({}, QWEN),
    ({}, KIMI),
    ({}, BESIDE),
    pytest.param({"mesh.data": 2, "mesh.tensor": 4}, MAMBA, marks=pytest.mark.long),
    pytest.param({"mesh.fsdp": 4, "mesh.tensor": 2}, CONVOLUTION, marks=pytest.mark.long),
    pytest.param({"mesh.data": 4, "mesh.tensor": 2}, LIGHTNING, marks=pytest.mark.long),
  ],
)
def test_pieces_from_a_cache_give_what_the_whole_gives(mesh, keys):
  """Rows of different lengths: padding changes neither states nor convolutions."""
  with jax.enable_x64(True):
    keys = {**keys, "model.separate_documents": False, **FLOAT64, **mesh}
    assert_pieces_give_what_the_whole_gives(make_job("single", "lm", **keys), 1e-12)


@functools.cache
def on_one_device(mixer, length):
  return train("lm", "float64", {**EACH[mixer], "data.sequence_length": length})


@pytest.mark.parametrize(
  ("mesh", "mixer"),
  [
    pytest.param(x, y, marks=() if (x, y) in OFTEN else pytest.mark.long)
    for x in MESHES
    for y in EACH
    if (x, y) != ("tensor4, accumulated", "convolution")  # adapters' dropout has no rings
    and (x == "expert2") <= (y in ("qwen", "nemotron"))
  ],
)
def test_gradients_on_a_mesh_are_those_of_one_device(mesh, mixer):
  ours = train("lm", "float64", {**EACH[mixer], **MESHES[mesh]})
  length = MESHES[mesh].get("data.sequence_length", 24)
  assert_equal(ours, on_one_device(mixer, length), "float64")


@pytest.mark.parametrize(
  ("keys", "way"),
  [
    (DELTA, "ring"),
    pytest.param(KIMI, "gather", marks=pytest.mark.long),
    pytest.param(DELTA, "gather", marks=pytest.mark.long),
    pytest.param(MAMBA, "gather", marks=pytest.mark.long),
    pytest.param(LIGHTNING, "ring", marks=pytest.mark.long),
    pytest.param(CONVOLUTION, "ring", marks=pytest.mark.long),
  ],
)
def test_bytes_of_the_exchange_of_states_are_those_of_the_formula(keys, way):
  """All that is gathered and scattered over context."""
  more = {"mesh.data": 2, "mesh.context": 4, "model.context_attention": way}
  more |= {"data.sequence_length": 24, "model.separate_documents": False}
  job = make_job("single", "lm", **{**keys, **more})
  sent, wanted = budgets.compile_step(job).sent(), budgets.budget(job)
  for kind in ("all-gather", "reduce-scatter"):
    assert sent[kind, ("context",)] == wanted[kind, ("context",)], kind


@pytest.mark.long
def test_muon_on_a_mesh_gives_what_one_device_gives():
  # Its updates are as large however small a gradient is: after larger ones the norm of the next
  # gradient has many times the rounding errors of the parameters.
  keys = {**DELTA, **MUON, "optimizer.learning_rate": 0.0005}
  one = train("lm", "float64", {**keys, "data.sequence_length": 24})
  assert_equal(train("lm", "float64", {**keys, **MESHES["all, ring"]}), one, "float64")


@pytest.mark.parametrize(
  ("keys", "message"),
  [
    ({"model.mixer": "gated_delta"}, "no layer is of the type mixer"),
    ({"model.layer_types": ("mixer", "full")}, "model.mixer is 'none'"),
    (
      {**CONVOLUTION, "model.mixer_heads": 4},
      "model.mixer_heads=4 is about model.mixer=gated_delta",
    ),
    (
      {**NEMOTRON, **{DENSE: (1,)}},
      "of layers of the type mlp all have experts, or none, and 1 of 2",
    ),
    ({**DELTA, "model.mixer_key_heads": 5}, "is not a multiple of model.mixer_key_heads=5"),
    ({**MAMBA, "model.mixer_step_limits": (1.0, 0.1)}, "two numbers, the smaller first"),
    (
      {**QWEN, "model.layers": 2, "model.layer_types": ("mixer", "full"), **{DENSE: (1,)}},
      "none of the layers with attention has experts",
    ),
    (
      {**BESIDE, "model.layer_types": ("full", "full_with_mixer")},
      "all layers are of the type",
    ),
    ({**BESIDE, "model.multipliers": (("mlp/dwon", 2.0),)}, "mlp/dwon: nothing has this name"),
    ({**DELTA, "model.multipliers": (("mlp/down", 0.0),)}, "a number above 0 are needed"),
    ({**DELTA, "mesh.stage": 2}, "model.layers=3 is not divisible by mesh.stage=2"),
    (
      {**DELTA, "model.layers": 4, "model.layer_types": (*["mixer"] * 3, "full"), "mesh.stage": 2},
      "layer 3 is one of layers and layer 1 of mixer_layers, and the stages .* set mesh.stage to 1",
    ),
    ({**DELTA, "model.convolution_size": 9, "mesh.context": 4}, "needs 8 of them"),
  ],
)
def test_what_does_not_go_together_is_refused(keys, message):
  with pytest.raises(ValueError, match=message):
    make_job("single", "lm", **keys)
