"""What most families have: the keys of their sizes, and the defaults of transformers for them."""

from interop import hf_parts as parts

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
