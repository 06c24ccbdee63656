"""Gradients of a decoder's options, on a mesh of three axes beside one device, in float64.

tests/models/test_families.py compares each option's logits with the transformers library.
"""

from tests.parity.comparison import assert_equal, train

OPTIONS = {
  "model.layer_types": ("sliding", "full_unrotated"),
  "model.window": 9,
  "model.window_chunks": True,
  "model.attention_temperature": ("unrotated", 0.5, 4),
  "model.query_key_unit_norm": True,
  "model.pre_norms": False,
  "model.post_norms": True,
  "model.query_key_norm": True,
  "model.query_key_norm_across_heads": True,
  "model.biases": "attention,mlp",
  "model.activation": "gelu_erf",
  "model.rotary_size": 4,
  "model.rotary_scaling": ("yarn", {"factor": 4.0, "original_length": 8}),
  "model.embedding_multiplier": 2.0,
  "model.residual_multiplier": 0.5,
  "model.logits_divisor": 2.0,
  "model.attention_sinks": True,
  "model.attention_scale_by_inverse_layer": True,
  "model.clip_qkv": 0.7,
  "training.loss_chunks": 2,
  "model.base_width": 32,
}
MESH = {
  "mesh.fsdp": 2,
  "mesh.context": 2,
  "mesh.tensor": 2,
  "model.context_attention": "ring",
}


def test_gradients_on_a_mesh_are_those_of_one_device():
  wanted = train("lm", "float64", OPTIONS)
  assert_equal(train("lm", "float64", {**OPTIONS, **MESH}), wanted, "float64")
