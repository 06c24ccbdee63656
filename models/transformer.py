"""The decoder-only transformer of the open families (GPT-2, Llama, Mistral, Qwen, Gemma).

The config's `model` section selects the variant. The layers are stacked along L and scanned, so the
program's size does not grow with depth. A forward pass is `enter`, then `run_layers` (a pipeline
stage runs some of them), then `leave`.
Names carry their dims: `q_BTNH` is batch, query length, heads, head size.
"""

import dataclasses
import fnmatch
import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from etils import epy
from flax import nnx
from jaxtyping import Array, Float, Int, Key
from ml_collections import ConfigDict

from models import activations, layer_stack, losses
from models.attention import CACHE as CACHE
from models.attention import LENGTHS, STATES, Cache, soft_cap
from models.layer_stack import Block, attention_class, by_stack, stacked
from models.layers import MLPS, NORMS, POSITION_EMBEDDINGS, Embedding, Linear
from models.losses import COUNTS, Batch, Sums, TokenNumbers, weighted_sum
from models.positions import POSITIONS, Rows, in_order, is_global, layer_pattern, rows_of
from models.spec import (
  LORA_A,
  LORA_B,
  MTP_LAYERS,
  NO_MIXER,
  RESIDUAL,
  STACKED,
  STACKS,
  DecoderSpec,
  expanded,
  under,
)
from partitioning.constraints import axes_splitting, constrain
from partitioning.dtypes import wide_dtype
from partitioning.parallel import split_sequence
from partitioning.parallel.matmuls import column_parallel
from partitioning.parallel.sharded_function import Residual
from partitioning.rules import Dim
from runtime.extensions import kind_of_model, registered
from runtime.layer_kinds import (
  LAYERS,
  MIXER,
  MIXER_LAYERS,
  MLP,
  MLP_LAYERS,
  OF_MIXERS,
  QUANTIZED,
  layer_type,
  layers_of_type,
  mixer_layers,
  mixers_beside,
)
from runtime.suggest import most_similar

with epy.lazy_imports():  # of experts, preferences, answers, teachers, chunks, quantized kernels
  from models import distillation, grpo, load_balance, multi_token, preferences, quantized
  from partitioning.parallel import chunked_vocabulary


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerSpec(DecoderSpec):
  """What a decoder is made of, with what all of its parts determine together."""

  # Letter of a user's own part -> devices that split its dim; for plans, of the part of one device.
  own_parts: tuple[tuple[str, int], ...] = ()

  @functools.cached_property
  def legend(self) -> dict[str, Dim]:
    """Returns letter -> Dim, those of a user's own parts among them.

    Raises:
      ValueError: a part's letter or dim is one of the decoder's.
    """
    found, parts = super().legend, dict(self.own_parts)
    for part, own in self.own_dims().items():
      names = {dim.name for dim in found.values()}
      if taken := [x for x, dim in own.items() if x in found or dim.name in names]:
        raise ValueError(
          f"legend of {part}: {', '.join(taken)}: the decoder has a letter or a dim of that name; "
          f"its letters are {''.join(found)}"
        )
      split = {
        x: dataclasses.replace(dim, size=dim.size // parts.get(x, 1)) for x, dim in own.items()
      }
      found = found | split
    if self.quantized_kernels:
      found |= quantized.block_dims(found, self.frozen_dtype, [*self.quantized_kernels.values()])
    return found

  def own_dims(self) -> dict[str, dict[str, Dim]]:
    """Returns class -> letter -> Dim, of a user's attention and MLP that have dims of their own."""
    stacks = [LAYERS, *([MIXER_LAYERS] if self.mixer != NO_MIXER else [])]
    kinds = [*(attention_class(self, stack) for stack in stacks), MLPS[self.mlp]]
    return {kind.__name__: kind.legend(self) for kind in kinds if hasattr(kind, "legend")}

  @functools.cached_property
  def unquantized(self) -> "TransformerSpec":
    """Returns the spec of the same decoder, whose kernels are arrays."""
    is_so = self.frozen_dtype not in QUANTIZED
    return self if is_so else dataclasses.replace(self, frozen_dtype="bfloat16")

  @functools.cached_property
  def quantized_kernels(self) -> dict[str, str]:
    """Returns name -> letters of the kernels that are quantized: of layers, frozen, of D."""
    if self.unquantized is self:
      return {}
    return {
      name: letters
      for row, letters in self.unquantized.parameters.items()
      if row.startswith(STACKED) and row.endswith("/kernel") and "/router/" not in row
      for name in expanded(row)
      if RESIDUAL.width in letters
      and not any(fnmatch.fnmatchcase(name, one) for one in self.trainable)
    }

  def format_of(self, kernel: str) -> Any:
    """Returns how a kernel is quantized; None where it is an array."""
    if letters := self.quantized_kernels.get(kernel):
      return quantized.Format.of(letters[1:], self.frozen_dtype)
    return None

  def optional_letters(self, name: str) -> str:
    """Returns the letters of an optional parameter, also of a kernel that is quantized."""
    if name in self.quantized_kernels:
      return self.quantized_kernels[name][1:]
    return super().optional_letters(name)

  @functools.cached_property
  def parameters(self) -> dict[str, str]:
    """Returns name -> letters of the parameters that the model has.

    In place of a kernel that is quantized, those of what it is stored as.
    """
    if not self.quantized_kernels:
      return self._parameters()
    found = {}
    for row, letters in self.unquantized.parameters.items():
      for name in expanded(row):
        parts = {name: letters}
        if name in self.quantized_kernels:
          of_parts = quantized.part_letters(letters, self.frozen_dtype)
          parts = under(name.removesuffix("/kernel"), of_parts)
        found |= parts
    return found

  def _parameters(self) -> dict[str, str]:
    found = {"embed/table": "VD"}
    if added := POSITION_EMBEDDINGS[self.positions]:
      found |= under("positions", added.dims(self))
    for letter, stack in STACKS.items():
      if self.legend[letter].size:
        kind = multi_token.FurtherToken if stack == MTP_LAYERS else Block
        found |= under(stack.removesuffix("/"), kind.dims(self, stack), letter)
    self._check_multipliers(found)
    found |= under("final_norm", NORMS[self.norm].dims(self))
    if not self.tied_embeddings:
      found["unembed/kernel"] = "DV"
    return found | self._adapters(found)

  def _check_multipliers(self, rows: Mapping[str, str]) -> None:
    """Raises ValueError with the names in `model.multipliers` that no linear layer has."""
    kernels = [
      name.partition("/")[2].removesuffix("/kernel")
      for row in rows
      if row.startswith(STACKED) and row.endswith("/kernel") and "/experts/" not in row
      for name in expanded(row)
    ]
    known = dict.fromkeys([*kernels, *(name.rpartition("/")[0] for name in kernels)])
    if unknown := [name for name, _ in self.multipliers if name not in known]:
      raise ValueError(
        f"model.multipliers: {', '.join(unknown)}: nothing has this name; known are "
        f"{', '.join(filter(None, known))}"
      )

  def _adapters(self, rows: Mapping[str, str]) -> dict[str, str]:
    """Returns name -> letters of the adapters of stacked layers with these rows.

    Raises:
      ValueError: a target that matches none of these layers.
    """
    if not self.lora.rank:
      return {}
    kernels = {
      name.removesuffix("/kernel"): letters
      for row, letters in rows.items()
      if row.startswith((LAYERS, *OF_MIXERS, MLP_LAYERS)) and row.endswith("/kernel")
      for name in expanded(row)
    }
    found = {}
    for layer in adapted_layers(self.lora.targets, [*kernels]):
      stack, kernel = kernels[layer][0], kernels[layer][1:]
      inputs = self.inputs_of(kernel)
      outputs = kernel.removeprefix(inputs)
      found |= under(layer, {LORA_A: f"{inputs}r", LORA_B: f"r{outputs}"}, stack)
    return found

  def train_flops_per_example(self, *, causal: bool = False) -> float:
    """Returns floating-point operations per sequence, a teacher's among them; see below."""
    own = train_flops_per_example(self, causal=causal)
    return own + (self.teacher.train_flops_per_example(causal=causal) if self.teacher else 0.0)


def adapted_layers(targets: tuple[str, ...], names: list[str]) -> list[str]:
  """Returns the layers that `lora.targets` match, as a whole or by their last part.

  Args:
    targets: patterns.
    names: of all linear layers, such as `layers/mlp/up`.

  Raises:
    ValueError: with each target that matches none.
  """

  def matches(target: str, name: str) -> bool:
    return fnmatch.fnmatchcase(name, target) or fnmatch.fnmatchcase(name.split("/")[-1], target)

  wrong = [one for one in targets if not any(matches(str(one), name) for name in names)]
  if wrong or not targets:
    short = [name.split("/")[-1] for name in names]
    lines = [
      f"{one!r} matches no linear layer; near is {most_similar(str(one), short, 1)[0]}"
      for one in wrong
    ]
    raise ValueError(
      f"lora.targets: {'; '.join(lines) or '() names no layer'}. The layers are "
      f"{', '.join(short)}; embeddings and the kernel of the logits have no adapters, but can be "
      f"trained in full: --config.training.trainable=\"('unembed/*',)\""
    )
  return [name for name in names if any(matches(target, name) for target in targets)]


class Transformer(nnx.Module):
  """Tokens in, logits over the padded vocabulary out."""

  def __init__(self, spec: TransformerSpec, *, rngs: nnx.Rngs):
    """Draws the parameters from `rngs.params`, the layers' stacked along L."""
    self.spec = spec
    self.embed = Embedding(spec, rngs=rngs)
    if added := POSITION_EMBEDDINGS[spec.positions]:
      self.positions = added(spec, rngs=rngs)
    counts = dict(zip(STACKED, spec.sizes("".join(STACKS)), strict=True))  # of layers
    further = counts.pop(MTP_LAYERS)
    sparse = (LAYERS, MIXER_LAYERS) if spec.parts == 2 else (MLP_LAYERS,)
    self.sparse_stacks = tuple(filter(None, (counts[name] for name in sparse)))
    self.sparse_layers = sum(self.sparse_stacks) + further
    self.layers = stacked(spec, rngs, counts.pop(LAYERS), LAYERS)
    for name, count in counts.items():  # the other stacks, under the names of their parameters
      beside = stacked(spec, rngs, count, name) if count else None
      setattr(self, name.removesuffix("/"), beside)
    self.layer_pattern = layer_pattern(spec)
    self.final_norm = NORMS[spec.norm]("final_norm", spec)
    if not spec.tied_embeddings:
      self.unembed = Linear("unembed", spec, rngs=rngs)
    if further:
      self.mtp_layers = stacked(spec, rngs, further, MTP_LAYERS, multi_token.FurtherToken)
    self.divisor = spec.logits_divisor * spec.widths.ratio
    if spec.teacher:
      self.teacher = Transformer(spec.teacher, rngs=rngs)

  @property
  def stacks(self) -> dict[str, nnx.Module]:
    """Returns name -> the layers of each stack, but those that predict further tokens."""
    stacks = {name: getattr(self, name.removesuffix("/")) for name in STACKED if name != MTP_LAYERS}
    return {name: layers for name, layers in stacks.items() if layers is not None}

  def __call__(
    self,
    tokens_BT: Int[Array, "B T"],
    key: Key[Array, ""] | None = None,
    segments_BT: Int[Array, "B T"] | None = None,
  ) -> Float[Array, "B T V"]:
    """Returns logits in float32 or wider; those of padding ids are the dtype's lowest number.

    Where attention runs in a ring over a split sequence, the logits are in the ring's order.

    Args:
      tokens_BT: token ids.
      key: draws the dropout; None turns it off.
      segments_BT: the document of each token; None: a row is one document.
    """
    documents = {} if segments_BT is None else {"segments": segments_BT}
    batch = self._in_order({"tokens": tokens_BT, **documents}, documents=bool(documents))
    return self.head(layer_stack.blocks(self, self.enter(batch), self.rows(batch), key)[0])

  def loss_sums(self, batch: Batch, key: Key[Array, ""] | None = None) -> Sums:
    """Returns the summed weighted cross-entropy of each next token, in nats; see `models.Network`.

    Args:
      batch: `tokens`, `targets`, `weights` and, where documents are separated, `segments`, each
        [B, T]; or pairs, see `models.preferences`, or answers, see `models.grpo`.
      key: draws the dropout; None turns it off.
    """
    if self.spec.task == "dpo":
      return preferences.pair_sums(self, batch, key)
    if self.spec.task == "grpo":
      return grpo.answer_sums(self, batch, key)
    batch = self.ordered(batch)
    x_BRD, of_layers, counts = self.run_layers(self.enter(batch), batch, key)
    left = self.leave(x_BRD, batch, key)
    sums = {**left, **of_layers, **counts, "loss": left["loss"] + of_layers.get("loss", 0.0)}
    if not self.spec.mtp_layers or key is None:
      return sums
    return multi_token.add_losses(self, x_BRD, batch, key, sums)

  # What a pipeline runs in different places: `ordered` on the complete batch, the three parts of a
  # forward pass on each microbatch, see `pipeline.Network`.

  residual = RESIDUAL.between

  def ordered(self, batch: Batch) -> Batch:
    """Returns a batch of `loss_sums` as the three parts take it."""
    if self.spec.mtp_layers:
      batch = multi_token.with_further_tokens(batch, self.spec.mtp_layers)
    return self._in_order(batch, documents=self.spec.separate_documents)

  def _in_order(self, batch: Batch, *, documents: bool) -> Batch:
    return in_order(batch, self.way(batch["tokens"].shape[1]), documents=documents)

  def enter(self, batch: Batch) -> Float[Array, "B R D"]:
    """Returns the residual before the first layer."""
    x_BRD = self._embedded(constrain(batch["tokens"], "BT"), self.rows(batch))
    activations.record("embedding", x_BRD)
    return x_BRD

  def run_layers(
    self,
    x_BRD: Float[Array, "B R D"],
    batch: Batch,
    key: Key[Array, ""] | None,
    first: Int[Array, ""] | int = 0,
  ) -> tuple[Float[Array, "B R D"], Sums, Sums]:
    """Returns the residual after these layers, their sums, and counts by layer.

    Args:
      x_BRD: the residual before them.
      batch: of `ordered`.
      key: draws the dropout; None turns it off.
      first: the number of this module's first layer.
    """
    x_BRD, found = layer_stack.blocks(self, x_BRD, self.rows(batch, key), key, first)
    if not found:
      return x_BRD, {}, {}
    sums = load_balance.sums_of(found, batch["weights"], self.sparse_layers)
    counts = {COUNTS: sums.pop(COUNTS)}
    coefficients = self.spec.balance_loss, self.spec.router_z_loss
    loss = load_balance.auxiliary_loss(sums, *coefficients)
    return x_BRD, sums if isinstance(loss, float) else {"loss": loss, **sums}, counts

  def counts_by_stack(self, counts: Sums, parts: int) -> Sums:
    """Returns counts by layer in the order of a whole model, of those of its parts in turn."""
    return by_stack(counts, self.sparse_stacks, parts)

  def leave(self, x_BRD: Float[Array, "B R D"], batch: Batch, key: Key[Array, ""] | None) -> Sums:
    """Returns the sums of the losses of the tokens, of the residual after the last layer."""
    targets_BT, weights_BT = batch["targets"], batch["weights"]
    metrics = self.spec.evaluation_metrics if key is None else self.spec.training_metrics
    # An evaluation's loss is the cross-entropy.
    taught = (self.spec.teacher or self.spec.distillation.top) and key is not None
    whole = metrics or (self.spec.loss_chunks == 1 and not taught)
    logits_BTV = self.head(x_BRD) if whole else None
    own = self._measured(metrics, logits_BTV, batch) if metrics else {}
    given = x_BRD, targets_BT
    if taught:
      return {**distillation.loss_sums(self, x_BRD, batch), **own}
    if not self.spec.z_loss or key is None:
      [losses_BT] = self.numbers_of(*given, ("loss",), logits_BTV)
      return {"loss": weighted_sum(losses_BT, weights_BT), **own}
    losses_BT, normalizers_BT = self.numbers_of(*given, ("loss", "normalizer"), logits_BTV)
    # In training alone: an evaluation's loss is the cross-entropy. Source: arXiv:2204.02311, 5.
    z_loss = self.spec.z_loss * weighted_sum(normalizers_BT**2, weights_BT)
    return {"loss": weighted_sum(losses_BT, weights_BT) + z_loss, "z_loss": z_loss, **own}

  def _measured(self, names: tuple[str, ...], logits_BTV: jax.Array, batch: Batch) -> Sums:
    """Returns the weighted sums of registered metrics of the tokens.

    Raises:
      ValueError: a metric does not give a number for each token.
    """
    logits_BTV = jax.lax.stop_gradient(logits_BTV)
    arrays = {name: x_BT for name, x_BT in batch.items() if name != POSITIONS}
    found = {}
    for name in names:
      x_BT = registered("metric", name)(logits_BTV, arrays)
      if jnp.shape(x_BT) != arrays["weights"].shape:
        raise ValueError(
          f"the metric {name!r} gives an array of shape {jnp.shape(x_BT)}; it has to give a number "
          f"for each token, {arrays['weights'].shape}"
        )
      found[name] = weighted_sum(x_BT.astype(logits_BTV.dtype), arrays["weights"])
    return found

  def row_scores(self, batch: Batch) -> Sums:
    """Returns numbers of each row, [B], without dropout; see `models.Scoring`."""
    numbers, batch, _ = self.per_token(batch, None, ("loss", "likeliest"))
    losses_BT, likeliest_BT = numbers
    weights_BT = batch["weights"].astype(losses_BT.dtype)
    return {
      "log_likelihood": -jnp.sum(losses_BT * weights_BT, axis=1),
      "likeliest": jnp.sum(likeliest_BT * weights_BT, axis=1),
    }

  def per_token(
    self,
    batch: Batch,
    key: Key[Array, ""] | None,
    names: tuple[str, ...],
    temperature: float = 1.0,
  ) -> tuple[list[jax.Array], Batch, Sums]:
    """Returns numbers of each token, the batch in their order, and the blocks' sums.

    Args:
      batch: of `loss_sums`.
      key: draws the dropout; None turns it off.
      names: of the numbers, see `losses.TokenNumbers`.
      temperature: of the softmax.
    """
    batch = self.ordered(batch)
    x_BRD, found = layer_stack.blocks(self, self.enter(batch), self.rows(batch, key), key)
    sums = load_balance.sums_of(found, batch["weights"], self.sparse_layers) if found else {}
    numbers = self.numbers_of(x_BRD, batch["targets"], names, temperature=temperature)
    return numbers, batch, sums

  def rows(self, batch: Batch, key: Key[Array, ""] | None = None) -> Rows:
    """Returns positions and documents of a batch of `ordered`.

    With a key also the weights, where experts balance by them.
    """
    rows = rows_of(batch, self.way(batch["tokens"].shape[1]), self.layer_pattern)
    if not self.spec.experts or key is None:
      return rows
    return dataclasses.replace(rows, weights_BT=constrain(batch["weights"], "BT"))

  def way(self, length: int) -> str:
    """Returns how attention runs over rows of this length; "" where the sequence is not split."""
    if not axes_splitting("T"):
      return ""
    spec, (count, tensor) = self.spec, map(split_sequence.devices_along, "TN")
    given = spec.context_attention, spec.attention_kernel, length, spec.heads, spec.kv_heads
    return split_sequence.fastest_way(*given, count=count, tensor=tensor)

  def numbers_of(
    self,
    x_BRD: Float[Array, "B R D"],
    targets_BT: Int[Array, "B T"],
    names: tuple[str, ...],
    logits_BTV: Float[Array, "B T V"] | None = None,
    *,
    normed: bool = False,
    temperature: float = 1.0,
  ) -> list[jax.Array]:
    """Returns numbers of each token; only one of `loss_chunks` has its logits in memory.

    Args:
      x_BRD: the residual after the last layer.
      targets_BT: the next tokens.
      names: of the numbers, see `losses.TokenNumbers`.
      logits_BTV: of `head`, where they are known.
      normed: whether the residual has been normalized for the head.
      temperature: of the softmax.
    """
    numbers = TokenNumbers(names, self.finished, temperature)
    if self.spec.loss_chunks == 1:
      logits_BTV = self.head(x_BRD, normed=normed) if logits_BTV is None else logits_BTV
      return numbers.of_all(logits_BTV, targets_BT)
    head = self.unembedded(x_BRD if normed else self.final_norm(x_BRD))
    given = targets_BT, numbers, self.spec.loss_chunks
    return chunked_vocabulary.chunked_logits([head], *given)

  def unembedded(
    self, normed_BRD: Float[Array, "B R D"], residual: Residual = RESIDUAL
  ) -> "chunked_vocabulary.Head":
    """Returns what logits are made of chunk by chunk; `residual` has the letters to name it by."""
    weight = self._unembedding()
    letters = weight.letters.replace(RESIDUAL.width, residual.width)
    return chunked_vocabulary.Head(normed_BRD, weight.effective_kernel(), letters, residual)

  def extend(
    self, tokens_BT: Int[Array, "B T"], counts_B: Int[Array, " B"], cache: Cache
  ) -> tuple[Float[Array, "B V"], Cache]:
    """Reads tokens that follow those in the cache, of the same document, without dropout.

    Args:
      tokens_BT: token ids, each row padded on the right with any ids.
      counts_B: int32, how many of a row's T are tokens, at least 1.
      cache: of all layers, with space for T more slots in every row.

    Returns:
      The logits, as `__call__` gives them, of each row's last token; the cache with the tokens.
    """
    slots_BT = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None, :]
    slots_BT = cache[LENGTHS][:, None] + slots_BT
    tables = self.layer_pattern.rope_tables(slots_BT)
    steps_BT = self.layer_pattern.temperature_steps(slots_BT)
    rows = Rows(slots_BT, slots_BT, tables, counts_B=counts_B, steps_BT=steps_BT)

    x_BRD, cache = layer_stack.extended(self, self._embedded(tokens_BT, rows), rows, cache)
    last_B11 = (counts_B - 1)[:, None, None]
    last_B1D = constrain(jnp.take_along_axis(x_BRD, last_B11, axis=1), "BRD")
    lengths_B = constrain(cache[LENGTHS] + counts_B, "B")
    return self.head(last_B1D)[:, 0], {**cache, LENGTHS: lengths_B}

  def _embedded(self, tokens_BT: Int[Array, "B T"], rows: Rows) -> Float[Array, "B R D"]:
    x_BRD = self.embed(tokens_BT)
    if POSITION_EMBEDDINGS[self.spec.positions] is None:
      return x_BRD
    return self.positions(x_BRD, rows.positions_BT)

  def head(self, x_BRD: Float[Array, "B R D"], *, normed: bool = False) -> Float[Array, "B T V"]:
    """Returns the logits, as `__call__` does, of the residual after the last layer."""
    normed_BRD = x_BRD if normed else self.final_norm(x_BRD)
    [logits_BTV] = column_parallel(normed_BRD, [self._unembedding()], RESIDUAL)
    wide_BTV = constrain(logits_BTV.astype(wide_dtype(logits_BTV.dtype)), "BTV")
    logits_BTV = self.finished(wide_BTV, 0)
    activations.record("logits", logits_BTV, length=self.spec.vocabulary_size)
    return logits_BTV

  def _unembedding(self) -> Embedding | Linear:
    """Returns the layer with the kernel of the logits."""
    return self.embed if self.spec.tied_embeddings else self.unembed

  def finished(self, logits_BTV: jax.Array, first: jax.Array | int) -> jax.Array:
    """Returns wide, divided, soft-capped logits, padding masked; `first` is the first's token."""
    wide = wide_dtype(logits_BTV.dtype)
    logits_BTV = logits_BTV.astype(wide)
    if self.divisor != 1.0:
      logits_BTV = logits_BTV / jnp.asarray(self.divisor, wide)
    logits_BTV = soft_cap(logits_BTV, self.spec.logits_soft_cap)
    if self.spec.padded_vocabulary == self.spec.vocabulary_size:
      return logits_BTV
    tokens_V = jnp.arange(logits_BTV.shape[-1], dtype=jnp.int32)
    real_V = first + tokens_V < self.spec.vocabulary_size
    least = losses.in_chunk(jnp.finfo(wide).min, wide, first)
    return jnp.where(real_V[None, None], logits_BTV, least)


def empty_cache(spec: TransformerSpec, rows: int, slots: int) -> Cache:
  """Returns an empty cache.

  Args:
    spec: of the decoder.
    rows: B.
    slots: S, the most tokens that a row can have.
  """
  mixers = mixer_layers(spec)
  attend = spec.layers - mixers - layers_of_type(spec, MLP)
  given = {"L": attend, "y": mixers or spec.layers, "B": rows, "S": slots}

  def empty(letters: str, dtype: jnp.dtype) -> jax.Array:
    shape = (given[x] if x in given else spec.legend[x].size for x in letters)
    return jnp.zeros((*shape,), dtype)

  names = attention_class(spec).cached
  if spec.mixer != NO_MIXER:
    names += attention_class(spec, MIXER_LAYERS).cached
  narrow, wide = spec.compute_dtype, wide_dtype(spec.compute_dtype)
  arrays = {name: empty(CACHE[name], wide if name == STATES else narrow) for name in names}
  return {**arrays, LENGTHS: jnp.zeros((rows,), jnp.int32)}


SPEC, build = TransformerSpec, Transformer


# ------------------------------ operations, for MFU and the planner ------------------------------

_KERNELS = ("/kernel", f"/{LORA_A}", f"/{LORA_B}")
_BELOW = (*STACKED, "embed/", "positions/")  # parameters whose gradient needs that of the layers
# Parameters of which each token uses those of its own experts.
_ROUTED = re.compile(f"({'|'.join(STACKED)})experts/(gate|up|down)/.*")


def train_flops_per_example(spec: DecoderSpec, *, causal: bool = False) -> float:
  """Returns floating-point operations per sequence, forward and backward.

  6 per token and element of a weight matrix, and attention's two matmuls without the causal mask,
  12 L N H T per token (arXiv:2204.02311, appendix B), or 6 L N (H + U) T where the heads of values
  have another size U; a layer with a sliding window has the window instead of T, one with a mixer
  what its recurrence computes. A weight matrix that is not trained counts 4: it has no gradient,
  but that of its input is computed with it; and 2 if nothing below it is trained. Of routed experts
  those of a token count.

  Args:
    spec: of the decoder.
    causal: count only unmasked scores (half, without a window).
  """
  spec = spec.unquantized
  names, length = dict(_names(spec)), spec.sequence_length
  trained = {name for name in names if any(fnmatch.fnmatchcase(name, x) for x in spec.trainable)}
  into_layers = any(name.startswith(_BELOW) for name in trained)
  into_logits = into_layers or any(name.startswith("final_norm/") for name in trained)
  unembedding = "embed/table" if spec.tied_embeddings else "unembed/kernel"
  total = 0.0
  for name, elements in names.items():
    if name == unembedding or name.endswith(_KERNELS):
      backward = into_layers if name.startswith(STACKED) else into_logits
      share = active_share(spec, name)
      share *= 1 + spec.mtp_layers if name == unembedding else 1  # once for each further token
      total += (2 + 2 * backward + 2 * (name in trained)) * elements * share
  windows = [
    length if is_global(spec, layer) else min(length, spec.window)
    for layer in range(spec.layers)
    if layer_type(spec, layer) not in (MIXER, MLP)
  ]
  windows += windows[-1:] * spec.mtp_layers
  # With a window w, the first w tokens attend to fewer, and in chunks the first w of each.
  widths = [length if not spec.window_chunks else one for one in windows]
  pairs = zip(windows, widths, strict=True)
  seen = sum(one - one**2 / (2 * width) if causal else one for one, width in pairs)
  passes = 3 if into_layers else 1
  attention = 2 * passes * spec.heads * (spec.head_size + spec.value_head_size)
  if mixers := mixer_layers(spec) + mixers_beside(spec):
    total += passes * mixers * attention_class(spec, MIXER_LAYERS).flops(spec)
  return float(length) * (total + attention * seen)


def active_share(model: Any, name: str) -> float:
  """Returns the share of a parameter's elements that one token uses: of routed experts, its own.

  Args:
    model: a spec, or the section `model` of a decoder's finalized config.
    name: of the parameter.
  """
  return model.experts_per_token / model.experts if _ROUTED.fullmatch(name) else 1.0


def active_elements(model: ConfigDict, elements: Mapping[str, int]) -> int:
  """Returns how many elements of the parameters one token uses; tables count as a whole.

  Args:
    model: the section of a finalized config; of any model, of which only a decoder has experts.
    elements: of each parameter, by its name.
  """
  if kind_of_model(model.name) != "transformer" or not model.experts:
    return sum(elements.values())
  return round(sum(count * active_share(model, name) for name, count in elements.items()))


def _names(spec: DecoderSpec) -> Iterator[tuple[str, int]]:
  """Yields the name and the number of elements of each parameter."""
  for row, letters in spec.parameters.items():
    for name in expanded(row):
      yield name, math.prod(spec.sizes(letters))
