"""Specs: what a model is made of, resolved once from a config and handed to its modules.

A spec is frozen and hashable, so that a module can keep it. A field that is a key of the config has
the key's name; what follows from several keys is a property, so that it is computed in one place.
"""

import abc
import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from ml_collections import ConfigDict

from models import mup
from partitioning.dtypes import wide_dtype
from partitioning.parallel.sharded_function import Residual
from partitioning.rules import Dim
from runtime.extensions import registered_names
from runtime.layer_kinds import (
  BIASES,
  DENSE_LAYERS,
  DENSE_MIXER_LAYERS,
  LAYERS,
  MIXER_LAYERS,
  MLP_LAYERS,
  OF_MIXERS,
  mixers_beside,
  parts_of_layers,
  stack_of,
)

# The residual stream of layers, between blocks and inside.
RESIDUAL = Residual(between="BRD", inside="BTD")
MTP_LAYERS = "mtp_layers/"  # behind the last one, that predict further tokens
# Letter of the layers of a stack -> how the names of their parameters begin.
STACKS = {
  "L": LAYERS,
  "Z": DENSE_LAYERS,
  "y": MIXER_LAYERS,
  "z": DENSE_MIXER_LAYERS,
  "f": MLP_LAYERS,
  "Y": MTP_LAYERS,
}
STACKED = tuple(STACKS.values())
IN_STAGES = tuple(letter for letter, stack in STACKS.items() if stack != MTP_LAYERS)


def stacks_of(legend: Mapping[str, Dim]) -> tuple[str, ...]:
  """Returns the letters of stacked layers, whose dims have the names of the stacks."""
  return tuple(letter for letter, dim in legend.items() if f"{dim.name}/" in STACKED)


# The last parts of an adapter's names.
LORA_A, LORA_B = "lora_a", "lora_b"
# Likewise, of what a quantized kernel is stored as (models/quantized.py); `int8` has the first two.
QUANTIZED_PARTS = ("kernel_codes", "kernel_scales", "kernel_scale_steps", "kernel_scale_middles")

NO_MIXER = "none"  # model.mixer
LINEARS = ("query", "key", "value", "out", "gate", "up", "down")


@dataclasses.dataclass(frozen=True)
class Lora:
  """Low-rank adapters: the section `lora`; there are none of rank 0.

  Attributes:
    targets: names of layers, or patterns of them.
  """

  rank: int
  alpha: float
  rs: bool
  targets: tuple[str, ...]
  dropout: float

  @property
  def scale(self) -> float:
    """Returns s, the factor of an adapter's output; see `models.layers`."""
    return self.alpha / (math.sqrt(self.rank) if self.rs else self.rank)


@dataclasses.dataclass(frozen=True)
class GrpoSpec:
  """The loss of GRPO: keys of the section `grpo`; see `models.grpo`."""

  temperature: float
  ratio: str
  clip_low: float
  clip_high: float
  kl: float


TEACHER = "teacher"  # what the names of a distilled model's frozen teacher begin with
# What a batch has of a teacher that is not in memory, letters and dtype: the ids of its K likeliest
# tokens and -1, and their log-probabilities at the temperature, that of all others together last.
STORED_TEACHER = {"teacher_tokens": ("BTt", "int32"), "teacher_log_p": ("BTt", "float32")}


@dataclasses.dataclass(frozen=True)
class Distillation:
  """How a model is trained towards a teacher: the section `distillation`; see the keys there."""

  weight: float
  temperature: float
  divergence: str
  top: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSpec(abc.ABC):
  """What a model is made of: its dims, how its parameters are drawn, in which dtypes they are used.

  A model's own is a frozen dataclass (`kw_only=True`) whose fields have the names of keys in the
  sections `model`, `training`, `partitioning`, `data` and the top of the config; a field that is no
  key needs a default.

  Attributes:
    kind: which of the project's models it is; one that extends this spec is of that kind.
    parameter_dtype: that parameters are drawn in: float32, or wider where they are stored so.
    widths: for muP.
    lora: the adapters of linear layers.
  """

  kind: ClassVar[str] = ""

  parameter_dtype: jnp.dtype
  compute_dtype: jnp.dtype
  matmul_dtype: str
  matmul_scaling: str
  widths: mup.Widths
  lora: Lora

  @property
  @abc.abstractmethod
  def legend(self) -> dict[str, Dim]:
    """Returns letter -> Dim."""

  @property
  @abc.abstractmethod
  def parameters(self) -> dict[str, str]:
    """Returns name pattern -> letters of the parameters that the model has."""

  @abc.abstractmethod
  def train_flops_per_example(self, *, causal: bool = False) -> float:
    """Returns floating-point operations per row of a batch, forward and backward.

    Args:
      causal: count only the unmasked half of attention.
    """

  @staticmethod
  def in_compute_dtype(name: str) -> bool:
    """Returns whether a parameter is only ever read in the compute dtype; by default none is."""
    del name
    return False

  @classmethod
  def of_sections(cls, sections: ConfigDict, **given: Any) -> "ModelSpec":
    """Returns the spec of a finalized config, which is a mapping of sections.

    Args:
      sections: of the config.
      **given: fields that have another name than their key.
    """
    training = sections["training"]
    given |= {
      "parameter_dtype": wide_dtype(jnp.dtype(training["parameter_dtype"])),
      "compute_dtype": jnp.dtype(training["compute_dtype"]),
      "widths": mup.widths(sections["model"]),
      "lora": Lora(**_fields(Lora, [sections["lora"]])),
    }
    every = (sections["model"], training, sections["partitioning"], sections["data"], sections)
    kind = _with_fields(cls, registered_names("key")) if cls.kind == "transformer" else cls
    return kind(**{**_fields(kind, every), **given})

  def letters_of(self, name: str) -> str:
    """Returns the letters of a parameter within its layer, so without the stack's L.

    Args:
      name: such as `layers/mlp/up/kernel`.

    Raises:
      ValueError: no row of the parameters' table matches the name.
    """
    if found := self.optional_letters(name):
      return found
    raise ValueError(f"{name}: the `dims` of its module do not say which dims it has; add a row")

  def optional_letters(self, name: str) -> str:
    """Returns the letters of an optional parameter; "" if the model does not have it."""
    found = matched(name, self.parameters)
    return found[1:] if name.startswith(STACKED) else found

  def adapts(self, layer: str) -> bool:
    """Returns whether a linear layer, such as `layers/mlp/up`, has an adapter."""
    return self.lora.rank > 0 and bool(self.optional_letters(f"{layer}/{LORA_A}"))

  def format_of(self, kernel: str) -> Any:
    """Returns the `quantized.Format` of a kernel, by its name; None where it is an array."""
    del kernel

  def multiplier(self, layer: str) -> float:
    """Returns the factor of the output of a linear layer, such as `layers/mlp/up`."""
    del layer
    return 1.0

  def sizes(self, letters: str) -> tuple[int, ...]:
    """Returns the shape of a parameter with these letters."""
    return tuple(self.legend[letter].size for letter in letters)

  def inputs_of(self, letters: str) -> str:
    """Returns the letters of the inputs of a kernel with these letters.

    A kernel whose first dim is the width of the residual or of latent vectors reads them; any other
    writes the residual.
    """
    letters = letters.removeprefix("E")  # experts are kernels side by side
    reads = self.legend[letters[0]].name in mup.INPUTS
    return letters[0] if reads else letters.removesuffix(RESIDUAL.width)

  def fan_in(self, letters: str) -> int:
    """Returns the number of inputs of a kernel with these letters."""
    return math.prod(self.sizes(self.inputs_of(letters)))

  def deviation(self, letters: str) -> float:
    """Returns the standard deviation of a kernel's initial elements."""
    return self.widths.deviation(letters, self.legend, self.fan_in(letters))

  def in_8_bits(self, name: str) -> bool:
    """Returns whether activations are multiplied by a parameter in 8 bits."""
    return in_8_bits(name, self.matmul_dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayersSpec(ModelSpec):
  """A model with stacked layers of attention and MLP: what they have in common."""

  layers: int
  model_size: int
  feedforward_size: int
  heads: int
  attention: str
  experts: int
  norm: str
  pre_norms: bool
  post_norms: bool
  residual_multiplier: float
  normed_residual: float
  biases: str
  norm_epsilon: float
  norm_scale_from_one: bool
  mlp: str
  gated: bool
  activation: str
  dropout_rate: float
  rematerialization: str
  scan_unroll: int
  reshard_after_forward: bool

  @property
  def out_scale(self) -> float:
    """Returns the factor of the deviation of kernels that write the residual, as in GPT-2."""
    return (2 * self.layers) ** -0.5

  @property
  def with_mixers(self) -> bool:
    """Returns whether all layers have a mixer beside attention, which decoders may have."""
    return False

  def norms_of(self, stack: str) -> tuple[bool, bool]:
    """Returns whether the parts of a stack's layers have norms before them, and after them."""
    del stack
    return self.pre_norms, self.post_norms

  @property
  def parts(self) -> int:
    """Returns how many parts a layer has: attention and MLP, or in some decoders one of them."""
    return 2

  def has_bias(self, name: str) -> bool:
    """Returns whether a linear layer, one of LINEARS, has a bias if it is there."""
    return any(name in BIASES.get(part, (part,)) for part in self.biases.split(","))


_MEASURED = ("training", "evaluation")  # sections whose key `metrics` names registered ones


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderSpec(LayersSpec):
  """What a decoder is made of.

  The fields are keys of the config that `configs/keys` explains: of the section `model`, then of
  `training`, and two of other sections.
  """

  kind = "transformer"

  latent_size: int
  query_latent_size: int
  latent_norm_epsilon: float
  kv_heads: int
  head_size: int
  value_head_size: int
  vocabulary_size: int
  vocabulary_multiple: int
  positions: str
  max_positions: int
  rotary_base: float
  rotary_size: int
  rotary_pairs: str
  rotary_scaling: tuple
  local_rotary_base: float
  local_rotary_scaling: tuple
  window: int
  window_chunks: bool
  global_every: int
  layer_types: tuple[str, ...]
  query_key_norm: bool
  query_key_norm_across_heads: bool
  query_key_unit_norm: bool
  clip_qkv: float
  experts_per_token: int
  expert_feedforward_size: int
  shared_feedforward_size: int
  shared_gate: bool
  dense_layers: int
  sparse_every: int
  mlp_only_layers: tuple[int, ...]
  router_scores: str
  router_normalized: bool
  router_scale: float
  router_groups: int
  router_top_groups: int
  router_group_score: str
  router_bias: bool
  router_correction: bool
  router_scales_inputs: bool
  expert_biases: bool
  gate_limit: float
  up_offset: float
  expert_exchange: str
  expert_capacity: float
  attention_scale: float
  attention_scale_by_inverse_layer: bool
  attention_temperature: tuple
  attention_soft_cap: float
  attention_sinks: bool
  attention_gate: bool
  logits_soft_cap: float
  scaled_embeddings: bool
  embedding_multiplier: float
  logits_divisor: float
  context_attention: str
  embedding_standard_deviation: float
  tied_embeddings: bool
  separate_documents: bool
  mixer: str
  mixer_heads: int
  mixer_key_heads: int
  mixer_head_size: int
  mixer_value_head_size: int
  convolution_size: int
  mixer_step_limits: tuple[float, ...]
  mtp_layers: int
  mtp_weight: float
  mixer_norm: str
  mixer_norm_epsilon: float
  mixer_pre_norms: bool
  mixer_negative_eigenvalues: bool
  multipliers: tuple[tuple[str, float], ...]

  trainable: tuple[str, ...]
  frozen_dtype: str
  attention_kernel: str
  grouped_matmul: str
  balance_loss: float
  router_z_loss: float
  z_loss: float
  loss_chunks: int
  dpo_beta: float
  dpo_label_smoothing: float
  grpo: GrpoSpec

  sequence_length: int
  task: str

  training_metrics: tuple[str, ...]  # training.metrics and evaluation.metrics
  evaluation_metrics: tuple[str, ...]

  distillation: Distillation
  teacher: "DecoderSpec | None" = None

  @classmethod
  def of_sections(cls, sections: ConfigDict, **given: Any) -> "DecoderSpec":
    """Returns the spec of a finalized config; see `ModelSpec`."""
    given |= {f"{name}_metrics": tuple(sections[name]["metrics"]) for name in _MEASURED}
    given["grpo"] = GrpoSpec(**_fields(GrpoSpec, [sections["grpo"]]))
    given["distillation"] = Distillation(**_fields(Distillation, [sections["distillation"]]))
    found = super().of_sections(sections, **given)
    if not (described := sections["distillation"]["model"]):
      return found
    sections = ConfigDict({**sections, "model": dict(described)})
    teacher = super().of_sections(sections, **given)
    # It reads the same rows, in full precision, and has neither adapters nor a backward pass.
    same = {key: getattr(found, key) for key in ("separate_documents", "context_attention")}
    off = {"scan_unroll": 1, "rematerialization": "none", "matmul_dtype": "compute"}
    without = dataclasses.replace(found.lora, rank=0)
    return dataclasses.replace(
      found, teacher=dataclasses.replace(teacher, lora=without, trainable=(), **same, **off)
    )

  @functools.cached_property
  def legend(self) -> dict[str, Dim]:
    """Returns letter -> Dim."""
    experts, stacks = self.experts, [stack_of(self, layer) for layer in range(self.layers)]
    return {
      "B": Dim("batch", None),
      "T": Dim("sequence", None),
      "R": Dim("residual_sequence", None),
      "S": Dim("key_sequence", None),
      **{
        letter: Dim(stack.removesuffix("/"), stacks.count(stack))
        for letter, stack in STACKS.items()
        if stack != MTP_LAYERS
      },
      "D": Dim("model", self.model_size),
      "F": Dim("feedforward", self.feedforward_size),
      "N": Dim("heads", self.heads),
      "K": Dim("kv_heads", self.kv_heads, may_replicate=True),
      "H": Dim("head", self.head_size),
      **self._latent_dims(),
      **self._mixer_dims(),
      "Y": Dim("mtp_layers", self.mtp_layers),
      "O": Dim("mtp_model", self.model_size if self.mtp_layers else 0),
      "V": Dim("vocabulary", self.padded_vocabulary),
      "P": Dim("positions", self.max_positions),
      "r": Dim("lora_rank", self.lora.rank),
      "E": Dim("experts", experts),
      "e": Dim("router_experts", experts),
      "k": Dim("experts_per_token", experts and self.experts_per_token),
      "M": Dim("expert_feedforward", experts and self.expert_feedforward_size),
      "W": Dim("shared_feedforward", self.shared_feedforward_size),
      **({"d": Dim("model", self.teacher.model_size)} if self.teacher else {}),
      "t": Dim("teacher_classes", self.distillation.top and self.distillation.top + 1),
    }

  def multiplier(self, layer: str) -> float:
    """Returns the factor of the output of a linear layer, by `model.multipliers`."""
    factors, name = dict(self.multipliers), layer.partition("/")[2]
    if not factors or not layer.startswith(STACKED):
      return 1.0
    # What is linear: a factor of an input is one of the output.
    reads = self.letters_of(f"{layer}/kernel").startswith(RESIDUAL.width)
    return factors.get(name, 1.0) * (factors.get(name.rpartition("/")[0], 1.0) if reads else 1.0)

  @property
  def with_mixers(self) -> bool:
    """Returns whether all layers have a mixer beside attention."""
    return mixers_beside(self) > 0

  def norms_of(self, stack: str) -> tuple[bool, bool]:
    """Returns whether the parts of a stack's layers have norms before them, and after them."""
    alone = self.mixer_pre_norms and stack in OF_MIXERS
    return (True, False) if alone else super().norms_of(stack)

  @property
  def parts(self) -> int:
    """Returns how many parts each layer has."""
    return parts_of_layers(self)

  @property
  def padded_vocabulary(self) -> int:
    """Returns the vocabulary's size, rounded up so that shapes never depend on the mesh."""
    return -(-self.vocabulary_size // self.vocabulary_multiple) * self.vocabulary_multiple

  @staticmethod
  def in_compute_dtype(name: str) -> bool:
    """Returns whether a parameter is only ever read in the compute dtype: kernels of matmuls.

    Not the tables, whose gradients are sums over tokens, nor norms, biases and routers.
    """
    return name.endswith("/kernel") and "/router/" not in name

  def place_of(self, layer: int) -> tuple[str, int]:
    """Returns the stack that a layer is in, of STACKED, and its index there."""
    stacks = [stack_of(self, one) for one in range(layer + 1)]
    return stacks[-1], stacks[:-1].count(stacks[-1])

  def _latent_dims(self) -> dict[str, Dim]:
    """Returns the dims of latent attention; of size 0 where another is chosen."""
    dims = {
      "U": ("value_head", self.value_head_size),
      "Q": ("query_latent", self.query_latent_size),
      "q": ("query_latent_output", self.query_latent_size),
      "C": ("latent", self.latent_size),
      "c": ("latent_output", self.latent_size),
      "I": ("rotary_key", self.rotary_size),
      "J": ("key_value_head", self.head_size - self.rotary_size + self.value_head_size),
    }
    used = is_latent(self)
    return {letter: Dim(name, size if used else 0) for letter, (name, size) in dims.items()}

  def _mixer_dims(self) -> dict[str, Dim]:
    """Returns the dims of mixers; of size 0 where the decoder has none."""
    dims = {
      "A": ("mixer_heads", self.mixer_heads),  # of values
      "G": ("mixer_key_heads", self.mixer_key_heads),
      "h": ("mixer_head", self.mixer_head_size),
      "u": ("mixer_value_head", self.mixer_value_head_size),
      "X": ("mixer_channels", self.model_size),
      "j": ("decay_latent", self.mixer_head_size),
      "i": ("gate_latent", self.mixer_value_head_size),
      "w": ("convolution", self.convolution_size),
      "o": ("convolution_tail", self.convolution_size - 1),
    }
    used = self.mixer != NO_MIXER
    found = {letter: Dim(name, size if used else 0) for letter, (name, size) in dims.items()}
    return {**found, "G": dataclasses.replace(found["G"], may_replicate=True)}


LATENT_ATTENTION = "latent"  # model.attention


def is_latent(model: Any) -> bool:
  """Returns whether keys and values are projections of a latent vector.

  Args:
    model: a spec, or the section `model` of a decoder's finalized config.
  """
  return model.attention == LATENT_ATTENTION


def latent_sizes(model: ConfigDict) -> tuple[int, ...]:
  """Returns the sizes of a token's latent vectors; () of other attention and other models."""
  if model.get("attention") != LATENT_ATTENTION:
    return ()
  return tuple(size for size in (model.latent_size, model.query_latent_size) if size)


def in_8_bits(name: str, matmul_dtype: str) -> bool:
  """Returns whether activations are multiplied by a parameter in 8 bits.

  The kernels of the layers are; not the unembedding, since logits tell tokens apart by small
  differences, nor adapters, which are small.

  Args:
    name: of the parameter.
    matmul_dtype: `training.matmul_dtype`.
  """
  kernel = name.startswith(STACKED) and name.endswith("/kernel")
  return kernel and matmul_dtype != "compute"


def matched(name: str, rows: Mapping[str, str]) -> str:
  """Returns the letters of a parameter in a table of patterns; "" if no row matches."""
  return next((letters for row, letters in rows.items() if re.fullmatch(row, name)), "")


def expanded(row: str) -> list[str]:
  """Returns the names of a row of a parameters' table: two of `(key|value)/kernel`."""
  before, _, rest = row.partition("(")
  choices, _, after = rest.rpartition(")")
  return [f"{before}{choice}{after}" for choice in choices.split("|")] if rest else [row]


def under(name: str, dims: Mapping[str, str], stack: str = "") -> dict[str, str]:
  """Returns the rows of a part's parameters under its name, `stack` before each one's letters."""
  return {f"{name}/{row}": f"{stack}{letters}" for row, letters in dims.items()}


@functools.cache
def _with_fields(kind: type[ModelSpec], keys: tuple[str, ...]) -> type[ModelSpec]:
  """Returns a spec that has fields for keys `model.NAME` that config files have added."""
  own = [(key.removeprefix("model."), Any) for key in keys]
  return dataclasses.make_dataclass(kind.__name__, own, bases=(kind,), frozen=True, kw_only=True)


def _fields(kind: type, sections: Sequence[ConfigDict]) -> dict[str, Any]:
  """Returns name -> the value of the first section that has a key of a field's name."""
  found = {}
  for field in dataclasses.fields(kind):
    if keys := next((keys for keys in sections if field.name in keys), None):
      found[field.name] = hashable(keys[field.name])
  return found


def hashable(value: Any) -> Any:
  """Returns a key's value; lists as tuples, and names with values as sorted pairs."""
  if isinstance(value, Mapping | ConfigDict):
    return tuple(sorted((name, hashable(one)) for name, one in value.items()))
  return tuple(map(hashable, value)) if isinstance(value, list | tuple) else value
