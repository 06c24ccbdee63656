"""The families' tables: which tensors a model folder has, and which of our parameters they hold.

A family's table has a row for each tensor: its name, with {} for the number of the layer, and a
second one for that of the expert; its dims, in the letters of models/transformer_dims.py, those of
an axis written together; and our parameter. So `("NH D", "layers/attention/query/kernel")` is a
matrix [N * H, D] of what is [D, N, H] here. A fused tensor joins several parameters along one axis,
one after the other, `("NH+KH+KH D", (query, key, value))`, or element by element in turn,
`("D M|M", (gate, up))`. A tensor of all experts has them first: `("E M+M D", (gate, up))`. A row
whose parameters a config does not have, or has with other dims, is left out.
"""

import dataclasses
from collections.abc import Mapping

Row = tuple[str, str | tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class Names:
  """The tensors of a family.

  Attributes:
    rows: tensor name -> (dims, our parameter, or several of a fused tensor).
    prefix: of all names but the logits'; a folder may leave it out everywhere.
    inner: beginnings of names in the folder of a model of which this is a part -> what they are.
    unused: patterns of tensors without parameters: buffers that the code computes itself, and
      layers that only training has; {} is the number of layers.
    tied: (the logits' tensor, the embedding's): the first may be stored although it is the second.
    others: rows of which a folder may have one table's in place of those in `rows` with the same
      parameters; they are read, and not written.
  """

  rows: Mapping[str, Row]
  prefix: str = "model."
  inner: Mapping[str, str] = dataclasses.field(default_factory=dict)
  unused: tuple[str, ...] = ("model.layers.*.self_attn.rotary_emb.inv_freq",)
  tied: tuple[str, str] = ("lm_head.weight", "model.embed_tokens.weight")
  others: tuple[Mapping[str, Row], ...] = ()


LAYER = "model.layers.{}."
ENDS: dict[str, Row] = {
  "model.embed_tokens.weight": ("V D", "embed/table"),
  "model.norm.weight": ("D", "final_norm/scale"),
  "lm_head.weight": ("V D", "unembed/kernel"),
}
NORMS: dict[str, Row] = {
  f"{LAYER}input_layernorm.weight": ("D", "layers/attention_norm/scale"),
  f"{LAYER}post_attention_layernorm.weight": ("D", "layers/mlp_norm/scale"),
}
ATTENTION: dict[str, Row] = {
  f"{LAYER}self_attn.q_proj.weight": ("NH D", "layers/attention/query/kernel"),
  f"{LAYER}self_attn.k_proj.weight": ("KH D", "layers/attention/key/kernel"),
  f"{LAYER}self_attn.v_proj.weight": ("KH D", "layers/attention/value/kernel"),
  f"{LAYER}self_attn.o_proj.weight": ("D NH", "layers/attention/out/kernel"),
  f"{LAYER}self_attn.q_proj.bias": ("NH", "layers/attention/query/bias"),
  f"{LAYER}self_attn.k_proj.bias": ("KH", "layers/attention/key/bias"),
  f"{LAYER}self_attn.v_proj.bias": ("KH", "layers/attention/value/bias"),
  f"{LAYER}self_attn.o_proj.bias": ("D", "layers/attention/out/bias"),
  f"{LAYER}self_attn.q_norm.weight": ("H", "layers/attention/query_norm/scale"),
  f"{LAYER}self_attn.k_norm.weight": ("H", "layers/attention/key_norm/scale"),
}
MLP: dict[str, Row] = {
  f"{LAYER}mlp.gate_proj.weight": ("F D", "layers/mlp/gate/kernel"),
  f"{LAYER}mlp.up_proj.weight": ("F D", "layers/mlp/up/kernel"),
  f"{LAYER}mlp.down_proj.weight": ("D F", "layers/mlp/down/kernel"),
  f"{LAYER}mlp.gate_proj.bias": ("F", "layers/mlp/gate/bias"),
  f"{LAYER}mlp.up_proj.bias": ("F", "layers/mlp/up/bias"),
  f"{LAYER}mlp.down_proj.bias": ("D", "layers/mlp/down/bias"),
}
# Norms after the two parts of a layer alone, and of queries and keys across heads.
OLMO_NORMS: dict[str, Row] = {
  f"{LAYER}post_attention_layernorm.weight": ("D", "layers/attention_post_norm/scale"),
  f"{LAYER}post_feedforward_layernorm.weight": ("D", "layers/mlp_post_norm/scale"),
  f"{LAYER}self_attn.q_norm.weight": ("NH", "layers/attention/query_norm/scale"),
  f"{LAYER}self_attn.k_norm.weight": ("KH", "layers/attention/key_norm/scale"),
}
# Norms before and after each of the two parts of a layer.
FOUR_NORMS: dict[str, Row] = {
  f"{LAYER}input_layernorm.weight": ("D", "layers/attention_norm/scale"),
  f"{LAYER}post_attention_layernorm.weight": ("D", "layers/attention_post_norm/scale"),
  f"{LAYER}pre_feedforward_layernorm.weight": ("D", "layers/mlp_norm/scale"),
  f"{LAYER}post_feedforward_layernorm.weight": ("D", "layers/mlp_post_norm/scale"),
}
FUSED: dict[str, Row] = {
  f"{LAYER}self_attn.qkv_proj.weight": (
    "NH+KH+KH D",
    tuple(f"layers/attention/{name}/kernel" for name in ("query", "key", "value")),
  ),
  f"{LAYER}self_attn.o_proj.weight": ("D NH", "layers/attention/out/kernel"),
  f"{LAYER}mlp.gate_up_proj.weight": (
    "F+F D",
    ("layers/mlp/gate/kernel", "layers/mlp/up/kernel"),
  ),
  f"{LAYER}mlp.down_proj.weight": ("D F", "layers/mlp/down/kernel"),
}
LLAMA = Names({**ENDS, **NORMS, **ATTENTION, **MLP})
OLMO_2 = Names({**ENDS, **ATTENTION, **OLMO_NORMS, **MLP})
GEMMA_2 = Names({**ENDS, **FOUR_NORMS, **ATTENTION, **MLP})
# Also the decoder of a folder with images, as transformers 4 and 5 write it.
GEMMA_3 = dataclasses.replace(
  GEMMA_2,
  inner={
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
  },
  unused=(
    *GEMMA_2.unused,
    *("vision_tower.*", "model.vision_tower.*"),
    *("multi_modal_projector.*", "model.multi_modal_projector.*"),
  ),
)

GPT_2_LAYER = "transformer.h.{}."
# Its kernels are stored as they multiply, [in, out].
GPT_2 = Names(
  {
    "transformer.wte.weight": ("V D", "embed/table"),
    "transformer.wpe.weight": ("P D", "positions/table"),
    "transformer.ln_f.weight": ("D", "final_norm/scale"),
    "transformer.ln_f.bias": ("D", "final_norm/bias"),
    "lm_head.weight": ("V D", "unembed/kernel"),
    f"{GPT_2_LAYER}ln_1.weight": ("D", "layers/attention_norm/scale"),
    f"{GPT_2_LAYER}ln_1.bias": ("D", "layers/attention_norm/bias"),
    f"{GPT_2_LAYER}attn.c_attn.weight": (
      "D NH+KH+KH",
      tuple(f"layers/attention/{name}/kernel" for name in ("query", "key", "value")),
    ),
    f"{GPT_2_LAYER}attn.c_attn.bias": (
      "NH+KH+KH",
      tuple(f"layers/attention/{name}/bias" for name in ("query", "key", "value")),
    ),
    f"{GPT_2_LAYER}attn.c_proj.weight": ("NH D", "layers/attention/out/kernel"),
    f"{GPT_2_LAYER}attn.c_proj.bias": ("D", "layers/attention/out/bias"),
    f"{GPT_2_LAYER}ln_2.weight": ("D", "layers/mlp_norm/scale"),
    f"{GPT_2_LAYER}ln_2.bias": ("D", "layers/mlp_norm/bias"),
    f"{GPT_2_LAYER}mlp.c_fc.weight": ("D F", "layers/mlp/up/kernel"),
    f"{GPT_2_LAYER}mlp.c_fc.bias": ("F", "layers/mlp/up/bias"),
    f"{GPT_2_LAYER}mlp.c_proj.weight": ("F D", "layers/mlp/down/kernel"),
    f"{GPT_2_LAYER}mlp.c_proj.bias": ("D", "layers/mlp/down/bias"),
  },
  prefix="transformer.",
  unused=("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"),
  tied=("lm_head.weight", "transformer.wte.weight"),
)

# Queries have a latent vector, or they have none.
LATENT_ATTENTION: dict[str, Row] = {
  f"{LAYER}self_attn.q_proj.weight": ("NH D", "layers/attention/query/kernel"),
  f"{LAYER}self_attn.q_a_proj.weight": ("q D", "layers/attention/query_latent/kernel"),
  f"{LAYER}self_attn.q_a_proj.bias": ("q", "layers/attention/query_latent/bias"),
  f"{LAYER}self_attn.q_a_layernorm.weight": ("Q", "layers/attention/query_latent_norm/scale"),
  f"{LAYER}self_attn.q_b_proj.weight": ("NH Q", "layers/attention/query/kernel"),
  f"{LAYER}self_attn.kv_a_proj_with_mqa.weight": (
    "c+I D",
    ("layers/attention/latent/kernel", "layers/attention/rotary_key/kernel"),
  ),
  f"{LAYER}self_attn.kv_a_proj_with_mqa.bias": (
    "c+I",
    ("layers/attention/latent/bias", "layers/attention/rotary_key/bias"),
  ),
  f"{LAYER}self_attn.kv_a_layernorm.weight": ("C", "layers/attention/latent_norm/scale"),
  f"{LAYER}self_attn.kv_b_proj.weight": ("KJ C", "layers/attention/key_value/kernel"),
  f"{LAYER}self_attn.o_proj.weight": ("D NU", "layers/attention/out/kernel"),
  f"{LAYER}self_attn.o_proj.bias": ("D", "layers/attention/out/bias"),
}
ROUTER: dict[str, Row] = {f"{LAYER}mlp.gate.weight": ("e D", "layers/experts/router/kernel")}


def experts_one_by_one(
  where: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> dict[str, Row]:
  """Returns the rows of experts that have tensors of their own, by the names of these."""
  return {
    f"{LAYER}{where}.experts.{{}}.{gate}.weight": ("M D", "layers/experts/gate/kernel"),
    f"{LAYER}{where}.experts.{{}}.{up}.weight": ("M D", "layers/experts/up/kernel"),
    f"{LAYER}{where}.experts.{{}}.{down}.weight": ("D M", "layers/experts/down/kernel"),
  }


_GATE_UP = ("layers/experts/gate/kernel", "layers/experts/up/kernel")
# As version 5 of transformers has them in memory.
MERGED_EXPERTS: dict[str, Row] = {
  f"{LAYER}mlp.experts.gate_up_proj": ("E M+M D", _GATE_UP),
  f"{LAYER}mlp.experts.down_proj": ("E D M", "layers/experts/down/kernel"),
}
MIXTRAL = Names(
  {
    **ENDS,
    **NORMS,
    **ATTENTION,
    f"{LAYER}block_sparse_moe.gate.weight": ("e D", "layers/experts/router/kernel"),
    **experts_one_by_one("block_sparse_moe", "w1", "w3", "w2"),
  },
  others=(ROUTER, MERGED_EXPERTS),
)
QWEN_3_MOE = Names(
  {**ENDS, **NORMS, **ATTENTION, **MLP, **ROUTER, **experts_one_by_one("mlp")},
  others=(MERGED_EXPERTS,),
)
OLMOE = Names(
  {
    **QWEN_3_MOE.rows,
    f"{LAYER}self_attn.q_norm.weight": ("NH", "layers/attention/query_norm/scale"),
    f"{LAYER}self_attn.k_norm.weight": ("KH", "layers/attention/key_norm/scale"),
  },
  others=(MERGED_EXPERTS,),
)
DEEPSEEK = Names(
  {
    **ENDS,
    **NORMS,
    **LATENT_ATTENTION,
    **MLP,
    **ROUTER,
    f"{LAYER}mlp.gate.e_score_correction_bias": ("e", "layers/experts/router/correction"),
    **experts_one_by_one("mlp"),
    f"{LAYER}mlp.shared_experts.gate_proj.weight": ("W D", "layers/experts/shared/gate/kernel"),
    f"{LAYER}mlp.shared_experts.up_proj.weight": ("W D", "layers/experts/shared/up/kernel"),
    f"{LAYER}mlp.shared_experts.down_proj.weight": ("D W", "layers/experts/shared/down/kernel"),
  },
  # The layer behind the last predicts further tokens, in training and to decode speculatively.
  unused=("model.layers.*.self_attn.rotary_emb.inv_freq", "model.layers.{}.*"),
  others=(MERGED_EXPERTS,),
)
# Kernels of experts are stored as they multiply, [in, out]; in MXFP4 as [out, in].
GPT_OSS = Names(
  {
    **ENDS,
    **NORMS,
    **ATTENTION,
    f"{LAYER}self_attn.sinks": ("N", "layers/attention/sinks"),
    f"{LAYER}mlp.router.weight": ("e D", "layers/experts/router/kernel"),
    f"{LAYER}mlp.router.bias": ("e", "layers/experts/router/bias"),
    f"{LAYER}mlp.experts.gate_up_proj": ("E D M|M", _GATE_UP),
    f"{LAYER}mlp.experts.gate_up_proj_bias": (
      "E M|M",
      ("layers/experts/gate/bias", "layers/experts/up/bias"),
    ),
    f"{LAYER}mlp.experts.down_proj": ("E M D", "layers/experts/down/kernel"),
    f"{LAYER}mlp.experts.down_proj_bias": ("E D", "layers/experts/down/bias"),
  },
  others=(
    {f"{LAYER}mlp.experts.gate_up_proj_blocks": ("E M|M D", _GATE_UP)},
    {f"{LAYER}mlp.experts.down_proj_blocks": ("E D M", "layers/experts/down/kernel")},
  ),
)

# model_type -> its tensors. Optional ones (biases, norms of heads) follow the config.
FAMILIES: dict[str, Names] = {
  "llama": LLAMA,
  "mistral": LLAMA,
  "qwen2": LLAMA,
  "qwen3": LLAMA,
  "gemma": LLAMA,
  "gemma2": GEMMA_2,
  "gemma3_text": GEMMA_3,
  "gpt2": GPT_2,
  "phi3": Names({**ENDS, **NORMS, **FUSED}),
  "olmo2": OLMO_2,
  "olmo3": OLMO_2,
  "smollm3": LLAMA,
  "granite": LLAMA,
  "deepseek_v2": DEEPSEEK,
  "deepseek_v3": DEEPSEEK,
  "mixtral": MIXTRAL,
  "qwen3_moe": QWEN_3_MOE,
  "olmoe": OLMOE,
  "gpt_oss": GPT_OSS,
}
