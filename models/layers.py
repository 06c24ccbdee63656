"""The decoder's layers: linear projections, norms, embeddings, dropout, the MLP.

A layer takes the letters of its parameters from the dims table, by its own name.

Names carry their dims: `q_BTNH` is batch, query length, heads, head size.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

# jax.random draws complete arrays only; which counts it hashes: jax#13040.
from jax.extend.random import threefry2x32_p
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from models.spec import LORA_A, LORA_B, RESIDUAL, DecoderSpec, LayersSpec, ModelSpec
from partitioning.constraints import batch_part, constrain, on_cpus
from partitioning.dtypes import MAGNITUDES, known_magnitudes, scaled, wide_dtype
from partitioning.parallel.matmuls import (
  Dropped,
  EightBit,
  LowRank,
  column_parallel,
  feedforward,
  in_one_ring,
  row_parallel,
)
from partitioning.parallel.sharded_function import GATHERED
from partitioning.parallel.vocabulary import vocab_parallel_embedding
from partitioning.rules import HOST
from runtime.extensions import Table
from runtime.rematerialization import (
  ATTENTION_OUTPUT,
  LAYER_INPUT,
  NAMES,
  OFFLOAD,
  RECOMPUTE,
  SAVE,
  parse,
)

# ------------------------------ rematerialization ------------------------------
# By name: the policies of `training.rematerialization`; `runtime.rematerialization` reads the key.

# Primitives whose results cost less to compute again than to write and read: elementwise ones and
# those that move or repeat elements. Compilers fuse them into what reads them.
_ELEMENTWISE_NAMES = """
  abs add add_any and bitcast_convert_type broadcast_in_dim clamp concatenate
  convert_element_type copy cos div eq erf exp exp2 expand_dims expm1 ge gt integer_pow iota
  is_finite le log log1p logistic lt max min mul ne neg not or pow reshape rsqrt select_n
  sharding_constraint sign sin slice split sqrt square squeeze stop_gradient sub tanh
  transpose xor
"""
_ELEMENTWISE = frozenset(_ELEMENTWISE_NAMES.split())


def _elementwise(primitive: Any, *_: Any, **parameters: Any) -> bool:
  """Is the policy that recomputes elementwise operations alone."""
  if primitive.name == "name":
    return parameters["name"] == ATTENTION_OUTPUT
  return primitive.name not in _ELEMENTWISE


# Preset -> its policy without exceptions; None: no rematerialization.
_POLICIES = {
  "none": None,
  "elementwise": _elementwise,
  "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  "full": jax.checkpoint_policies.nothing_saveable,
}


def named(x: jax.Array, name: str) -> jax.Array:
  """Returns an activation under its name, one of `NAMES`.

  Outside of a matmul's own `jax.checkpoint`: the policy of the layer's does not see inside.
  """
  assert name in NAMES, name
  return checkpoint_name(x, name)


def kept(text: str, names: Iterable[str]) -> bool:
  """Returns whether any of these activations is saved or offloaded for the backward pass.

  Args:
    text: of `training.rematerialization`.
    names: of activations.
  """
  choices = parse(text)
  return any(choices.by_name[name] != RECOMPUTE for name in names)


def rematerialized(layer: Callable, text: str, *, reshard: bool = True) -> Callable:
  """Returns a layer's function, whose backward pass finds of its activations what `text` says.

  Args:
    layer: the body of a scan.
    text: of `training.rematerialization`.
    reshard: of `partitioning.reshard_after_forward`; False saves gathered kernels as well.
  """
  choices = parse(text)
  if choices.given or not choices.preset:
    # The layer's input, if it is saved, is saved as the function's argument.
    saved = [name for name in choices.chosen(SAVE) if name != LAYER_INPUT]
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
      names_which_can_be_saved=saved if reshard else [*saved, GATHERED],
      names_which_can_be_offloaded=choices.chosen(OFFLOAD),
      offload_src="device",
      offload_dst=HOST,
    )
  elif (policy := _POLICIES[choices.preset]) is None:
    return layer
  elif not reshard:
    gathered = jax.checkpoint_policies.save_only_these_names(GATHERED)
    policy = jax.checkpoint_policies.save_from_both_policies(policy, gathered)
  return jax.checkpoint(layer, prevent_cse=False, policy=policy)


# ------------------------------ low-rank adapters ------------------------------
# LoRA: y = x W + s (x A) B, with W frozen and A and B trained. Sources: arXiv:2106.09685;
# arXiv:2312.03732 for s = alpha / sqrt(r) instead of alpha / r. `partitioning.parallel.matmuls`
# computes it beside the kernel's own matmul, so that neither A B nor the gradient of W is formed.


def draw_adapter(key: Key[Array, ""], shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
  """Draws A as PEFT does: uniformly within fan_in ** -0.5, which is Kaiming's with a = sqrt(5).

  Args:
    key: draws it.
    shape: of A, the rank last.
    dtype: of A.
  """
  bound = jnp.asarray(math.prod(shape[:-1]) ** -0.5, dtype)
  return jax.random.uniform(key, shape, dtype, -1, 1) * bound


# ------------------------------ dropout of some rows ------------------------------
# Where each device draws for its own rows, it must not draw those of other rows again. JAX's
# partitionable threefry generator hashes the index of each element, so that any part of an array
# can be drawn alone; `jax.random` has no argument for it.

_MOST = 2**32  # elements whose index is one word


def bernoulli_rows(
  words: UInt32[Array, "2"], p: float, shape: tuple[int, ...], first: Int[Array, ""]
) -> Bool[Array, "..."]:
  """Returns rows `first` to `first + shape[0] - 1` of `jax.random.bernoulli(key, p, ...)`.

  Args:
    words: of the key, `jax.random.key_data(key)`.
    p: the probability of True.
    shape: of the result; the complete array has more rows, and the same other dims.
    first: int32, the number of the first row; the last row's elements are below 2**32.
  """
  assert math.prod(shape) < _MOST, shape
  row = math.prod(shape[1:])
  index = jax.lax.broadcasted_iota(jnp.uint32, (shape[0], row), 0) + first.astype(jnp.uint32)
  index = index * np.uint32(row) + jax.lax.broadcasted_iota(jnp.uint32, (shape[0], row), 1)
  index = index.reshape(shape)
  high, low = threefry2x32_p.bind(*words, jnp.zeros_like(index), index)
  return _uniform(high, low) < p


def _uniform(high: Array, low: Array) -> Array:
  """Returns numbers of [0, 1): random bits as the mantissa of numbers of [1, 2), minus 1."""
  dtype = jnp.zeros(()).dtype  # that of `jax.random.bernoulli` with a Python float
  if dtype == jnp.float64:
    bits = (high.astype(jnp.uint64) << np.uint64(32)) | low.astype(jnp.uint64)
  else:
    bits = high ^ low
  info = jnp.finfo(dtype)
  unsigned = bits.dtype.type
  one = unsigned(np.ones((), dtype).view(bits.dtype))
  bits = (bits >> unsigned(info.bits - info.nmant)) | one
  return jax.lax.bitcast_convert_type(bits, dtype) - jnp.ones((), dtype)


# ------------------------------ norms and activation functions ------------------------------


def _gelu(x: Array) -> Array:
  """Returns GELU by tanh. Source: arXiv:1606.08415."""
  return jax.nn.gelu(x, approximate=True)


def _gelu_again(x: Array) -> Array:
  """Returns GELU by tanh, whose formula by the logistic function this is."""
  return x * jax.nn.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3))


def _gelu_erf(x: Array) -> Array:
  """Returns x Phi(x) with Phi by erf. Source: arXiv:1606.08415.

  `jax.nn.gelu` takes erfc, whose tail has a better relative error; CPUs compute it as 130
  operations, and as often as its result is used.
  """
  return 0.5 * x * (1.0 + jax.lax.erf(x * math.sqrt(0.5)))


def _gelu_erf_again(x: Array) -> Array:
  """Returns x Phi(x) with Phi by erfc."""
  return 0.5 * x * jax.lax.erfc(x * -math.sqrt(0.5))


def _one_saved(
  function: Callable[[Array], Array], again: Callable[[Array], Array]
) -> Callable[[Array], Array]:
  """Returns an elementwise function whose backward pass needs one array in place of several.

  On CPUs that is its derivative, which the forward pass computes; elsewhere its input, from which
  the derivative is computed again while memory is waited for. Both are computed in float32 or
  wider.

  Args:
    function: what is returned, for float32 or wider.
    again: the same function by another formula, whose derivative is taken in place of function's
      where the input is saved: of one formula XLA would merge both computations and save what
      they share, the tanh, too.
  """

  def rule(saved: Callable[[Array], Array]) -> Callable[[Array], Array]:
    rounded = jax.custom_jvp(lambda x: function(x.astype(wide_dtype(x.dtype))).astype(x.dtype))

    @rounded.defjvp
    def _(primals, tangents):
      [x], [tangent] = primals, tangents
      wide = x.astype(wide_dtype(x.dtype))
      y, derivative = jax.jvp(saved, (wide,), (jnp.ones_like(wide),))
      y = y if saved is function else function(wide)
      return y.astype(x.dtype), derivative.astype(x.dtype) * tangent

    return rounded

  on_cpu, elsewhere = rule(function), jax.checkpoint(rule(again), prevent_cse=False)
  return lambda x: on_cpu(x) if on_cpus() else elsewhere(x)


_ACTIVATIONS = {
  "silu": jax.nn.silu,
  "gelu": _one_saved(_gelu, _gelu_again),
  "gelu_erf": _one_saved(_gelu_erf, _gelu_erf_again),
  # Source: https://github.com/hendrycks/GELUs
  "gelu_sigmoid": lambda x: x * jax.nn.sigmoid(scaled(x, 1.702)),
  "relu": jax.nn.relu,
  "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),  # arXiv:2109.08668
}
# By `model.activation`: elementwise functions.
ACTIVATIONS: Table = Table("activation", _ACTIVATIONS)


def clamped_gate(
  gate: Float[Array, "*X F"],
  up: Float[Array, "*X F"],
  activation: str,
  *,
  limit: float = 0.0,
  offset: float = 0.0,
) -> Float[Array, "*X F"]:
  """Returns f(gate) * (up + offset), the hidden layer of a gated MLP, its inputs clamped.

  gpt-oss has a limit of 7, an offset of 1 and `gelu_sigmoid`. Sources: arXiv:2002.05202;
  arXiv:2508.10925, section 2.2.

  Args:
    gate: clamped to `limit` from above alone.
    up: clamped to -limit and limit.
    activation: f, in ACTIVATIONS.
    limit: 0 for none.
    offset: added to up after clamping.
  """
  if limit:
    most = jnp.asarray(limit, gate.dtype)
    gate, up = jnp.minimum(gate, most), jnp.clip(up, -most, most)
  up = up + jnp.asarray(offset, up.dtype) if offset else up
  return ACTIVATIONS[activation](gate) * up


def rms_norm(x: Float[Array, "*X D"], scale_D: Float[Array, "*D"], *, epsilon: float) -> Array:
  """RMSNorm: x over its root mean square over D, in float32 or wider. Source: arXiv:1910.07467.

  D may be several dims, the last ones of x: those of the scale.
  """
  wide = wide_dtype(x.dtype)
  x_wide = x.astype(wide)
  axes = tuple(range(-scale_D.ndim, 0))
  inverse = jax.lax.rsqrt(jnp.mean(x_wide * x_wide, axis=axes, keepdims=True) + epsilon)
  return (x_wide * inverse * _broadcast(scale_D.astype(wide), x)).astype(x.dtype)


def layer_norm(
  x: Float[Array, "*X D"],
  scale_D: Float[Array, " D"],
  bias_D: Float[Array, " D"],
  *,
  epsilon: float,
) -> Float[Array, "*X D"]:
  """LayerNorm: x to mean 0 and variance 1 over D, in float32 or wider. Source: arXiv:1607.06450."""
  return (_layer_norm if on_cpus() else _layer_norm_again)(x, scale_D, bias_D, epsilon)


def _layer_norm(x: Array, scale_D: Array, bias_D: Array, epsilon: float) -> Array:
  """Returns the LayerNorm of x."""
  centred, inverse = _moments(x, epsilon)[1:]
  scale, bias = (_broadcast(vector.astype(centred.dtype), x) for vector in (scale_D, bias_D))
  return (centred * inverse * scale + bias).astype(x.dtype)


def _moments(x: Array, epsilon: float) -> tuple[Array, Array, Array]:
  """Returns the mean of each row, x without it, and 1 over the standard deviation."""
  x_wide = x.astype(wide_dtype(x.dtype))
  mean = jnp.mean(x_wide, axis=-1, keepdims=True)
  centred = x_wide - mean
  inverse = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + epsilon)
  return mean, centred, inverse


# Off CPUs the backward pass has a mean and a deviation for each row before it needs them. XLA for
# GPUs otherwise computes them in one kernel with what the scale's gradient sums over the rows,
# which it writes as float32 and reads again.
_layer_norm_again = jax.custom_vjp(_layer_norm, nondiff_argnums=(3,))


def _layer_norm_forward(
  x: Array, scale_D: Array, bias_D: Array, epsilon: float
) -> tuple[Array, tuple[Array, Array, Array]]:
  """Returns the LayerNorm, and what its backward pass needs."""
  return _layer_norm(x, scale_D, bias_D, epsilon), (x, scale_D, bias_D)


def _layer_norm_backward(
  epsilon: float, saved: tuple[Array, Array, Array], gradient: Array
) -> tuple[Array, Array, Array]:
  """Returns the gradients of x, scale and bias."""
  x, scale_D, bias_D = saved
  mean, _, inverse = _moments(x, epsilon)
  mean, inverse = jax.lax.optimization_barrier((mean, inverse))
  normed = (x.astype(mean.dtype) - mean) * inverse
  gradient = gradient.astype(mean.dtype)
  scaled_gradient = gradient * _broadcast(scale_D.astype(mean.dtype), x)
  along = [jnp.mean(scaled_gradient * of, axis=-1, keepdims=True) for of in (1.0, normed)]
  rows = tuple(range(x.ndim - 1))
  return (
    (inverse * (scaled_gradient - along[0] - normed * along[1])).astype(x.dtype),
    jnp.sum(gradient * normed, axis=rows).astype(scale_D.dtype),
    jnp.sum(gradient, axis=rows).astype(bias_D.dtype),
  )


_layer_norm_again.defvjp(_layer_norm_forward, _layer_norm_backward)


def _broadcast(vector: Array, x: Array) -> Array:
  """Returns a vector over the last dims of x with dims of 1 before them."""
  return vector.reshape((1,) * (x.ndim - vector.ndim) + vector.shape)


def dropout(
  x_BRD: Array, rate: float, key: Key[Array, ""] | None, slots_R: Int[Array, " R"]
) -> Array:
  """Dropout: zeroes a share `rate` of x and scales up the rest; without a key returns x unchanged.

  Args:
    x_BRD: activations.
    rate: at least 0, below 1.
    key: draws what is zeroed.
    slots_R: the tokens' slots in the text. The mask of a token depends on its slot and not on its
      place in the array, so every order of the tokens drops the same.
  """
  if key is None or rate == 0.0:
    return x_BRD
  keep_BRD = constrain(_kept(key, rate, x_BRD.shape, slots_R), "BRD")
  kept_BRD = (x_BRD.astype(wide_dtype(x_BRD.dtype)) / (1.0 - rate)).astype(x_BRD.dtype)
  return jnp.where(keep_BRD, kept_BRD, jnp.zeros_like(x_BRD))


def adapter_dropout(
  rate: float,
  key: Key[Array, ""] | None,
  letters: str,
  shape: tuple[int, ...],
  slots_T: Int[Array, " T"],
) -> Dropped | None:
  """Returns which inputs adapters do not see, as in `dropout`; None without a key or a rate.

  Args:
    rate: at least 0, below 1.
    key: draws them.
    letters: of the inputs inside a block.
    shape: of the inputs: batch, sequence, and the dims that the layer contracts.
    slots_T: the tokens' slots in the text.
  """
  if key is None or rate == 0.0:
    return None
  return Dropped(constrain(_kept(key, rate, shape, slots_T), letters), letters, rate)


def _kept(
  key: Key[Array, ""], rate: float, shape: tuple[int, ...], slots_R: Int[Array, " R"]
) -> Array:
  """Draws which activations (batch, sequence, ...) are kept, for each slot on its own."""
  batch, _, *rest = shape
  keys_R = jax.vmap(jax.random.fold_in, (None, 0))(key, slots_R)
  if (part := batch_part()) is None:
    keep = jax.vmap(lambda one: jax.random.bernoulli(one, 1.0 - rate, (batch, *rest)))(keys_R)
  else:
    # Replicated: otherwise XLA would shard the slots as the mask, and with them the rope tables.
    words_R2 = jax.lax.with_sharding_constraint(jax.random.key_data(keys_R), PartitionSpec())
    first = part.index() * batch
    keep = jax.vmap(lambda one: bernoulli_rows(one, 1.0 - rate, (batch, *rest), first))(words_R2)
  return jnp.swapaxes(keep, 0, 1)


class AmaxHistory(nnx.Variable):
  """The largest magnitudes in a kernel's matmuls, [MAGNITUDES, steps], latest first."""


HISTORY_STEPS = 16  # over which delayed scaling takes the largest


class Linear(nnx.Module):
  """A kernel of any rank, drawn with standard deviation `scale * fan_in ** -0.5`, maybe a bias.

  With `rank` it may also have a low-rank adapter, see `models.layers`.
  `partitioning.parallel.matmuls` multiplies by it, according to how its dims are sharded.

  Attributes:
    letters: of the kernel, without the stack's L.
    adapter_letters: of the adapter's A and B, likewise; () if it has none.
  """

  def __init__(self, name: str, spec: ModelSpec, *, scale: float = 1.0, rngs: nnx.Rngs):
    """Draws the kernel; a bias, where the dims table has one for this name, starts at 0.

    Args:
      name: of the layer among the parameters, such as `layers/mlp/up`.
      spec: of the model.
      scale: of the standard deviation.
      rngs: draws the kernel.
    """
    self.letters = spec.letters_of(f"{name}/kernel")
    self.bias_letters = spec.optional_letters(f"{name}/bias")
    dtype = spec.parameter_dtype
    deviation = jnp.asarray(scale * spec.deviation(self.letters), dtype)
    shape, key = spec.sizes(self.letters), rngs.params()
    kernel = jax.random.normal(key, shape, dtype) * deviation
    self.format = spec.format_of(f"{name}/kernel")
    for part, x in (self.format.encoded(kernel) if self.format else {"kernel": kernel}).items():
      setattr(self, part, nnx.Param(x))
    if self.bias_letters:
      self.bias = nnx.Param(jnp.zeros(spec.sizes(self.bias_letters), dtype))
    self.multiplier = spec.multiplier(name)
    self.in_8_bits = spec.in_8_bits(f"{name}/kernel")
    self.matmul_dtype = spec.matmul_dtype
    self.delayed = self.in_8_bits and spec.matmul_scaling == "delayed"
    if self.delayed:
      history = jnp.zeros((MAGNITUDES, HISTORY_STEPS), jnp.float32)
      self.amax_history = AmaxHistory(history)
    self.adapter_letters: tuple[str, ...] = ()
    if spec.adapts(name):
      self.adapter_letters = tuple(spec.letters_of(f"{name}/{x}") for x in (LORA_A, LORA_B))
      self.adapter_scale = spec.lora.scale
      shapes = [spec.sizes(letters) for letters in self.adapter_letters]
      # With a key of its own, so that the other parameters are drawn as without adapters.
      self.lora_a = nnx.Param(draw_adapter(jax.random.fold_in(key, 1), shapes[0], dtype))
      self.lora_b = nnx.Param(jnp.zeros(shapes[1], dtype))

  def effective_kernel(self) -> Any:
    """Returns the kernel that activations are multiplied by, in the dtype of the parameters.

    A quantized one is a `quantized.QuantizedKernel`, which has its shape and `astype`.
    """
    if self.format:
      return self.format.kernel_of(self, self.multiplier)
    kernel = self.kernel[...]
    return kernel if self.multiplier == 1.0 else scaled(kernel, self.multiplier)

  def eight_bit(self) -> EightBit | None:
    """Returns how to multiply by the kernel in 8 bits; None where it is in the compute dtype."""
    if not self.in_8_bits:
      return None
    known = known_magnitudes(self.amax_history[...]) if self.delayed else ()
    return EightBit(self.matmul_dtype, known)

  def low_rank(self) -> LowRank | None:
    """Returns the adapter, with its scale in A; None if the layer has none."""
    if not self.adapter_letters:
      return None
    a = self.lora_a[...]
    a = scaled(a, self.adapter_scale * self.multiplier)
    return LowRank(*self.adapter_letters, a, self.lora_b[...])

  def add_bias(self, x: Array) -> Array:
    """Returns x plus the bias, if there is one.

    Added in float32 or wider: the gradient of the bias is a sum over all tokens.
    """
    if not self.bias_letters:
      return x
    wide = wide_dtype(x.dtype)
    bias = constrain(self.bias[...].astype(wide), self.bias_letters)
    return (x.astype(wide) + _broadcast(bias, x)).astype(x.dtype)


class Norm(nnx.Module):
  """RMSNorm, or LayerNorm where the dims table has a bias, over the dims of its scale."""

  def __init__(self, name: str, spec: LayersSpec, *, epsilon: float | None = None):
    """Initializes it as the plain normalization.

    Args:
      name: of the layer among the parameters, such as `layers/mlp_norm`.
      spec: of the model.
      epsilon: None: the model's.
    """
    self.letters = spec.letters_of(f"{name}/scale")
    self.centred = bool(spec.optional_letters(f"{name}/bias"))
    dtype, shape = spec.parameter_dtype, spec.sizes(self.letters)
    # Gemma stores the scale minus one, so that weight decay pulls the scale towards one.
    self.offset = 1.0 if spec.norm_scale_from_one else 0.0
    self.scale = nnx.Param(jnp.full(shape, 1.0 - self.offset, dtype))
    if self.centred:
      self.bias = nnx.Param(jnp.zeros(shape, dtype))
    self.epsilon = spec.norm_epsilon if epsilon is None else epsilon

  @staticmethod
  def dims(spec: LayersSpec) -> dict[str, str]:
    """Returns parameter -> letters, of a norm over the residual's width."""
    return {"scale": "D", "bias": "D"} if spec.norm == "layer" else {"scale": "D"}

  def __call__(self, x: Float[Array, "*X D"]) -> Float[Array, "*X D"]:
    """Returns x, normalized."""
    scale = constrain(self.scale[...], self.letters)
    if self.offset:  # of a scale that may be stored in bfloat16
      scale = scale.astype(wide_dtype(scale.dtype)) + self.offset
    if self.centred:
      return layer_norm(x, scale, constrain(self.bias[...], self.letters), epsilon=self.epsilon)
    return rms_norm(x, scale, epsilon=self.epsilon)


# By `model.norm`: the class of the norms of the residual; those of queries and keys are RMSNorms.
NORMS: Table = Table("norm", {"rms": Norm, "layer": Norm})


class Embedding(nnx.Module):
  """Token embeddings, split over the vocabulary; where they are tied, also the logits' kernel.

  Attributes:
    letters: of the table.
  """

  def __init__(self, spec: DecoderSpec, *, rngs: nnx.Rngs):
    """Draws the table with `model.embedding_standard_deviation`: 1, or D ** -0.5 where tied."""
    self.letters = spec.letters_of("embed/table")
    dtype, shape = spec.parameter_dtype, spec.sizes(self.letters)
    deviation = jnp.asarray(spec.embedding_standard_deviation, dtype)
    self.table = nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * deviation)
    self.dtype = spec.compute_dtype
    self.scale = spec.embedding_multiplier
    if spec.scaled_embeddings:
      # Rounded to the compute dtype as Gemma's authors and transformers do: 59.75 for 3584 dims.
      root = self.scale * spec.widths.of_embeddings**0.5
      self.scale = float(self.dtype.type(root))

  def effective_kernel(self) -> Array:
    """Returns the table, in the dtype of the parameters."""
    return self.table[...]

  def low_rank(self) -> None:
    """Returns None: the table has no adapter."""

  def eight_bit(self) -> None:
    """Returns None: logits are products in the compute dtype."""

  def __call__(self, tokens_BT: Int[Array, "B T"]) -> Float[Array, "B R D"]:
    """Returns the rows of the table, times a constant of the config."""
    x_BRD = vocab_parallel_embedding(self, tokens_BT, RESIDUAL, self.dtype)
    return scaled(x_BRD, self.scale) if self.scale != 1.0 else x_BRD


class LearnedPositions(nnx.Module):
  """Learned position embeddings, added to the residual. Source: GPT-2."""

  def __init__(self, spec: LayersSpec, deviation: float = 0.02, *, rngs: nnx.Rngs):
    """Draws a row for each position, with GPT-2's standard deviation if none is given."""
    self.letters = spec.letters_of("positions/table")
    dtype, shape = spec.parameter_dtype, spec.sizes(self.letters)
    self.table = nnx.Param(
      jax.random.normal(rngs.params(), shape, dtype) * jnp.asarray(deviation, dtype)
    )
    self.dtype = spec.compute_dtype

  @staticmethod
  def dims(spec: LayersSpec) -> dict[str, str]:
    """Returns parameter -> letters."""
    del spec
    return {"table": "PD"}

  def __call__(
    self, x_BRD: Float[Array, "B R D"], positions_BT: Int[Array, "#B T"] | None = None
  ) -> Float[Array, "B R D"]:
    """Returns x with the rows of the table added, one after the other without positions.

    The table is gathered in the compute dtype, but looked up and added in float32 or wider: its
    gradient is a sum over all rows and documents of the batch.
    """
    wide = wide_dtype(self.dtype)
    table_PD = constrain(self.table[...].astype(self.dtype), self.letters).astype(wide)
    rows = table_PD[None] if positions_BT is None else table_PD[positions_BT]
    x_wide = x_BRD.astype(wide) + rows
    return constrain(x_wide.astype(self.dtype), RESIDUAL.between)


# By `model.positions`: the class of what is added to the embeddings; rotary ones are attention's.
POSITION_EMBEDDINGS: Table = Table("positions", {"rotary": None, "learned": LearnedPositions})


class MLP(nnx.Module):
  """down(f(up(x))), or gated: down(f(gate(x)) * up(x)). Source of the latter: arXiv:2002.05202."""

  def __init__(self, spec: LayersSpec, *, rngs: nnx.Rngs, name: str = "layers/mlp"):
    """Draws the projections; the last is scaled down by the depth, as in GPT-2."""
    linear = functools.partial(Linear, spec=spec, rngs=rngs)
    self.gated = spec.gated
    if self.gated:
      self.gate = linear(f"{name}/gate")
    self.up = linear(f"{name}/up")
    self.down = linear(f"{name}/down", scale=spec.out_scale)
    self.activation = ACTIVATIONS[spec.activation]
    self.adapter_dropout = spec.lora.dropout
    # What has a name or a bias is an array of all tokens.
    biased = self.up.bias_letters or (self.gated and self.gate.bias_letters)
    self.one_ring = not biased and not kept(spec.rematerialization, ("gate", "up", "hidden"))

  @staticmethod
  def dims(spec: LayersSpec) -> dict[str, str]:
    """Returns parameter -> letters."""
    up = ("gate", "up") if spec.gated else ("up",)
    rows = {**dict.fromkeys(up, "F"), "down": "D"}
    biases = {f"{name}/bias": letter for name, letter in rows.items() if spec.has_bias(name)}
    return MLP.kernel_dims(spec, "F") | biases

  @staticmethod
  def kernel_dims(spec: LayersSpec, hidden: str) -> dict[str, str]:
    """Returns those without biases; `hidden` is the letter of the hidden dim."""
    up = ("gate", "up") if spec.gated else ("up",)
    return {f"{name}/kernel": f"D{hidden}" for name in up} | {"down/kernel": f"{hidden}D"}

  def __call__(
    self, x_BRD: Float[Array, "B R D"], key: Key[Array, ""] | None, slots_T: Int[Array, " T"]
  ) -> Float[Array, "B R D"]:
    """Returns the block's update.

    Args:
      x_BRD: the normalized residual.
      key: draws the dropout of the adapters' inputs; None turns it off.
      slots_T: the tokens' slots in the text.
    """
    keys = (None, None) if key is None else jax.random.split(key)
    dropped = functools.partial(adapter_dropout, self.adapter_dropout, slots_T=slots_T)
    projections = [self.gate, self.up] if self.gated else [self.up]
    if self.one_ring and in_one_ring(projections, self.down, RESIDUAL):
      return self.down.add_bias(feedforward(x_BRD, projections, self._hidden, self.down, RESIDUAL))
    inputs = dropped(key=keys[0], letters=RESIDUAL.inside, shape=x_BRD.shape)
    *gate, up_BTF = column_parallel(x_BRD, projections, RESIDUAL, inputs)
    up_BTF = named(self.up.add_bias(up_BTF), "up")
    if gate:
      gate = [named(self.gate.add_bias(gate[0]), "gate")]
    hidden_BTF = named(self._hidden(*gate, up_BTF), "hidden")
    inputs = dropped(key=keys[1], letters="BTF", shape=hidden_BTF.shape)
    return self.down.add_bias(row_parallel(hidden_BTF, self.down, RESIDUAL, inputs))

  def _hidden(self, *projected_BTF: Array) -> Array:
    """Returns what is projected down, of the results of `gate`, if there is one, and `up`."""
    *gate, up_BTF = projected_BTF
    return self.activation(gate[0]) * up_BTF if gate else self.activation(up_BTF)


# By `model.mlp`: the class of a dense layer's MLP.
MLPS: Table = Table("mlp", {"feedforward": MLP})
