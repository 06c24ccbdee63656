"""The small decoder with experts, and the meshes on which its exchange of tokens is proved."""

EXPERTS = {
  "model.experts": 8,
  "model.experts_per_token": 3,
  "model.expert_feedforward_size": 24,
}
# With a stack of dense layers besides, for optimizers.
WITH_DENSE = {**EXPERTS, "model.dense_layers": 1, "model.layers": 3}
ROUNDS, GATHERED = ({"model.expert_exchange": name} for name in ("rounds", "gathered"))
_ALL = {"mesh.fsdp": 2, "mesh.expert": 2, "mesh.tensor": 2}
STRATEGIES = {
  "fsdp=2 x expert=2 x tensor=2": ("single", {**EXPERTS, **ROUNDS, **_ALL}),
  "data=2 x expert=4": ("single", {**EXPERTS, **ROUNDS, "mesh.data": 2, "mesh.expert": 4}),
  "fsdp=2 x expert=4, gathered": (
    "single",
    {**EXPERTS, **GATHERED, "mesh.fsdp": 2, "mesh.expert": 4},
  ),
}
