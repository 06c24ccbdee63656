"""Small hybrid decoders, two layers with a mixer to one with attention, and their meshes."""

from tests.parity.comparison import ADAPTERS

TYPES = {"model.layers": 3, "model.layer_types": ("mixer", "mixer", "full")}
# Beside the sizes of tests/helpers/jobs.py, each another than the others.
DELTA = {
  **TYPES,
  "model.mixer": "gated_delta",
  "model.mixer_heads": 12,
  "model.mixer_key_heads": 3,  # which `tensor` does not divide, and does not come out even
  "model.mixer_head_size": 5,
  "model.mixer_value_head_size": 7,
  "model.separate_documents": True,
}
MAMBA = {
  **DELTA,
  "model.mixer": "mamba2",
  "model.mixer_heads": 8,
  "model.mixer_key_heads": 2,  # which `tensor` divides, or of which it gives a device one
  "model.mixer_step_limits": (0.02, 0.7),
}
BESIDE = {
  **MAMBA,
  "model.layers": 2,
  "model.layer_types": ("full_with_mixer",),
  "model.mixer_norm": "before_gate",
  "model.multipliers": (
    ("mixer", 1.2),
    ("attention/key", 0.5),
    ("mixer/out", 0.7),
    ("mlp/down", 2),
  ),
}
KIMI = {**DELTA, "model.mixer": "kimi_delta", "model.mixer_heads": 8, "model.mixer_key_heads": 8}
LIGHTNING = {**DELTA, "model.mixer": "lightning"}
CONVOLUTION = {**TYPES, "model.mixer": "short_convolution", "model.convolution_size": 3}
# As in Olmo Hybrid: norms before mixers, and after attention.
OLMO = {
  **{**DELTA, "model.pre_norms": False, "model.post_norms": True, "model.mixer_pre_norms": True},
  **{"model.mixer_negative_eigenvalues": True, "model.mixer_norm_epsilon": 1e-2},
}
# As in Qwen3-Next: experts in all layers, gates of attention and of the shared expert.
QWEN = {
  **DELTA,
  "model.experts": 6,
  "model.expert_feedforward_size": 24,
  "model.shared_feedforward_size": 16,
  "model.shared_gate": True,
  "model.attention_gate": True,
  "model.norm_scale_from_one": True,
  "model.query_key_norm": True,
  "model.rotary_size": 4,
  "training.balance_loss": 0.01,
  "model.mtp_layers": 1,
}
# As in Nemotron 3: layers of one part, of which MLPs are experts without a gate.
NEMOTRON = {
  **{**MAMBA, "model.layers": 5, "model.layer_types": ("mixer", "mlp", "full", "mixer", "mlp")},
  **{"model.experts": 6, "model.expert_feedforward_size": 24, "model.shared_feedforward_size": 16},
  **{"model.gated": False, "model.activation": "relu_squared", "model.router_scores": "sigmoid"},
  **{"model.router_correction": True, "training.router_bias_rate": 0.05},
  "training.balance_loss": 0.01,
}
# Stages of a pipeline are alike.
ALTERNATING = {"model.layers": 4, "model.layer_types": ("mixer", "full")}
# Routers' biases that move by the counts of the layers, which are of two stacks.
HYBRID_EXPERTS = {
  **{**QWEN, **ALTERNATING, "model.mtp_layers": 0, "optimizer.learning_rate": 0.005},
  "model.router_correction": True,
  "training.router_bias_rate": 0.05,
}
_ALL = {"mesh.fsdp": 2, "mesh.context": 2, "mesh.tensor": 2}
_RING, _GATHER = ({"model.context_attention": kind} for kind in ("ring", "gather"))
_SEQUENCE_PARALLEL = {"partitioning.sequence_parallel": True}
_BY_NAME = {"training.rematerialization": "full,query=save,attention_output=offload"}
MESHES = {
  "all, ring": {**_ALL, **_RING, **_SEQUENCE_PARALLEL},
  "context4, gathered": {"mesh.data": 2, "mesh.context": 4, **_GATHER},
  "context4, Ulysses": {"mesh.data": 2, "mesh.context": 4, "model.context_attention": "ulysses"},
  "context8, ring": {"mesh.context": 8, **_RING, "data.sequence_length": 48},
  "fsdp8, by name": {"mesh.fsdp": 8, **_BY_NAME},
  "tensor4, accumulated": {
    **{"mesh.data": 2, "mesh.tensor": 4, "partitioning.collective_matmul": True},
    **{**_SEQUENCE_PARALLEL, "training.gradient_accumulation_steps": 2},
  },
}
MESHES["expert2"] = {"mesh.expert": 2, "mesh.context": 2, "mesh.fsdp": 2, **_RING}
EACH = {
  "qwen": {**QWEN, "optimizer.learning_rate": 0.005},
  # Small steps: keys of unit length turn far in large ones, which multiplies rounding errors.
  "olmo": {**OLMO, "optimizer.learning_rate": 0.005},
  "kimi": {**KIMI, "optimizer.learning_rate": 0.005},
  "mamba": MAMBA,
  "nemotron": {**NEMOTRON, "optimizer.learning_rate": 0.005},
  "lightning": LIGHTNING,
  "beside": BESIDE,
  "convolution": {**CONVOLUTION, **ADAPTERS, "lora.dropout": 0.3},
}
# The others in `make test-long`.
OFTEN = (("all, ring", "qwen"), ("context4, gathered", "kimi"), ("tensor4, accumulated", "mamba"))
