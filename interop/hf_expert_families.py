"""The families with mixtures of experts, as `hf_families.py` has the others."""

from interop import hf_experts as experts
from interop import hf_latent as latent
from interop import hf_parts as parts
from interop.hf_common import COMMON, SILU, SIZES
from interop.hf_family import Family
from interop.hf_rope import rope

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
  latent.ROPE,
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
      *(experts.number(8, "num_local_experts"), experts.PER_TOKEN, experts.ONE_WIDTH),
    ),
    {
      **SIZES,
      "intermediate_size": 14_336,
      "num_key_value_heads": 8,
      "rms_norm_eps": 1e-5,
      "max_position_embeddings": 131_072,
      "num_experts_per_tok": 2,
    },
    ignored=experts.IGNORED,
  ),
  "qwen3_moe": Family(
    "Qwen3MoeForCausalLM",
    (
      *(*COMMON, parts.SCALE, SILU, parts.BIASES, experts.QWEN_3_WINDOW, rope()),
      *(
        experts.number(128, "num_experts", "num_local_experts"),
        experts.QWEN_3,
        experts.PER_TOKEN,
        experts.WIDTH,
        experts.NORMALIZED,
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
    ignored=(*experts.IGNORED, "max_window_layers"),
  ),
  "olmoe": Family(
    "OlmoeForCausalLM",
    (
      *(*COMMON, parts.SCALE, SILU, parts.BIASES, rope()),
      *(
        experts.number(64, "num_experts"),
        experts.PER_TOKEN,
        experts.ONE_WIDTH,
        experts.NORMALIZED,
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
    ignored=experts.IGNORED,
  ),
  "gpt_oss": Family(
    "GptOssForCausalLM",
    (
      *(*COMMON, parts.SCALE, parts.BIASES, parts.GEMMA_2_WINDOW),
      experts.with_yarn(rope(150_000.0)),
      *(experts.number(128, "num_local_experts"), experts.PER_TOKEN, experts.ONE_WIDTH),
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
    ignored=(*experts.IGNORED, "initial_context_length", "experts_per_token"),
  ),
  "deepseek_v3": Family(
    "DeepseekV3ForCausalLM",
    (*DEEPSEEK, latent.INTERLEAVE, experts.deepseek("deepseek_v3")),
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
    (*DEEPSEEK, experts.deepseek("deepseek_v2")),
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
