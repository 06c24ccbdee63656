"""The families of decoders that are read and written: a row for each model_type of transformers.

A row says what config.json has, in parts of `hf_parts.py`, and which tensors the weights have, in
the tables of the first half of this page. A new family is one more row. Nothing here imports JAX.

A table of tensors has a row for each: its name, with {} for the number of the layer, and a second
one for that of the expert; its dims, in the letters of the modules' `dims`, those of an axis
written together; and our parameters. So `("NH D", "layers/attention/query/kernel")` is a matrix
[N * H, D] of what is [D, N, H] here. A fused tensor joins several parameters along one axis, one
after the other, `("NH+KH+KH D", query, key, value)`, or some elements of each in turn, as often as
letters before a colon say: `("D M:M+M", gate, up)`, one of each; `("N:NH+NH D", query, gate)`,
those of a head. A tensor of all experts has them first: `("E M+M D", gate, up)`. A row whose
parameters a model does not have, or has with other dims, is left out: so optional ones (biases,
norms of heads) follow the config.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from interop import hf_mixers
from interop import hf_parts as parts
from interop.hf_parts import Part, choice, field, flag, number, optional, rope, rope_by_layer
from runtime import forms

# ------------------------------ tensors ------------------------------

Row = tuple[str, ...]  # the dims, and our parameters
LAYER = "model.layers.{}."


@dataclasses.dataclass(frozen=True)
class Further:
  """The tensors of the layers that predict further tokens, `model.mtp_layers`.

  Attributes:
    key: in config.json, how many there are.
    block: how names of their blocks begin, in place of LAYER; {} is the number of the layer.
    rows: of what they have beside the block; without {}, there is one such layer at most.
    behind: whether their numbers follow those of the model's layers.
  """

  key: str
  block: str
  rows: Mapping[str, Row]
  behind: bool = False


@dataclasses.dataclass(frozen=True)
class Names:
  """The tensors of a family.

  Attributes:
    rows: tensor name -> row.
    prefix: of all names but the logits'; a folder may leave it out everywhere.
    inner: beginnings of names in the folder of a model of which this is a part -> what they are.
    unused: patterns of tensors without parameters: buffers that the code computes itself, and
      layers that only training has; {} is the number of layers.
    tied: (the logits' tensor, the embedding's): the first may be stored although it is the second.
    others: rows of which a folder may have one table's in place of those in `rows` with the same
      parameters; they are read, and not written.
    instead: rows of names in `rows` for models that have other parameters in these tensors.
    also: names in `rows` -> by which else a folder may have these tensors; read, and not written.
    further: of layers that predict further tokens; None: the family has none.
  """

  rows: Mapping[str, Row]
  prefix: str = "model."
  inner: Mapping[str, str] = dataclasses.field(default_factory=dict)
  unused: tuple[str, ...] = ("model.layers.*.self_attn.rotary_emb.inv_freq",)
  tied: tuple[str, str] = ("lm_head.weight", "model.embed_tokens.weight")
  others: tuple[Mapping[str, Row], ...] = ()
  instead: Mapping[str, Row] = dataclasses.field(default_factory=dict)
  also: Mapping[str, str] = dataclasses.field(default_factory=dict)
  further: Further | None = None


def _rows(start: str, *modules: tuple[str, ...]) -> dict[str, Row]:
  """Returns the rows of modules: of their weights, and of the biases of linear layers.

  Args:
    start: of their names.
    *modules: name, dims of the weight, and our modules within a layer; kernels have two axes, of
      which the outputs come first, norms one.
  """
  rows: dict[str, Row] = {}
  for name, dims, *ours in modules:
    weight = "kernel" if " " in dims else "scale"
    rows[f"{start}{name}.weight"] = (dims, *(f"layers/{one}/{weight}" for one in ours))
    if " " in dims:
      rows[f"{start}{name}.bias"] = (dims.split()[0], *(f"layers/{one}/bias" for one in ours))
  return rows


QKV = ("attention/query", "attention/key", "attention/value")


def _ends(embedding: str = "model.embed_tokens", norm: str = "model.norm") -> dict[str, Row]:
  """Returns the rows of the embedding, the last norm and the logits."""
  return {
    f"{embedding}.weight": ("V D", "embed/table"),
    f"{norm}.weight": ("D", "final_norm/scale"),
    "lm_head.weight": ("V D", "unembed/kernel"),
  }


def _attention(start: str, out: str = "o_proj") -> dict[str, Row]:
  """Returns the rows of the four kernels of attention, whose names begin so."""
  return _rows(
    start,
    ("q_proj", "NH D", "attention/query"),
    ("k_proj", "KH D", "attention/key"),
    ("v_proj", "KH D", "attention/value"),
    (out, "D NH", "attention/out"),
  )


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def _gated(
  start: str, ours: str = "mlp", width: str = "F", names: tuple[str, ...] = _PROJECTIONS
) -> dict[str, Row]:
  """Returns the rows of the three kernels of an MLP, with its name and the letter of its width."""
  inner, outer = f"{width} D", f"D {width}"
  pairs = zip(names, ("gate", "up", "down"), (inner, inner, outer), strict=True)
  return _rows(start, *((name, dims, f"{ours}/{one}") for name, one, dims in pairs))


ENDS = _ends()
NORMS = _rows(
  LAYER,
  ("input_layernorm", "D", "attention_norm"),
  ("post_attention_layernorm", "D", "mlp_norm"),
)
# Norms after the two parts of a layer alone.
POST_NORMS = _rows(
  LAYER,
  ("post_attention_layernorm", "D", "attention_post_norm"),
  ("post_feedforward_layernorm", "D", "mlp_post_norm"),
)
# Norms before and after each of the two parts of a layer.
FOUR_NORMS = {
  **NORMS,
  **POST_NORMS,
  **_rows(LAYER, ("pre_feedforward_layernorm", "D", "mlp_norm")),
}
ATTENTION = _attention(f"{LAYER}self_attn.") | _rows(
  f"{LAYER}self_attn.",
  ("q_norm", "H", "attention/query_norm"),
  ("k_norm", "H", "attention/key_norm"),
)
# Norms of queries and keys across heads.
NORMS_ACROSS_HEADS = _rows(
  f"{LAYER}self_attn.",
  ("q_norm", "NH", "attention/query_norm"),
  ("k_norm", "KH", "attention/key_norm"),
)
# Queries have a latent vector, or they have none.
LATENT_ATTENTION = _rows(
  f"{LAYER}self_attn.",
  ("q_proj", "NH D", "attention/query"),
  ("q_a_proj", "q D", "attention/query_latent"),
  ("q_a_layernorm", "Q", "attention/query_latent_norm"),
  ("q_b_proj", "NH Q", "attention/query"),
  ("kv_a_proj_with_mqa", "c+I D", "attention/latent", "attention/rotary_key"),
  ("kv_a_layernorm", "C", "attention/latent_norm"),
  ("kv_b_proj", "KJ C", "attention/key_value"),
  ("o_proj", "D NU", "attention/out"),
)
MLP = _gated(f"{LAYER}mlp.")
FUSED = {
  **_rows(
    f"{LAYER}self_attn.", ("qkv_proj", "NH+KH+KH D", *QKV), ("o_proj", "D NH", "attention/out")
  ),
  **_rows(
    f"{LAYER}mlp.",
    ("gate_up_proj", "F+F D", "mlp/gate", "mlp/up"),
    ("down_proj", "D F", "mlp/down"),
  ),
}
LLAMA = Names({**ENDS, **NORMS, **ATTENTION, **MLP})
OLMO_2 = Names({**ENDS, **ATTENTION, **POST_NORMS, **NORMS_ACROSS_HEADS, **MLP})
GEMMA_2 = Names({**ENDS, **FOUR_NORMS, **ATTENTION, **MLP})


def _also_seeing(names: Names) -> Names:
  """Returns names that are also of a folder with images, as transformers 4 and 5 write it."""
  inner = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
  }
  seeing = ("vision_tower.*", "vision_model.*", "multi_modal_projector.*")
  unused = (*names.unused, *seeing, *(f"model.{one}" for one in seeing))
  return dataclasses.replace(names, inner=inner, unused=unused)


MISTRAL, GEMMA_3 = _also_seeing(LLAMA), _also_seeing(GEMMA_2)


def _gpt_2_rows() -> dict[str, Row]:
  """Returns the rows of GPT-2, whose kernels are stored as they multiply, [in, out]."""
  rows: dict[str, Row] = {
    **_ends("transformer.wte", "transformer.ln_f"),
    "transformer.wpe.weight": ("P D", "positions/table"),
    "transformer.ln_f.bias": ("D", "final_norm/bias"),
  }
  for name, dims, *ours in (
    ("ln_1", "D", "attention_norm"),
    ("attn.c_attn", "D NH+KH+KH", *QKV),
    ("attn.c_proj", "NH D", "attention/out"),
    ("ln_2", "D", "mlp_norm"),
    ("mlp.c_fc", "D F", "mlp/up"),
    ("mlp.c_proj", "F D", "mlp/down"),
  ):
    rows |= _rows("transformer.h.{}.", (name, dims, *ours))
    rows[f"transformer.h.{{}}.{name}.bias"] = (
      dims.split()[-1],
      *(f"layers/{one}/bias" for one in ours),
    )
  return rows


GPT_2 = Names(
  _gpt_2_rows(),
  prefix="transformer.",
  unused=("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"),
  tied=("lm_head.weight", "transformer.wte.weight"),
)

_EXPERTS = "layers/experts"
_GATE_UP = (f"{_EXPERTS}/gate/kernel", f"{_EXPERTS}/up/kernel")
ROUTER: dict[str, Row] = {f"{LAYER}mlp.gate.weight": ("e D", f"{_EXPERTS}/router/kernel")}


EXPERTS = _gated(f"{LAYER}mlp.experts.{{}}.", "experts", "M")
# As version 5 of transformers has them in memory.
MERGED_EXPERTS: dict[str, Row] = {
  f"{LAYER}mlp.experts.gate_up_proj": ("E M+M D", *_GATE_UP),
  f"{LAYER}mlp.experts.down_proj": ("E D M", f"{_EXPERTS}/down/kernel"),
}
_MIXTRAL_EXPERTS = _gated(
  f"{LAYER}block_sparse_moe.experts.{{}}.", "experts", "M", ("w1", "w3", "w2")
)
MIXTRAL = Names(
  {
    **ENDS,
    **NORMS,
    **ATTENTION,
    f"{LAYER}block_sparse_moe.gate.weight": ("e D", f"{_EXPERTS}/router/kernel"),
    **_MIXTRAL_EXPERTS,
  },
  others=(ROUTER, MERGED_EXPERTS),
)
QWEN_3_MOE = Names(
  {**ENDS, **NORMS, **ATTENTION, **MLP, **ROUTER, **EXPERTS}, others=(MERGED_EXPERTS,)
)
OLMOE = Names({**QWEN_3_MOE.rows, **NORMS_ACROSS_HEADS}, others=(MERGED_EXPERTS,))
# Beside dense layers, and shared ones.
DEEPSEEK_EXPERTS = {
  **MLP,
  **ROUTER,
  f"{LAYER}mlp.gate.e_score_correction_bias": ("e", f"{_EXPERTS}/router/correction"),
  **EXPERTS,
  **_gated(f"{LAYER}mlp.shared_experts.", "experts/shared", "W"),
}


def _further(key: str, block: str, *names: str, **more: Any) -> Further:
  """Returns the tensors of further layers: names of the two norms, projection and last norm."""
  embedding, hidden, both, out = names
  rows: dict[str, Row] = {
    embedding: ("D", "mtp_layers/embedding_norm/scale"),
    hidden: ("D", "mtp_layers/hidden_norm/scale"),
    both: ("O D+D", "mtp_layers/from_embedding/kernel", "mtp_layers/from_hidden/kernel"),
    out: ("D", "mtp_layers/out_norm/scale"),
  }
  return Further(key, block, {f"{name}.weight": row for name, row in rows.items()}, **more)


DEEPSEEK = Names(
  {**ENDS, **NORMS, **LATENT_ATTENTION, **DEEPSEEK_EXPERTS},
  # The layer behind the last predicts a further token; of its copies of embedding and head, too.
  unused=("model.layers.*.self_attn.rotary_emb.inv_freq", "model.layers.{}.*"),
  others=(MERGED_EXPERTS,),
  further=_further(
    *("num_nextn_predict_layers", LAYER, f"{LAYER}enorm", f"{LAYER}hnorm", f"{LAYER}eh_proj"),
    *(f"{LAYER}shared_head.norm",),
    behind=True,
  ),
)
GLM_4_MOE = dataclasses.replace(DEEPSEEK, rows={**ENDS, **NORMS, **ATTENTION, **DEEPSEEK_EXPERTS})
_APART = {name: row for name, row in DEEPSEEK.rows.items() if name not in EXPERTS}
MISTRAL_4 = _also_seeing(
  dataclasses.replace(DEEPSEEK, rows={**_APART, **MERGED_EXPERTS}, others=(EXPERTS,), further=None)
)
# Kernels of experts are stored as they multiply, [in, out].
LLAMA_4 = _also_seeing(
  Names(
    {
      **{**ENDS, **NORMS, **ATTENTION},
      **_gated(f"{LAYER}feed_forward."),
      **_gated(f"{LAYER}feed_forward.shared_expert.", "experts/shared", "W"),
      f"{LAYER}feed_forward.router.weight": ("e D", f"{_EXPERTS}/router/kernel"),
      f"{LAYER}feed_forward.experts.gate_up_proj": ("E D M+M", *_GATE_UP),
      f"{LAYER}feed_forward.experts.down_proj": ("E M D", f"{_EXPERTS}/down/kernel"),
    }
  )
)
# Kernels of experts are stored as they multiply, [in, out]; in MXFP4 as [out, in].
GPT_OSS = Names(
  {
    **ENDS,
    **NORMS,
    **ATTENTION,
    f"{LAYER}self_attn.sinks": ("N", "layers/attention/sinks"),
    f"{LAYER}mlp.router.weight": ("e D", f"{_EXPERTS}/router/kernel"),
    f"{LAYER}mlp.router.bias": ("e", f"{_EXPERTS}/router/bias"),
    f"{LAYER}mlp.experts.gate_up_proj": ("E D M:M+M", *_GATE_UP),
    f"{LAYER}mlp.experts.gate_up_proj_bias": (
      *("E M:M+M", f"{_EXPERTS}/gate/bias", f"{_EXPERTS}/up/bias"),
    ),
    f"{LAYER}mlp.experts.down_proj": ("E M D", f"{_EXPERTS}/down/kernel"),
    f"{LAYER}mlp.experts.down_proj_bias": ("E D", f"{_EXPERTS}/down/bias"),
  },
  others=(
    {f"{LAYER}mlp.experts.gate_up_proj_blocks": ("E M:M+M D", *_GATE_UP)},
    {f"{LAYER}mlp.experts.down_proj_blocks": ("E D M", f"{_EXPERTS}/down/kernel")},
  ),
)

LFM_2 = Names(
  {
    **_ends(norm="model.embedding_norm"),
    **_attention(f"{LAYER}self_attn.", "out_proj"),
    **_gated(f"{LAYER}feed_forward.", names=("w1", "w3", "w2")),
    **_rows(
      LAYER,
      ("operator_norm", "D", "attention_norm"),
      ("ffn_norm", "D", "mlp_norm"),
      ("self_attn.q_layernorm", "H", "attention/query_norm"),
      ("self_attn.k_layernorm", "H", "attention/key_norm"),
      (
        *("conv.in_proj", "X+X+X D"),
        *("attention/input_gate", "attention/output_gate", "attention/channels"),
      ),
      ("conv.out_proj", "D X", "attention/out"),
    ),
    f"{LAYER}conv.conv.weight": ("X 1 w", "layers/attention/taps"),
  },
)
BAMBA = Names(
  {
    **_ends(norm="model.final_layernorm"),
    **ATTENTION,
    **hf_mixers.mamba_tensors(f"{LAYER}mamba."),
    **_rows(
      LAYER, ("input_layernorm", "D", "attention_norm"), ("pre_ff_layernorm", "D", "mlp_norm")
    ),
    **_gated(f"{LAYER}feed_forward."),
  }
)
FALCON_H1 = Names({**BAMBA.rows, **hf_mixers.mamba_tensors(f"{LAYER}mamba.", "layers/mixer/")})
GRANITE_HYBRID = Names(
  {
    **ENDS,
    **NORMS,
    **ATTENTION,
    **hf_mixers.mamba_tensors(f"{LAYER}mamba."),
    **_rows(
      f"{LAYER}shared_mlp.",
      ("input_linear", "F+F D", "mlp/gate", "mlp/up"),
      ("output_linear", "D F", "mlp/down"),
    ),
    f"{LAYER}block_sparse_moe.router.layer.weight": ("e D", f"{_EXPERTS}/router/kernel"),
    f"{LAYER}block_sparse_moe.input_linear.weight": ("E M+M D", *_GATE_UP),
    f"{LAYER}block_sparse_moe.output_linear.weight": ("E D M", f"{_EXPERTS}/down/kernel"),
  },
  instead=_rows(
    f"{LAYER}shared_mlp.",
    ("input_linear", "W+W D", "experts/shared/gate", "experts/shared/up"),
    ("output_linear", "D W", "experts/shared/down"),
  ),
)

_NEMOTRON_LAYER = "backbone.layers.{}."
NEMOTRON_H = Names(
  {
    **_ends("backbone.embeddings", "backbone.norm_f"),
    **_rows(_NEMOTRON_LAYER, ("norm", "D", "attention_norm")),
    **hf_mixers.mamba_tensors(f"{_NEMOTRON_LAYER}mixer."),
    **_attention(f"{_NEMOTRON_LAYER}mixer."),
    **_rows(
      f"{_NEMOTRON_LAYER}mixer.",
      ("up_proj", "F D", "mlp/up"),
      ("down_proj", "D F", "mlp/down"),
      ("gate", "e D", "experts/router"),
      ("experts.{}.up_proj", "M D", "experts/up"),
      ("experts.{}.down_proj", "D M", "experts/down"),
      ("shared_experts.up_proj", "W D", "experts/shared/up"),
      ("shared_experts.down_proj", "D W", "experts/shared/down"),
    ),
    f"{_NEMOTRON_LAYER}mixer.gate.e_score_correction_bias": (
      *("e", f"{_EXPERTS}/router/correction"),
    ),
  },
  prefix="backbone.",
  inner={"model.": "backbone."},
  unused=("mtp.*",),
  tied=("lm_head.weight", "backbone.embeddings.weight"),
  instead=_rows(_NEMOTRON_LAYER, ("norm", "D", "mlp_norm")),
)

# Queries and gates of a head are side by side; so is what Gated DeltaNet reads of a key head.
_GATED_ATTENTION: dict[str, Row] = {
  **ATTENTION,
  **_rows(f"{LAYER}self_attn.", ("q_proj", "N:NH+NH D", "attention/query", "attention/gate")),
}
_GATED_DELTA: dict[str, Row] = {
  f"{LAYER}linear_attn.conv1d.weight": (
    "Gh+Gh+Au 1 w",
    *(f"layers/attention/{one}_taps" for one in ("query", "key", "value")),
  ),
  f"{LAYER}linear_attn.A_log": ("A", "layers/attention/log_factor"),
  f"{LAYER}linear_attn.dt_bias": ("A", "layers/attention/step_bias"),
  **_rows(
    f"{LAYER}linear_attn.", ("norm", "u", "attention/norm"), ("out_proj", "D Au", "attention/out")
  ),
}
_SHARED_EXPERT: dict[str, Row] = {
  **_gated(f"{LAYER}mlp.shared_expert.", "experts/shared", "W"),
  f"{LAYER}mlp.shared_expert_gate.weight": ("1 D", f"{_EXPERTS}/shared_gate"),
}
_MTP_UNUSED = ("mtp.*",)
_QWEN_FURTHER = (
  *("mtp.layers.{}.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
)
QWEN_3_NEXT = Names(
  {
    **{**ENDS, **NORMS, **_GATED_ATTENTION, **_GATED_DELTA},
    **_rows(
      f"{LAYER}linear_attn.",
      ("in_proj_qkvz", "G:Gh+Gh+Au+Au D", *QKV, "attention/gate"),
      ("in_proj_ba", "G:A+A D", "attention/strength", "attention/decay"),
    ),
    **{**MLP, **ROUTER, **EXPERTS, **_SHARED_EXPERT},
  },
  unused=_MTP_UNUSED,
  others=(MERGED_EXPERTS,),
  further=_further("num_nextn_predict_layers", *_QWEN_FURTHER),
)
QWEN_3_5 = Names(
  {
    **{**ENDS, **NORMS, **_GATED_ATTENTION, **_GATED_DELTA},
    **_rows(
      f"{LAYER}linear_attn.",
      ("in_proj_qkv", "Gh+Gh+Au D", *QKV),
      ("in_proj_z", "Au D", "attention/gate"),
      ("in_proj_b", "A D", "attention/strength"),
      ("in_proj_a", "A D", "attention/decay"),
    ),
    **MLP,
  },
  inner={"model.language_model.": "model."},
  unused=("model.visual.*", *_MTP_UNUSED),
  further=_further("mtp_num_hidden_layers", *_QWEN_FURTHER),
)
QWEN_3_5_MOE = dataclasses.replace(
  QWEN_3_5,
  rows={**QWEN_3_5.rows, **ROUTER, **EXPERTS, **_SHARED_EXPERT},
  others=(MERGED_EXPERTS,),
)

# As published.
OLMO_HYBRID = Names(
  {
    **OLMO_2.rows,
    **_rows(
      LAYER,
      ("attention_layer_norm", "D", "attention_norm"),
      ("feedforward_layer_norm", "D", "mlp_norm"),
    ),
    **_rows(
      f"{LAYER}linear_attn.",
      ("q_proj", "Gh D", "attention/query"),
      ("k_proj", "Gh D", "attention/key"),
      ("v_proj", "Au D", "attention/value"),
      ("g_proj", "Au D", "attention/gate"),
      ("a_proj", "A D", "attention/decay"),
      ("b_proj", "A D", "attention/strength"),
      ("o_norm", "u", "attention/norm"),
    ),
    # Not its bias, which attention alone may have.
    f"{LAYER}linear_attn.o_proj.weight": ("D Au", "layers/attention/out/kernel"),
    f"{LAYER}linear_attn.q_conv1d.weight": ("Gh 1 w", "layers/attention/query_taps"),
    f"{LAYER}linear_attn.k_conv1d.weight": ("Gh 1 w", "layers/attention/key_taps"),
    f"{LAYER}linear_attn.v_conv1d.weight": ("Au 1 w", "layers/attention/value_taps"),
    f"{LAYER}linear_attn.A_log": ("A", "layers/attention/log_factor"),
    f"{LAYER}linear_attn.dt_bias": ("A", "layers/attention/step_bias"),
  },
  # As version 5.23 of transformers names the norm after attention in files that it writes.
  also={
    f"{LAYER}post_attention_layernorm.weight": f"{LAYER}feedforward_layer_norm.weight",
  },
)
KIMI_LINEAR = Names(
  {
    **{**ENDS, **NORMS, **LATENT_ATTENTION, **MLP},
    **_rows(
      f"{LAYER}self_attn.",
      ("q_proj", "NH D", "attention/query"),
      ("k_proj", "Gh D", "attention/key"),
      ("v_proj", "Au D", "attention/value"),
      ("b_proj", "A D", "attention/strength"),
      ("f_a_proj", "j D", "attention/decay_latent"),
      ("f_b_proj", "Ah j", "attention/decay"),
      ("g_a_proj", "i D", "attention/gate_latent"),
      ("g_b_proj", "Au i", "attention/gate"),
      ("o_norm", "u", "attention/norm"),
      ("o_proj", "D NU", "attention/out"),
    ),
    f"{LAYER}self_attn.q_conv1d.weight": ("Gh 1 w", "layers/attention/query_taps"),
    f"{LAYER}self_attn.k_conv1d.weight": ("Gh 1 w", "layers/attention/key_taps"),
    f"{LAYER}self_attn.v_conv1d.weight": ("Au 1 w", "layers/attention/value_taps"),
    f"{LAYER}self_attn.A_log": ("1 1 A 1", "layers/attention/log_factor"),
    f"{LAYER}self_attn.dt_bias": ("Ah", "layers/attention/step_bias"),
    f"{LAYER}block_sparse_moe.gate.weight": ("e D", f"{_EXPERTS}/router/kernel"),
    f"{LAYER}block_sparse_moe.gate.e_score_correction_bias": (
      *("e", f"{_EXPERTS}/router/correction"),
    ),
    **_MIXTRAL_EXPERTS,
    **_gated(f"{LAYER}block_sparse_moe.shared_experts.", "experts/shared", "W"),
  },
  # As version 5.23 of transformers names the MLP of a dense layer that it writes.
  others=(_gated(f"{LAYER}block_sparse_moe."),),
  # Of layers with Kimi Delta Attention.
  instead=_rows(
    f"{LAYER}self_attn.", ("q_proj", "Gh D", "attention/query"), ("o_proj", "D Au", "attention/out")
  ),
)
MINIMAX = Names(
  {
    **MIXTRAL.rows,
    **_rows(
      f"{LAYER}self_attn.",
      ("qkv_proj", "G:Gh+Gh+Au D", *QKV),
      ("output_gate", "Au D", "attention/gate"),
      ("out_proj", "D Au", "attention/out"),
    ),
    f"{LAYER}self_attn.norm.weight": ("Au", "layers/attention/norm/scale"),
  },
  others=MIXTRAL.others,
  unused=("model.layers.*.self_attn.slope_rate", "model.layers.*.self_attn.*_decay"),
)

# ------------------------------ config.json ------------------------------


@dataclasses.dataclass(frozen=True)
class Family:
  """What the config.json of a model_type says and leaves out, and which tensors there are.

  Attributes:
    architecture: the class that transformers loads.
    names: of the tensors.
    defaults: of keys that a config.json may lack: those of transformers, versions 4.57 and 5.
    parts: read and write the keys.
    fixed: keys of `model` that are the same in all models of the family.
    only: further keys -> (the values that can be expressed, the first its default; why).
    ignored: further keys without effect on what the model computes.
    positions: the key with the longest row that the model was trained for.
  """

  architecture: str
  names: Names
  defaults: Mapping[str, Any]
  parts: tuple[Part, ...]
  fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  only: Mapping[str, tuple[tuple[Any, ...], str]] = dataclasses.field(default_factory=dict)
  ignored: tuple[str, ...] = ()
  positions: str = "max_position_embeddings"


_SIZES = (
  *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
  *("num_key_value_heads", "vocab_size", "max_position_embeddings", "rms_norm_eps"),
)


def _defaults(*sizes: float | None, **more: Any) -> dict[str, Any]:
  """Returns the defaults of a family: of the keys _SIZES in turn, and of others."""
  found = dict(zip(_SIZES, sizes, strict=True))
  return {**found, "hidden_act": "silu", "tie_word_embeddings": False, **more}


_ENDS = (
  field("vocab_size", "vocabulary_size"),
  number("rms_norm_eps", "norm_epsilon"),
  flag("tie_word_embeddings", "tied_embeddings"),
)
_STACK = (
  field("num_hidden_layers", "layers"),
  field("hidden_size", "model_size"),
  field("intermediate_size", "feedforward_size"),
)
_HEADS = (field("num_attention_heads", "heads"), parts.KV_HEADS, parts.HEAD_SIZE)
_COMMON = (*_STACK, *_HEADS, *_ENDS)
_SILU = choice("hidden_act", "activation", parts.ACTIVATIONS)
_PLAIN = (*_COMMON, parts.SCALE, _SILU)
# In `attention_bias` alone, ONLY of `hf_config.py` says that there is no mlp_bias.
_BIASES = parts.biases(attention_bias="attention")
_MLP_BIASES = parts.biases(attention_bias="attention", mlp_bias="mlp")
_MIXTURE = (parts.EXPERTS_PER_TOKEN, parts.EXPERT_WIDTH_OF_ALL)
# Of training and of what is returned beside the logits.
_EXPERTS_IGNORED = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
_QWEN = {"use_sliding_window": False, "sliding_window": 4096}

_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "head_dim": 256, "tie_word_embeddings": True}
_GEMMA_2 = {**_GEMMA, "query_pre_attn_scalar": 256, "sliding_window": 4096}
_GEMMA_2_PARTS = (
  *(*_COMMON, parts.QUERY_SCALE, _BIASES),
  choice("hidden_activation", "activation", parts.ACTIVATIONS),
  optional("final_logit_softcapping", "logits_soft_cap"),
)
_GEMMA_2_IGNORED = ("hidden_act", "cache_implementation")
_GEMMA_FIXED = {"norm_scale_from_one": True, "scaled_embeddings": True}
_GEMMA_2_FIXED = {**_GEMMA_FIXED, "post_norms": True}
_NORM_ACROSS_HEADS = {"query_key_norm": True, "query_key_norm_across_heads": True}
_OLMO_FIXED = {"pre_norms": False, "post_norms": True, **_NORM_ACROSS_HEADS}

_GRANITE = {
  "attention_multiplier": 1.0,
  "embedding_multiplier": 1.0,
  "residual_multiplier": 1.0,
  "logits_scaling": 1.0,
}
_MULTIPLIERS = (
  number("attention_multiplier", "attention_scale"),
  number("embedding_multiplier", "embedding_multiplier"),
  number("residual_multiplier", "residual_multiplier"),
  number("logits_scaling", "logits_divisor"),
)
_MAMBA = {
  "mamba_n_heads": 128,
  "mamba_n_groups": 1,
  "mamba_d_state": 256,
  "mamba_d_conv": 4,
  "mamba_expand": 2,
}


def _latent(latent: int, nope: int, query_latent: int | None = None) -> dict[str, Any]:
  """Returns the defaults of latent attention, by three of its sizes."""
  found = {"kv_lora_rank": latent, "qk_nope_head_dim": nope, "v_head_dim": 128}
  return {**found, "qk_rope_head_dim": 64, "q_lora_rank": query_latent}


_ROUTED_KEYS = (
  *("first_k_dense_replace", "n_routed_experts", "n_shared_experts", "num_experts_per_tok"),
  *("moe_intermediate_size", "n_group", "topk_group", "routed_scaling_factor"),
)


def _routed(*values: float | None, **more: Any) -> dict[str, Any]:
  """Returns the defaults of DeepSeek's experts: of _ROUTED_KEYS in turn, and of others."""
  return {**dict(zip(_ROUTED_KEYS, values, strict=True)), **more}


# Norms of latent vectors have an epsilon of 1e-6, whatever the others have.
_LATENT_PARTS = (*_STACK, *parts.LATENT, *_ENDS, _BIASES, _SILU)
_DEEPSEEK_PARTS = (*_LATENT_PARTS, parts.LATENT_ROPE)
_DEEPSEEK_EXPERTS = (
  field("n_routed_experts", "experts"),
  number("routed_scaling_factor", "router_scale"),
  *(parts.EXPERTS_PER_TOKEN, parts.EXPERT_WIDTH, parts.shared_experts("n_shared_experts")),
  parts.only("moe_layer_freq", 1),
)
_ROUTED = (*_DEEPSEEK_EXPERTS, *parts.ROUTER_GROUPS, parts.ROUTER_NORMALIZED)
_DEEPSEEK_IGNORED = (
  *("aux_loss_alpha", "seq_aux", "ep_size", "num_mtp_layers", "num_nextn_predict_layers"),
  *_EXPERTS_IGNORED,
)
_LINEAR = {
  "head_dim": 256,
  "partial_rotary_factor": 0.25,
  "linear_conv_kernel_dim": 4,
  "linear_key_head_dim": 128,
  "linear_value_head_dim": 128,
  "linear_num_key_heads": 16,
  "linear_num_value_heads": 32,
  "full_attention_interval": 4,
}
_LINEAR_EXPERTS = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
_LINEAR_FIXED = {"query_key_norm": True, "norm_scale_from_one": True, "attention_gate": True}
_SHARED_GATE = field("shared_expert_intermediate_size", "shared_feedforward_size")
_LINEAR_IGNORED = (
  *("mamba_ssm_dtype", "mtp_use_dedicated_embeddings", "mtp_num_hidden_layers"),
  "num_nextn_predict_layers",
)
_OUTPUT_GATE = {"attn_output_gate": ((True, None), "attention of this family has a gate")}


def _mistral_yarn(theta: float, factor: float, length: int) -> dict[str, Any]:
  """Returns rope_parameters of a file of Mistral's newer models that says nothing of it."""
  numbers = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
  found = {"rope_type": "yarn", "rope_theta": theta, "factor": factor, **numbers}
  return {**found, "original_max_position_embeddings": length, "llama_4_scaling_beta": 0.1}


_GPT_OSS_YARN = {
  "rope_type": "yarn",
  "factor": 32.0,
  "beta_fast": 32.0,
  "beta_slow": 1.0,
  "truncate": False,
  "original_max_position_embeddings": 4096,
}

# In the order in which `hf_config.write` tries them.
FAMILIES: dict[str, Family] = {
  "llama": Family(
    *("LlamaForCausalLM", LLAMA),
    _defaults(4096, 11_008, 32, 32, None, 32_000, 2048, 1e-6),
    (*_PLAIN, _MLP_BIASES, rope()),
  ),
  "mistral": Family(
    *("MistralForCausalLM", MISTRAL),
    _defaults(4096, 14_336, 32, 32, 8, 32_000, 131_072, 1e-6, sliding_window=4096),
    (*_PLAIN, parts.WINDOW, rope()),
  ),
  "ministral3": Family(
    *("Ministral3ForCausalLM", MISTRAL),
    _defaults(4096, 14_336, 34, 32, 8, 131_072, 262_144, 1e-5, head_dim=128),
    (
      *(*_PLAIN, parts.WINDOW),
      parts.tempered(rope(), _mistral_yarn(1e6, 16.0, 16_384), lambda theirs: 1.0),
    ),
  ),
  "qwen2": Family(
    *("Qwen2ForCausalLM", LLAMA),
    _defaults(4096, 22_016, 32, 32, 32, 151_936, 32_768, 1e-6, **_QWEN, max_window_layers=28),
    (*_PLAIN, parts.QWEN_WINDOW, rope()),
    fixed={"biases": "qkv"},
  ),
  "qwen3": Family(
    *("Qwen3ForCausalLM", LLAMA),
    _defaults(
      *(4096, 22_016, 32, 32, 32, 151_936, 32_768, 1e-6),
      **_QWEN,
      max_window_layers=28,
      head_dim=128,
    ),
    (*_PLAIN, _BIASES, parts.QWEN_WINDOW, rope()),
    fixed={"query_key_norm": True},
  ),
  "gemma": Family(
    *("GemmaForCausalLM", LLAMA),
    _defaults(
      *(3072, 24_576, 28, 16, 16, 256_000, 8192, 1e-6),
      **{**_GEMMA, "hidden_act": "gelu_pytorch_tanh"},
    ),
    (
      *(*_COMMON, parts.SCALE, _BIASES, rope()),
      # `gelu` in a file of Gemma 1 stands for the tanh approximation that it was trained with.
      choice(
        *("hidden_act", "activation"),
        dict.fromkeys(("gelu_pytorch_tanh", "gelu", "gelu_new"), "gelu"),
      ),
    ),
    fixed=_GEMMA_FIXED,
    ignored=("hidden_activation",),
  ),
  "gemma2": Family(
    *("Gemma2ForCausalLM", GEMMA_2),
    _defaults(
      *(2304, 9216, 26, 8, 4, 256_000, 8192, 1e-6),
      **_GEMMA_2,
      attn_logit_softcapping=50.0,
      final_logit_softcapping=30.0,
    ),
    (
      *(*_GEMMA_2_PARTS, parts.alternating(2), rope()),
      optional("attn_logit_softcapping", "attention_soft_cap"),
    ),
    fixed=_GEMMA_2_FIXED,
    ignored=_GEMMA_2_IGNORED,
  ),
  "gemma3_text": Family(
    *("Gemma3ForCausalLM", GEMMA_3),
    _defaults(2304, 9216, 26, 8, 4, 262_208, 131_072, 1e-6, **_GEMMA_2),
    (
      *_GEMMA_2_PARTS,
      parts.alternating(6, "sliding_window_pattern", "_sliding_window_pattern"),
      rope_by_layer(1_000_000.0, 10_000.0, "rope_local_base_freq"),
    ),
    fixed={**_GEMMA_2_FIXED, "query_key_norm": True},
    only={
      "attn_logit_softcapping": (
        (None,),
        "transformers does not apply it in this family, so the model's own logits are not known; "
        "set it to null for those of transformers",
      ),
    },
    ignored=_GEMMA_2_IGNORED,
  ),
  "gpt2": Family(
    *("GPT2LMHeadModel", GPT_2),
    {
      "n_layer": 12,
      "n_embd": 768,
      "n_head": 12,
      "n_positions": 1024,
      "vocab_size": 50_257,
      "layer_norm_epsilon": 1e-5,
      "tie_word_embeddings": True,
      "activation_function": "gelu_new",
      "scale_attn_weights": True,
      "scale_attn_by_inverse_layer_idx": False,
    },
    (
      field("n_layer", "layers"),
      field("n_embd", "model_size"),
      field(
        "n_inner", "feedforward_size", null=lambda theirs: 4 * parts.value_of(theirs, "n_embd")
      ),
      field("n_positions", "max_positions"),
      field("vocab_size", "vocabulary_size"),
      number("layer_norm_epsilon", "norm_epsilon"),
      flag("tie_word_embeddings", "tied_embeddings"),
      parts.GPT_2_HEADS,
      flag("scale_attn_by_inverse_layer_idx", "attention_scale_by_inverse_layer"),
      choice("activation_function", "activation", {"gelu_new": "gelu", **parts.ACTIVATIONS}),
    ),
    fixed={"positions": "learned", "norm": "layer", "biases": "all", "gated": False},
    ignored=(
      *("n_ctx", "reorder_and_upcast_attn", "summary_activation", "summary_first_dropout"),
      *("summary_proj_to_labels", "summary_type", "summary_use_proj", "gradient_checkpointing"),
    ),
    positions="n_positions",
  ),
  "phi3": Family(
    *("Phi3ForCausalLM", Names({**ENDS, **NORMS, **FUSED})),
    _defaults(3072, 8192, 32, 32, None, 32_064, 4096, 1e-5, sliding_window=None),
    (*_PLAIN, parts.WINDOW, rope(partial=True, older=True)),
  ),
  "olmo2": Family(
    *("Olmo2ForCausalLM", OLMO_2),
    _defaults(4096, 11_008, 32, 32, None, 50_304, 2048, 1e-5),
    (*_PLAIN, _BIASES, rope(older=True)),
    fixed=_OLMO_FIXED,
  ),
  "olmo3": Family(
    *("Olmo3ForCausalLM", OLMO_2),
    _defaults(4096, 11_008, 32, 32, None, 50_304, 2048, 1e-5, sliding_window=4096),
    (*_PLAIN, _BIASES, parts.alternating(4), rope_by_layer(500_000.0, 500_000.0)),
    fixed=_OLMO_FIXED,
  ),
  "olmo_hybrid": Family(
    *("OlmoHybridForCausalLM", OLMO_HYBRID),
    _defaults(
      *(3840, 11_008, 32, 30, None, 100_352, 65_536, 1e-6),
      linear_conv_kernel_dim=4,
      linear_allow_neg_eigval=True,
    ),
    (*_COMMON, parts.SCALE, _BIASES, parts.only("hidden_act", "silu"), *hf_mixers.OLMO_HYBRID),
    # The norm of what a mixer computes has an epsilon of its own.
    fixed={
      **{**_OLMO_FIXED, "activation": "silu"},
      **{"mixer_pre_norms": True, "mixer_norm_epsilon": 1e-5},
    },
    ignored=hf_mixers.OLMO_IGNORED,
  ),
  "smollm3": Family(
    *("SmolLM3ForCausalLM", LLAMA),
    _defaults(
      *(2048, 11_008, 36, 16, 4, 128_256, 32_768, 1e-6),
      tie_word_embeddings=True,
      use_sliding_window=False,
      no_rope_layer_interval=4,
    ),
    (*_PLAIN, _MLP_BIASES, parts.SMOLLM_3, rope(2_000_000.0)),
  ),
  "granite": Family(
    *("GraniteForCausalLM", LLAMA),
    _defaults(
      *(4096, 11_008, 32, 32, None, 32_000, 2048, 1e-6),
      **_GRANITE,
    ),
    (*_COMMON, _SILU, _MLP_BIASES, rope(), *_MULTIPLIERS),
  ),
  "granitemoehybrid": Family(
    *("GraniteMoeHybridForCausalLM", GRANITE_HYBRID),
    _defaults(
      *(4096, 11_008, 32, 32, None, 32_000, 2048, 1e-6),
      **{**_GRANITE, **_MAMBA},
      shared_intermediate_size=1024,
      num_local_experts=8,
      num_experts_per_tok=2,
    ),
    (
      *(*_STACK[:2], *_HEADS),
      *(*_ENDS, _SILU, _BIASES, rope(), *_MULTIPLIERS),
      *(*hf_mixers.GRANITE, *hf_mixers.PLAIN),
    ),
    ignored=(*_EXPERTS_IGNORED, *hf_mixers.IGNORED),
  ),
  "lfm2": Family(
    *("Lfm2ForCausalLM", LFM_2),
    _defaults(
      *(2560, 12_288, 32, 32, 8, 65_536, 128_000, None),
      **{"norm_eps": 1e-5, "conv_L_cache": 3, "block_multiple_of": 256},
      **{"block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True},
      tie_word_embeddings=True,
    ),
    (
      *_COMMON[:2],
      *(*_HEADS, parts.SCALE),
      *(field("vocab_size", "vocabulary_size"), number("norm_eps", "norm_epsilon")),
      *(parts.LFM_2_WIDTH, parts.LFM_2_TIED, *hf_mixers.LFM_2, rope(1_000_000.0)),
      parts.only("conv_bias", False),
    ),
    fixed={"query_key_norm": True, "activation": "silu"},
    # Of the code that trained it; transformers reads none of them.
    ignored=(
      *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale"),
      *("block_use_swiglu", "block_use_xavier_init", "conv_dim", "conv_dim_out", "theta"),
      *("conv_use_xavier_init", "num_heads", "use_pos_enc"),
    ),
  ),
  "bamba": Family(
    *("BambaForCausalLM", BAMBA),
    _defaults(
      *(4096, 14_336, 32, 32, 8, 128_000, 262_144, 1e-5),
      **_MAMBA,
    ),
    (*_PLAIN, _MLP_BIASES, rope(partial=0.5), *hf_mixers.BAMBA, *hf_mixers.PLAIN),
    ignored=hf_mixers.IGNORED,
  ),
  "falcon_h1": Family(
    *("FalconH1ForCausalLM", FALCON_H1),
    _defaults(
      *(4096, 14_336, 32, 32, 8, 128_000, 8192, 1e-5),
      **{**_MAMBA, "mamba_d_ssm": 1024, "lm_head_multiplier": 1.0, "embedding_multiplier": 1.0},
      **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier"), 1.0),
      **dict.fromkeys(("key_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"), 1.0),
      mamba_rms_norm=False,
      mamba_norm_before_gate=True,
    ),
    (
      *(*_PLAIN, rope(100_000.0), number("embedding_multiplier", "embedding_multiplier")),
      field(
        *("lm_head_multiplier", "logits_divisor", forms.ABOVE_0),
        read=lambda factor: 1 / factor,
        write=lambda divisor: 1 / divisor,
      ),
      *(*hf_mixers.FALCON_H1, *hf_mixers.PLAIN),
    ),
    ignored=hf_mixers.IGNORED,
  ),
  "nemotron_h": Family(
    *("NemotronHForCausalLM", NEMOTRON_H),
    _defaults(
      *(4096, 21_504, None, 32, 8, 131_072, 4096, None),
      **{"head_dim": 128, "layer_norm_epsilon": 1e-5, "mlp_hidden_act": "relu2"},
      **{"mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128},
      conv_kernel=4,
      **_routed(None, 8, 1, 2, 7688, 1, 1, 1.0, norm_topk_prob=True),
      moe_shared_expert_intermediate_size=7688,
    ),
    (
      *(*_STACK[1:], *_HEADS, parts.SCALE, field("vocab_size", "vocabulary_size")),
      number("layer_norm_epsilon", "norm_epsilon"),
      flag("tie_word_embeddings", "tied_embeddings"),
      choice("mlp_hidden_act", "activation", parts.ACTIVATIONS),
      *(parts.biases(mlp_bias="mlp"), *hf_mixers.NEMOTRON_H, hf_mixers.NEMOTRON_EXPERTS),
    ),
    fixed={"gated": False},
    ignored=hf_mixers.NEMOTRON_IGNORED,
  ),
  "kimi_linear": Family(
    *("KimiLinearForCausalLM", KIMI_LINEAR),
    {
      **_defaults(2304, 9216, 27, 32, 32, 163_840, None, 1e-5),
      "model_max_length": 1_048_576,
      **_latent(512, 128),
      "moe_intermediate_size": 1024,
      "num_experts": 256,
      "num_experts_per_token": 8,
      "num_shared_experts": 1,
      "num_expert_group": 1,
      "topk_group": 1,
      "moe_renormalize": True,
      "routed_scaling_factor": 2.446,
      "linear_head_dim": 128,
      "linear_num_heads": 32,
      "linear_conv_kernel_dim": 4,
      "first_k_dense_replace": 1,
    },
    (
      *(*_LATENT_PARTS, hf_mixers.KIMI_LINEAR, parts.LATENT_SCALE, field("num_experts", "experts")),
      number("routed_scaling_factor", "router_scale"),
      *(field("num_experts_per_token", "experts_per_token"), parts.EXPERT_WIDTH),
      parts.shared_experts("num_shared_experts"),
      *(field("num_expert_group", "router_groups"), field("topk_group", "router_top_groups")),
      flag("moe_renormalize", "router_normalized"),
      parts.only("moe_router_activation_func", "sigmoid"),
      *(parts.only("mla_use_nope", True), parts.only("moe_layer_freq", 1)),
    ),
    fixed={"attention": "latent", **parts.CORRECTED},
    # The size of a head follows from others, and nothing is rotated.
    ignored=(
      *("head_dim", "rope_theta", "rope_scaling", "use_grouped_topk", "num_nextn_predict_layers"),
      *("output_router_logits", "max_position_embeddings"),
    ),
    positions="model_max_length",
  ),
  "minimax": Family(
    *("MiniMaxForCausalLM", MINIMAX),
    _defaults(
      *(4096, 14_336, 32, 32, 8, 32_000, 131_072, 1e-5),
      num_experts_per_tok=2,
      **dict.fromkeys(hf_mixers.MINIMAX_FACTORS, 1),
    ),
    (
      *(
        *_COMMON,
        parts.SCALE,
        parts.only("hidden_act", "silu"),
        parts.only("sliding_window", None),
      ),
      *(rope(1_000_000.0), *hf_mixers.MINIMAX),
      *(parts.expert_count(8, "num_local_experts"), *_MIXTURE),
    ),
    fixed={"activation": "silu"},
    ignored=(*_EXPERTS_IGNORED, "block_size"),
  ),
  "mixtral": Family(
    *("MixtralForCausalLM", MIXTRAL),
    _defaults(4096, 14_336, 32, 32, 8, 32_000, 131_072, 1e-5, num_experts_per_tok=2),
    (
      *(*_PLAIN, parts.WINDOW, rope(1_000_000.0)),
      *(parts.expert_count(8, "num_local_experts"), *_MIXTURE),
    ),
    ignored=_EXPERTS_IGNORED,
  ),
  "qwen3_moe": Family(
    *("Qwen3MoeForCausalLM", QWEN_3_MOE),
    _defaults(
      *(2048, 6144, 24, 32, 4, 151_936, 32_768, 1e-6),
      **_QWEN,
      num_experts_per_tok=8,
      moe_intermediate_size=768,
      decoder_sparse_step=1,
      norm_topk_prob=False,
    ),
    (
      *(*_PLAIN, _BIASES, parts.QWEN_3_MOE_WINDOW, rope()),
      parts.expert_count(128, "num_experts", "num_local_experts"),
      *(parts.SPARSE_LAYERS, parts.EXPERTS_PER_TOKEN, parts.EXPERT_WIDTH),
      parts.ROUTER_NORMALIZED,
    ),
    fixed={"query_key_norm": True},
    ignored=(*_EXPERTS_IGNORED, "max_window_layers"),
  ),
  "olmoe": Family(
    *("OlmoeForCausalLM", OLMOE),
    _defaults(
      *(2048, 2048, 16, 16, None, 50_304, 4096, 1e-5), num_experts_per_tok=8, norm_topk_prob=False
    ),
    (
      *(*_PLAIN, _BIASES, rope()),
      *(parts.expert_count(64, "num_experts"), *_MIXTURE, parts.ROUTER_NORMALIZED),
      optional("clip_qkv", "clip_qkv", forms.ABOVE_0),
    ),
    fixed=_NORM_ACROSS_HEADS,
    ignored=_EXPERTS_IGNORED,
  ),
  "qwen3_next": Family(
    *("Qwen3NextForCausalLM", QWEN_3_NEXT),
    _defaults(
      *(2048, 5632, 48, 16, 2, 151_936, 32_768, 1e-6),
      **{**_LINEAR, **_LINEAR_EXPERTS},
      num_experts_per_tok=10,
      decoder_sparse_step=1,
      norm_topk_prob=True,
    ),
    (
      *(*_PLAIN, rope(partial=True), *hf_mixers.GATED_DELTA),
      *(parts.expert_count(512, "num_experts"), parts.SPARSE_LAYERS, parts.EXPERTS_PER_TOKEN),
      *(parts.EXPERT_WIDTH, _SHARED_GATE, parts.ROUTER_NORMALIZED),
    ),
    fixed={**_LINEAR_FIXED, "shared_gate": True},
    only={"use_sliding_window": ((False, None), "attention of this family has no window")},
    ignored=(*_LINEAR_IGNORED, *_EXPERTS_IGNORED),
  ),
  "qwen3_5_text": Family(
    *("Qwen3_5ForCausalLM", QWEN_3_5),
    _defaults(4096, 12_288, 32, 16, 4, 248_320, 32_768, 1e-6, **_LINEAR),
    (*_PLAIN, rope(partial=True), *hf_mixers.GATED_DELTA),
    fixed=_LINEAR_FIXED,
    only=_OUTPUT_GATE,
    ignored=_LINEAR_IGNORED,
  ),
  "qwen3_5_moe_text": Family(
    *("Qwen3_5MoeForCausalLM", QWEN_3_5_MOE),
    _defaults(
      *(2048, None, 40, 16, 2, 248_320, 32_768, 1e-6),
      **{**_LINEAR, **_LINEAR_EXPERTS},
      num_experts_per_tok=8,
    ),
    (
      *(*_STACK[:2], *_HEADS, *_ENDS),
      *(parts.SCALE, _SILU, rope(partial=True), *hf_mixers.GATED_DELTA),
      *(parts.expert_count(256, "num_experts"), parts.EXPERTS_PER_TOKEN, parts.EXPERT_WIDTH),
      *(parts.NO_DENSE_WIDTH, _SHARED_GATE),
    ),
    fixed={**_LINEAR_FIXED, "shared_gate": True},
    only={**_OUTPUT_GATE, "norm_topk_prob": ((True, None), "gates of this family are normalized")},
    ignored=(*_LINEAR_IGNORED, *_EXPERTS_IGNORED, "intermediate_size"),
  ),
  "gpt_oss": Family(
    *("GptOssForCausalLM", GPT_OSS),
    _defaults(
      *(2880, 2880, 36, 64, 8, 201_088, 131_072, 1e-5),
      head_dim=64,
      attention_bias=True,
      sliding_window=128,
      num_experts_per_tok=4,
      swiglu_limit=7.0,
    ),
    (
      *(*_COMMON, parts.SCALE, _BIASES, parts.alternating(2)),
      rope(150_000.0, unstated=_GPT_OSS_YARN),
      *(parts.expert_count(128, "num_local_experts"), *_MIXTURE),
      optional("swiglu_limit", "gate_limit"),
    ),
    fixed={
      "activation": "gelu_sigmoid",
      "attention_sinks": True,
      "router_scores": "softmax_of_chosen",
      "router_bias": True,
      "expert_biases": True,
      "up_offset": 1.0,
    },
    only={
      "hidden_act": (("silu",), "experts of this family have x sigmoid(1.702 x)"),
      "swiglu_alpha": ((1.702,), "the number in the sigmoid of the experts is fixed"),
    },
    ignored=(*_EXPERTS_IGNORED, "initial_context_length", "experts_per_token"),
  ),
  "deepseek_v3": Family(
    *("DeepseekV3ForCausalLM", DEEPSEEK),
    _defaults(
      *(7168, 18_432, 61, 128, None, 129_280, 4096, 1e-6),
      **_latent(512, 128, 1536),
      **_routed(3, 256, 1, 8, 2048, 8, 4, 2.5, norm_topk_prob=True, rope_interleave=True),
    ),
    (
      *(*_DEEPSEEK_PARTS, parts.INTERLEAVE),
      *parts.behind_dense_layers(
        *_ROUTED,
        *(parts.only("scoring_func", "sigmoid"), parts.only("topk_method", "noaux_tc")),
        **parts.CORRECTED,
      ),
    ),
    fixed={"attention": "latent"},
    ignored=_DEEPSEEK_IGNORED,
  ),
  "glm4_moe": Family(
    *("Glm4MoeForCausalLM", GLM_4_MOE),
    _defaults(
      *(4096, 10_944, 46, 96, 8, 151_552, 131_072, 1e-5),
      partial_rotary_factor=0.5,
      use_qk_norm=False,
      **_routed(1, 128, 1, 8, 1408, 1, 1, 1.0, norm_topk_prob=True),
    ),
    (
      *(*_PLAIN, parts.biases(attention_bias="qkv"), rope(partial=True)),
      flag("use_qk_norm", "query_key_norm"),
      *parts.behind_dense_layers(*_ROUTED, **parts.CORRECTED),
    ),
    ignored=_DEEPSEEK_IGNORED,
  ),
  "mistral4": Family(
    *("Mistral4ForCausalLM", MISTRAL_4),
    _defaults(
      *(4096, 12_288, 36, 32, None, 131_072, 1_048_576, 1e-6),
      **_latent(256, 64, 1024),
      **_routed(0, 128, 1, 4, 2048, 1, 1, 1.0, norm_topk_prob=True, rope_interleave=True),
    ),
    (
      *(*_LATENT_PARTS, parts.INTERLEAVE),
      parts.tempered(
        *(parts.LATENT_ROPE, _mistral_yarn(1e4, 128.0, 8192), parts.latent_rotary_share)
      ),
      *parts.behind_dense_layers(*_ROUTED, router_group_score="top2"),
    ),
    fixed={"attention": "latent"},
    ignored=_DEEPSEEK_IGNORED,
  ),
  "llama4_text": Family(
    *("Llama4ForCausalLM", LLAMA_4),
    _defaults(
      *(5120, 8192, 48, 40, 8, 202_048, 131_072, 1e-5),
      head_dim=128,
      intermediate_size_mlp=16_384,
      interleave_moe_layer_step=1,
      use_qk_norm=True,
      no_rope_layer_interval=4,
      attention_chunk_size=8192,
      attn_temperature_tuning=True,
      attn_scale=0.1,
      floor_scale=8192,
    ),
    (
      *(*_STACK[:2], *_HEADS, *_ENDS),
      *(parts.SCALE, _SILU, _BIASES, rope(500_000.0), parts.LLAMA_4_LAYERS),
      flag("use_qk_norm", "query_key_unit_norm"),
      field("intermediate_size_mlp", "feedforward_size"),
      *(parts.expert_count(16, "num_local_experts"), parts.LLAMA_4_EXPERTS),
      parts.only("num_experts_per_tok", 1),
    ),
    fixed={
      "rotary_pairs": "adjacent",
      "experts_per_token": 1,
      "router_scores": "sigmoid",
      "router_normalized": False,
      "router_scales_inputs": True,
    },
    ignored=(*_EXPERTS_IGNORED, "for_llm_compressor", "cache_implementation"),
  ),
  "deepseek_v2": Family(
    *("DeepseekV2ForCausalLM", dataclasses.replace(DEEPSEEK, further=None)),
    _defaults(
      *(4096, 11_008, 32, 32, None, 102_400, 2048, 1e-6),
      **_latent(512, 128, 1536),
      **_routed(0, 64, 2, None, 1407, None, None, 1.0, topk_method="greedy"),
    ),
    (
      *_DEEPSEEK_PARTS,
      *parts.behind_dense_layers(
        *(*_DEEPSEEK_EXPERTS, parts.GROUPS_BY_METHOD),
        *(parts.only("scoring_func", "softmax"), parts.only("norm_topk_prob", False)),
        router_normalized=False,
      ),
    ),
    fixed={"attention": "latent", "rotary_pairs": "adjacent"},
    ignored=_DEEPSEEK_IGNORED,
  ),
}

# model_type that is not read -> keys that say so, why, and what to do.
NOT_READ: dict[str, tuple[tuple[str, ...], str, str]] = {
  "gemma4_text": (
    (
      *("head_dim", "global_head_dim", "num_global_key_value_heads", "attention_k_eq_v"),
      *("num_kv_shared_layers", "hidden_size_per_layer_input", "enable_moe_block"),
    ),
    "layers with and without a window have heads of two sizes, and share keys, values and tables "
    "of embeddings with others in ways that no key of `model` says",
    "take Gemma 3 (gemma3_text)",
  ),
  "deepseek_v32": (
    ("index_topk", "index_n_heads", "index_head_dim"),
    "a token attends to the index_topk keys that an indexer chooses, and there is none here",
    "take DeepSeek-V3; in rows of at most index_topk tokens all keys are chosen, so there "
    "model_type 'deepseek_v3' without the tensors self_attn.indexer.* gives the same logits",
  ),
}
