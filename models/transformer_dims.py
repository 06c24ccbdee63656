"""What a decoder is made of: its spec, its legend, and the letters of each parameter.

The only place where a parameter's letters are written: modules and matmuls take them from here.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

from models.spec import DENSE_LAYERS, LAYERS, LayersSpec, matched
from partitioning.dims import Dim
from partitioning.parallel.sharded_function import Residual
from runtime.layer_kinds import beside_sparse, is_sparse, sparse_layers

# Queries, keys and values inside a block.
QUERIES, KEYS, SINKS = "BTNH", "BTKH", "N"
# Of latent attention: the latent vectors of queries and of keys and values, and the rotary key.
# A down-projection's own output dim has another letter, since its kernel is sharded otherwise.
QUERY_LATENT = Residual(between="BRQ", inside="BTQ")
LATENT = Residual(between="BRC", inside="BTC")
ROTARY_KEY = Residual(between="BRI", inside="BTI")
LATENT_ATTENTION = "latent"  # model.attention


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderSpec(LayersSpec):
  """What a decoder is made of.

  The fields are keys of the config that `configs/keys` explains: of the section `model`, then of
  `training`, and two of other sections.
  """

  attention: str
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
  global_every: int
  layer_types: tuple[str, ...]
  norm: str
  pre_norms: bool
  post_norms: bool
  query_key_norm: bool
  query_key_norm_across_heads: bool
  clip_qkv: float
  biases: str
  experts: int
  experts_per_token: int
  expert_feedforward_size: int
  shared_feedforward_size: int
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
  expert_biases: bool
  gate_limit: float
  up_offset: float
  expert_exchange: str
  expert_capacity: float
  attention_scale: float
  attention_scale_by_inverse_layer: bool
  attention_soft_cap: float
  attention_sinks: bool
  logits_soft_cap: float
  scaled_embeddings: bool
  embedding_multiplier: float
  residual_multiplier: float
  logits_divisor: float
  context_attention: str
  embedding_standard_deviation: float
  tied_embeddings: bool
  separate_documents: bool

  trainable: tuple[str, ...]
  attention_kernel: str
  grouped_matmul: str
  balance_loss: float
  router_z_loss: float
  z_loss: float
  loss_chunks: int
  dpo_beta: float
  dpo_label_smoothing: float

  sequence_length: int
  task: str

  @functools.cached_property
  def legend(self) -> dict[str, Dim]:
    """Returns letter -> Dim."""
    beside, experts = beside_sparse(self), self.experts
    return {
      "B": Dim("batch", None),
      "T": Dim("sequence", None),
      "R": Dim("residual_sequence", None),
      "S": Dim("key_sequence", None),
      "L": Dim("layers", self.layers - beside),
      "Z": Dim("dense_layers", beside),
      "D": Dim("model", self.model_size),
      "F": Dim("feedforward", self.feedforward_size),
      "N": Dim("heads", self.heads),
      "K": Dim("kv_heads", self.kv_heads, may_replicate=True),
      "H": Dim("head", self.head_size),
      **_latent_dims(self),
      "V": Dim("vocabulary", self.padded_vocabulary),
      "P": Dim("positions", self.max_positions),
      "r": Dim("lora_rank", self.lora.rank),
      "E": Dim("experts", experts),
      "e": Dim("router_experts", experts),
      "k": Dim("experts_per_token", experts and self.experts_per_token),
      "M": Dim("expert_feedforward", experts and self.expert_feedforward_size),
      "W": Dim("shared_feedforward", self.shared_feedforward_size),
    }

  @functools.cached_property
  def parameters(self) -> dict[str, str]:
    """Returns name pattern -> letters of the parameters that the model has."""
    absent = [part for part, when in _WHEN.items() if not when(self)]
    table = PARAMETERS
    if self.query_key_norm_across_heads:  # only with query_key_norm, `validate` says
      table = {n: x for n, x in PARAMETERS.items() if "(query|key)_norm" not in n} | ACROSS_HEADS
    if is_latent(self):
      table = table | OF_LATENTS
    if _has_query_latents(self):
      table = table | OF_QUERY_LATENTS
    present = {
      name: dims for name, dims in table.items() if not any(part in name for part in absent)
    }
    for layer in self.lora.targets if self.lora.rank else ():
      if kernel := matched(f"{layer}/kernel", present)[1:]:
        inputs = self.inputs_of(kernel)
        present |= {
          f"{layer}/{LORA_A}": f"L{inputs}r",
          f"{layer}/{LORA_B}": f"Lr{kernel.removeprefix(inputs)}",
        }
    return _in_two_stacks(self, present) if self.experts else present

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
    """Returns the stack that a layer is in, LAYERS or DENSE_LAYERS, and its index there."""
    sparse = is_sparse(self, layer)
    before = sum(is_sparse(self, one) == sparse for one in range(layer))
    return DENSE_LAYERS if self.experts and not sparse else LAYERS, before


def _latent_dims(model: DecoderSpec) -> dict[str, Dim]:
  """Returns the dims of latent attention; of size 0 where another is chosen."""
  dims = {
    "U": ("value_head", model.value_head_size),
    "Q": ("query_latent", model.query_latent_size),
    "q": ("query_latent_output", model.query_latent_size),
    "C": ("latent", model.latent_size),
    "c": ("latent_output", model.latent_size),
    "I": ("rotary_key", model.rotary_size),
    "J": ("key_value_head", model.head_size - model.rotary_size + model.value_head_size),
  }
  used = model.attention == LATENT_ATTENTION
  return {letter: Dim(name, size if used else 0) for letter, (name, size) in dims.items()}


PARAMETERS = {
  "embed/table": "VD",
  "positions/table": "PD",
  "layers/attention_norm/scale": "LD",
  "layers/attention_norm/bias": "LD",
  "layers/attention/query/kernel": "LDNH",
  "layers/attention/query/bias": "LNH",
  "layers/attention/(key|value)/kernel": "LDKH",
  "layers/attention/key/bias": "LKH",
  "layers/attention/value/bias": "LKH",
  "layers/attention/(query|key)_norm/scale": "LH",
  "layers/attention/sinks": "LN",
  "layers/attention/query_latent/kernel": "LDq",
  "layers/attention/query_latent/bias": "Lq",
  "layers/attention/query_latent_norm/scale": "LQ",
  "layers/attention/latent/kernel": "LDc",
  "layers/attention/latent/bias": "Lc",
  "layers/attention/latent_norm/scale": "LC",
  "layers/attention/rotary_key/kernel": "LDI",
  "layers/attention/rotary_key/bias": "LI",
  "layers/attention/key_value/kernel": "LCKJ",
  "layers/attention/out/kernel": "LNHD",
  "layers/attention/out/bias": "LD",
  "layers/attention_post_norm/scale": "LD",
  "layers/mlp_norm/scale": "LD",
  "layers/mlp_norm/bias": "LD",
  "layers/mlp/gate/kernel": "LDF",
  "layers/mlp/gate/bias": "LF",
  "layers/mlp/up/kernel": "LDF",
  "layers/mlp/up/bias": "LF",
  "layers/mlp/down/kernel": "LFD",
  "layers/mlp/down/bias": "LD",
  "layers/mlp_post_norm/scale": "LD",
  "layers/(attention|mlp)_post_norm/bias": "LD",
  # Sparse layers. The correction moves by the experts' loads, not by its gradient.
  "layers/experts/router/kernel": "LDe",
  "layers/experts/router/bias": "Le",
  "layers/experts/router/correction": "Le",
  "layers/experts/gate/kernel": "LEDM",
  "layers/experts/gate/bias": "LEM",
  "layers/experts/up/kernel": "LEDM",
  "layers/experts/up/bias": "LEM",
  "layers/experts/down/kernel": "LEMD",
  "layers/experts/down/bias": "LED",
  "layers/experts/shared/gate/kernel": "LDW",
  "layers/experts/shared/up/kernel": "LDW",
  "layers/experts/shared/down/kernel": "LWD",
  "final_norm/scale": "D",
  "final_norm/bias": "D",
  "unembed/kernel": "DV",
}
EXPERTS = f"{LAYERS}experts"
# The last parts of an adapter's names.
LORA_A, LORA_B = "lora_a", "lora_b"

LINEARS = ("query", "key", "value", "out", "gate", "up", "down")
# Values of `model.biases` that stand for several of them. GPT-2's `all` has no gate.
BIASES = {
  "none": (),
  "qkv": ("query", "key", "value"),
  "attention": ("query", "key", "value", "out"),
  "mlp": ("gate", "up", "down"),
  "all": ("query", "key", "value", "out", "up", "down"),
}


def has_bias(name: str, model: DecoderSpec) -> bool:
  """Returns whether a linear layer, one of LINEARS, has a bias if it is there.

  Of latent attention, the projections down to latent vectors have in place of the queries'.
  """
  if name == "query" and is_latent(model):
    return False
  return any(name in BIASES.get(part, (part,)) for part in model.biases.split(","))


# In place of those of one head, with model.query_key_norm_across_heads.
ACROSS_HEADS = {
  "layers/attention/query_norm/scale": "LNH",
  "layers/attention/key_norm/scale": "LKH",
}
# Letters of kernels that give what latent attention computes of each token.
DOWN_PROJECTIONS = ("LDq", "LDc", "LDI")
# In place of the others, with model.attention="latent".
OF_LATENTS = {"layers/attention/out/kernel": "LNUD"}
# Likewise, where queries have a latent vector too.
OF_QUERY_LATENTS = {"layers/attention/query/kernel": "LQNH"}


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


def _has_query_latents(model: DecoderSpec) -> bool:
  return is_latent(model) and model.query_latent_size > 0


# Optional parameters: a part of their pattern -> whether a config has them.
_WHEN: dict[str, Callable[[DecoderSpec], bool]] = {
  "positions/": lambda m: m.positions == "learned",
  "norm/bias": lambda m: m.norm == "layer",
  **{f"attention/{name}/bias": functools.partial(has_bias, name) for name in LINEARS[:4]},
  **{f"mlp/{name}/bias": functools.partial(has_bias, name) for name in LINEARS[4:]},
  "latent/bias": functools.partial(has_bias, "out"),
  "rotary_key/bias": functools.partial(has_bias, "out"),
  "(query|key)_norm": lambda m: m.query_key_norm,
  "attention/sinks": lambda m: m.attention_sinks,
  "(key|value)/": lambda m: not is_latent(m),
  "attention/key/": lambda m: not is_latent(m),
  "attention/value/": lambda m: not is_latent(m),
  "attention/query_latent": _has_query_latents,
  "attention/latent": is_latent,
  "attention/rotary_key": is_latent,
  "attention/key_value": is_latent,
  "attention_norm": lambda m: m.pre_norms,
  "mlp_norm": lambda m: m.pre_norms,
  "post_norm": lambda m: m.post_norms,
  "mlp/gate": lambda m: m.gated,
  "unembed": lambda m: not m.tied_embeddings,
  "layers/experts/": lambda m: m.experts > 0,
  "experts/router/bias": lambda m: m.router_bias,
  "experts/router/correction": lambda m: m.router_correction,
  "experts/shared": lambda m: m.shared_feedforward_size > 0,
  **{f"experts/{name}/bias": lambda m: m.expert_biases for name in LINEARS[4:]},
}


def _in_two_stacks(spec: DecoderSpec, table: dict[str, str]) -> dict[str, str]:
  """Returns the table with the layers' rows for the sparse layers, and again for dense ones."""
  sparse = {
    name: dims
    for name, dims in table.items()
    if not name.startswith(f"{LAYERS}mlp/") and (sparse_layers(spec) or LAYERS not in name)
  }
  dense = {
    f"{DENSE_LAYERS}{name.removeprefix(LAYERS)}": f"Z{dims[1:]}"
    for name, dims in table.items()
    if name.startswith(LAYERS) and "experts/" not in name
  }
  return sparse | (dense if beside_sparse(spec) else {})
