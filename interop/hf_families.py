"""The families, by the `model_type` of config.json: which keys they have, and their defaults.

A new family is an entry of FAMILIES, made of the parts of `hf_parts.py` or of new ones, and an
entry in `name_maps.py`. Defaults are those of transformers, versions 4.57 and 5.
"""

from interop import hf_parts as experts
from interop import hf_parts as latent
from interop import hf_parts as parts
from interop.hf_family import Family, Part
from interop.hf_parts import rope, rope_by_layer

# ------------------------------ what most families have ------------------------------

COMMON = (
  parts.same("num_hidden_layers", "layers"),
  parts.same("hidden_size", "model_size"),
  parts.same("intermediate_size", "feedforward_size"),
  parts.same("num_attention_heads", "heads"),
  parts.KV_HEADS,
  parts.HEAD_SIZE,
  parts.same("vocab_size", "vocabulary_size"),
  parts.same("rms_norm_eps", "norm_epsilon", float),
  parts.same("tie_word_embeddings", "tied_embeddings", bool),
)
SILU = parts.choice("hidden_act", "activation", parts.ACTIVATIONS)

SIZES = {
  "hidden_size": 4096,
  "intermediate_size": 11_008,
  "num_hidden_layers": 32,
  "num_attention_heads": 32,
  "vocab_size": 32_000,
  "hidden_act": "silu",
  "rms_norm_eps": 1e-6,
  "tie_word_embeddings": False,
}


# ------------------------------ mixtures of experts ------------------------------

DEEPSEEK = (
  parts.same("num_hidden_layers", "layers"),
  parts.same("hidden_size", "model_size"),
  parts.same("intermediate_size", "feedforward_size"),
  latent.LATENT,
  parts.same("vocab_size", "vocabulary_size"),
  parts.same("rms_norm_eps", "norm_epsilon", float),  # but latent vectors' is 1e-6 in all of them
  parts.BIASES,
  parts.same("tie_word_embeddings", "tied_embeddings", bool),
  SILU,
  latent.LATENT_ROPE,
)
DEEPSEEK_SIZES = {
  **SIZES,
  "kv_lora_rank": 512,
  "q_lora_rank": 1536,
  "qk_nope_head_dim": 128,
  "qk_rope_head_dim": 64,
  "v_head_dim": 128,
}

EXPERT_FAMILIES: dict[str, Family] = {
  "mixtral": Family(
    "MixtralForCausalLM",
    (
      *(*COMMON, parts.SCALE, SILU, parts.WINDOW, rope(1_000_000.0)),
      *(
        experts.expert_count(8, "num_local_experts"),
        experts.EXPERTS_PER_TOKEN,
        experts.EXPERT_WIDTH_OF_ALL,
      ),
    ),
    {
      **SIZES,
      "intermediate_size": 14_336,
      "num_key_value_heads": 8,
      "rms_norm_eps": 1e-5,
      "max_position_embeddings": 131_072,
      "num_experts_per_tok": 2,
    },
    ignored=experts.EXPERTS_IGNORED,
  ),
  "qwen3_moe": Family(
    "Qwen3MoeForCausalLM",
    (
      *(*COMMON, parts.SCALE, SILU, parts.BIASES, experts.QWEN_3_WINDOW, rope()),
      *(
        experts.expert_count(128, "num_experts", "num_local_experts"),
        experts.QWEN_3_EXPERTS,
        experts.EXPERTS_PER_TOKEN,
        experts.EXPERT_WIDTH,
        experts.ROUTER_NORMALIZED,
      ),
    ),
    {
      **SIZES,
      "hidden_size": 2048,
      "intermediate_size": 6144,
      "num_hidden_layers": 24,
      "num_key_value_heads": 4,
      "vocab_size": 151_936,
      "max_position_embeddings": 32_768,
      "use_sliding_window": False,
      "sliding_window": 4096,
      "num_experts_per_tok": 8,
      "moe_intermediate_size": 768,
      "decoder_sparse_step": 1,
      "norm_topk_prob": False,
    },
    fixed={"query_key_norm": True},
    ignored=(*experts.EXPERTS_IGNORED, "max_window_layers"),
  ),
  "olmoe": Family(
    "OlmoeForCausalLM",
    (
      *(*COMMON, parts.SCALE, SILU, parts.BIASES, rope()),
      *(
        experts.expert_count(64, "num_experts"),
        experts.EXPERTS_PER_TOKEN,
        experts.EXPERT_WIDTH_OF_ALL,
        experts.ROUTER_NORMALIZED,
        parts.above_0("clip_qkv", "clip_qkv"),
      ),
    ),
    {
      **SIZES,
      "rms_norm_eps": 1e-5,
      "vocab_size": 50_304,
      "hidden_size": 2048,
      "intermediate_size": 2048,
      "num_hidden_layers": 16,
      "num_attention_heads": 16,
      "max_position_embeddings": 4096,
      "num_experts_per_tok": 8,
      "norm_topk_prob": False,
    },
    fixed={"query_key_norm": True, "query_key_norm_across_heads": True},
    ignored=experts.EXPERTS_IGNORED,
  ),
  "gpt_oss": Family(
    "GptOssForCausalLM",
    (
      *(*COMMON, parts.SCALE, parts.BIASES, parts.GEMMA_2_WINDOW),
      experts.with_yarn(rope(150_000.0)),
      *(
        experts.expert_count(128, "num_local_experts"),
        experts.EXPERTS_PER_TOKEN,
        experts.EXPERT_WIDTH_OF_ALL,
      ),
      parts.optional("swiglu_limit", "gate_limit"),
    ),
    {
      **SIZES,
      "hidden_size": 2880,
      "intermediate_size": 2880,
      "num_hidden_layers": 36,
      "num_attention_heads": 64,
      "num_key_value_heads": 8,
      "head_dim": 64,
      "vocab_size": 201_088,
      "rms_norm_eps": 1e-5,
      "max_position_embeddings": 131_072,
      "attention_bias": True,
      "sliding_window": 128,
      "num_experts_per_tok": 4,
      "swiglu_limit": 7.0,
    },
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
    ignored=(*experts.EXPERTS_IGNORED, "initial_context_length", "experts_per_token"),
  ),
  "deepseek_v3": Family(
    "DeepseekV3ForCausalLM",
    (*DEEPSEEK, latent.INTERLEAVE, experts.deepseek_experts("deepseek_v3")),
    {
      **DEEPSEEK_SIZES,
      "hidden_size": 7168,
      "intermediate_size": 18_432,
      "num_hidden_layers": 61,
      "num_attention_heads": 128,
      "vocab_size": 129_280,
      "max_position_embeddings": 4096,
      "first_k_dense_replace": 3,
      "n_routed_experts": 256,
      "n_shared_experts": 1,
      "num_experts_per_tok": 8,
      "moe_intermediate_size": 2048,
      "n_group": 8,
      "topk_group": 4,
      "norm_topk_prob": True,
      "routed_scaling_factor": 2.5,
      "rope_interleave": True,
    },
    fixed={"attention": "latent"},
    ignored=experts.DEEPSEEK_IGNORED,
  ),
  "deepseek_v2": Family(
    "DeepseekV2ForCausalLM",
    (*DEEPSEEK, experts.deepseek_experts("deepseek_v2")),
    {
      **DEEPSEEK_SIZES,
      "hidden_size": 4096,
      "num_hidden_layers": 32,
      "num_attention_heads": 32,
      "vocab_size": 102_400,
      "max_position_embeddings": 2048,
      "first_k_dense_replace": 0,
      "n_routed_experts": 64,
      "n_shared_experts": 2,
      "moe_intermediate_size": 1407,
      "topk_method": "greedy",
      "routed_scaling_factor": 1.0,
    },
    fixed={"attention": "latent", "rotary_pairs": "adjacent"},
    ignored=experts.DEEPSEEK_IGNORED,
  ),
}


# ------------------------------ all families ------------------------------

QWEN = {
  **SIZES,
  "intermediate_size": 22_016,
  "num_key_value_heads": 32,
  "vocab_size": 151_936,
  "max_position_embeddings": 32_768,
  "use_sliding_window": False,
  "sliding_window": 4096,
  "max_window_layers": 28,
}
GEMMA = {
  **SIZES,
  "hidden_act": "gelu_pytorch_tanh",
  "hidden_activation": "gelu_pytorch_tanh",
  "head_dim": 256,
  "vocab_size": 256_000,
  "max_position_embeddings": 8192,
  "tie_word_embeddings": True,
}
GEMMA_FIXED = {"norm_scale_from_one": True, "scaled_embeddings": True}
GEMMA_2 = {
  **GEMMA,
  "hidden_size": 2304,
  "intermediate_size": 9216,
  "num_hidden_layers": 26,
  "num_attention_heads": 8,
  "num_key_value_heads": 4,
  "query_pre_attn_scalar": 256,
  "sliding_window": 4096,
}
# `gelu` in a config.json of Gemma 1 stands for the tanh approximation that it was trained with.
GEMMA_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu", "gelu": "gelu", "gelu_new": "gelu"}
GEMMA_ACTIVATION = parts.choice("hidden_activation", "activation", parts.ACTIVATIONS)
ATTENTION_SOFT_CAP = parts.optional("attn_logit_softcapping", "attention_soft_cap")
LOGITS_SOFT_CAP = parts.optional("final_logit_softcapping", "logits_soft_cap")

OLMO = {
  **SIZES,
  "vocab_size": 50_304,
  "rms_norm_eps": 1e-5,
  "max_position_embeddings": 2048,
}
OLMO_FIXED = {
  "pre_norms": False,
  "post_norms": True,
  "query_key_norm": True,
  "query_key_norm_across_heads": True,
}

GPT_2_PARTS = (
  parts.same("n_layer", "layers"),
  parts.same("n_embd", "model_size"),
  parts.same("n_positions", "max_positions"),
  parts.same("vocab_size", "vocabulary_size"),
  parts.same("layer_norm_epsilon", "norm_epsilon", float),
  parts.same("tie_word_embeddings", "tied_embeddings", bool),
  Part(("n_inner",), parts.gpt_2_feedforward, lambda model: {"n_inner": model["feedforward_size"]}),
  Part(
    ("n_head", "scale_attn_weights"),
    parts.gpt_2_heads,
    lambda model: {
      "n_head": model["heads"],
      "scale_attn_weights": model["attention_scale"] != 1.0 or model["head_size"] == 1,
    },
  ),
  parts.same("scale_attn_by_inverse_layer_idx", "attention_scale_by_inverse_layer", bool),
  parts.choice("activation_function", "activation", {"gelu_new": "gelu", **parts.ACTIVATIONS}),
)

# In the order in which `hf_config.write` tries them.
FAMILIES: dict[str, Family] = {
  "llama": Family(
    "LlamaForCausalLM",
    (*COMMON, parts.SCALE, SILU, parts.MLP_BIASES, rope()),
    {**SIZES, "max_position_embeddings": 2048},
  ),
  "mistral": Family(
    "MistralForCausalLM",
    (*COMMON, parts.SCALE, SILU, parts.WINDOW, rope()),
    {
      **SIZES,
      "intermediate_size": 14_336,
      "num_key_value_heads": 8,
      "sliding_window": 4096,
      "max_position_embeddings": 131_072,
    },
  ),
  "qwen2": Family(
    "Qwen2ForCausalLM",
    (*COMMON, parts.SCALE, SILU, parts.QWEN_WINDOW, rope()),
    QWEN,
    fixed={"biases": "qkv"},
  ),
  "qwen3": Family(
    "Qwen3ForCausalLM",
    (*COMMON, parts.SCALE, SILU, parts.BIASES, parts.QWEN_WINDOW, rope()),
    {**QWEN, "head_dim": 128},
    fixed={"query_key_norm": True},
  ),
  "gemma": Family(
    "GemmaForCausalLM",
    (
      *COMMON,
      parts.SCALE,
      parts.choice("hidden_act", "activation", GEMMA_ACTIVATIONS),
      parts.BIASES,
      rope(),
    ),
    {
      **GEMMA,
      "hidden_size": 3072,
      "intermediate_size": 24_576,
      "num_hidden_layers": 28,
      "num_attention_heads": 16,
      "num_key_value_heads": 16,
    },
    fixed=GEMMA_FIXED,
    ignored=("hidden_activation",),
  ),
  "gemma2": Family(
    "Gemma2ForCausalLM",
    (
      *COMMON,
      parts.QUERY_SCALE,
      GEMMA_ACTIVATION,
      parts.BIASES,
      parts.GEMMA_2_WINDOW,
      ATTENTION_SOFT_CAP,
      LOGITS_SOFT_CAP,
      rope(),
    ),
    {**GEMMA_2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    fixed={**GEMMA_FIXED, "post_norms": True},
    ignored=("hidden_act", "cache_implementation"),
  ),
  "gemma3_text": Family(
    "Gemma3ForCausalLM",
    (
      *COMMON,
      parts.QUERY_SCALE,
      GEMMA_ACTIVATION,
      parts.BIASES,
      parts.GEMMA_3_WINDOW,
      LOGITS_SOFT_CAP,
      rope_by_layer(1_000_000.0, 10_000.0, "rope_local_base_freq"),
    ),
    {
      **GEMMA_2,
      "vocab_size": 262_208,
      "max_position_embeddings": 131_072,
    },
    fixed={**GEMMA_FIXED, "post_norms": True, "query_key_norm": True},
    only={
      "attn_logit_softcapping": (
        (None,),
        "transformers does not apply it in this family, so the model's own logits are not known; "
        "set it to null for those of transformers",
      ),
    },
    ignored=("hidden_act", "cache_implementation"),
  ),
  "gpt2": Family(
    "GPT2LMHeadModel",
    GPT_2_PARTS,
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
    fixed={"positions": "learned", "norm": "layer", "biases": "all", "gated": False},
    ignored=(
      *("n_ctx", "reorder_and_upcast_attn", "summary_activation", "summary_first_dropout"),
      *("summary_proj_to_labels", "summary_type", "summary_use_proj", "gradient_checkpointing"),
    ),
    positions="n_positions",
  ),
  "phi3": Family(
    "Phi3ForCausalLM",
    (*COMMON, parts.SCALE, SILU, parts.WINDOW, rope(partial=True, older=True)),
    {
      **SIZES,
      "hidden_size": 3072,
      "intermediate_size": 8192,
      "vocab_size": 32_064,
      "rms_norm_eps": 1e-5,
      "max_position_embeddings": 4096,
      "sliding_window": None,
    },
  ),
  "olmo2": Family(
    "Olmo2ForCausalLM",
    (*COMMON, parts.SCALE, SILU, parts.BIASES, rope(older=True)),
    OLMO,
    fixed=OLMO_FIXED,
  ),
  "olmo3": Family(
    "Olmo3ForCausalLM",
    (
      *COMMON,
      parts.SCALE,
      SILU,
      parts.BIASES,
      parts.OLMO_3_WINDOW,
      rope_by_layer(500_000.0, 500_000.0),
    ),
    {**OLMO, "sliding_window": 4096},
    fixed=OLMO_FIXED,
  ),
  "smollm3": Family(
    "SmolLM3ForCausalLM",
    (*COMMON, parts.SCALE, SILU, parts.MLP_BIASES, parts.SMOLLM_3, rope(2_000_000.0)),
    {
      **SIZES,
      "hidden_size": 2048,
      "num_hidden_layers": 36,
      "num_attention_heads": 16,
      "num_key_value_heads": 4,
      "vocab_size": 128_256,
      "max_position_embeddings": 32_768,
      "tie_word_embeddings": True,
      "use_sliding_window": False,
      "no_rope_layer_interval": 4,
    },
  ),
  "granite": Family(
    "GraniteForCausalLM",
    (
      *COMMON,
      parts.same("attention_multiplier", "attention_scale", float),
      parts.same("embedding_multiplier", "embedding_multiplier", float),
      parts.same("residual_multiplier", "residual_multiplier", float),
      parts.same("logits_scaling", "logits_divisor", float),
      SILU,
      parts.MLP_BIASES,
      rope(),
    ),
    {
      **SIZES,
      "max_position_embeddings": 2048,
      **dict.fromkeys(
        ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
        1.0,
      ),
    },
  ),
  **EXPERT_FAMILIES,
}
