"""The small decoder with experts, and the meshes on which its budgets are proved."""

EXPERTS = {
  "model.experts": 8,
  "model.experts_per_token": 3,
  "model.expert_feedforward_size": 24,
  "model.dense_layers": 1,
  "model.layers": 3,
}
GATHERED = {"model.expert_exchange": "gathered"}
_ALL = {"mesh.fsdp": 2, "mesh.expert": 2, "mesh.tensor": 2}
STRATEGIES = {
  "fsdp=2 x expert=2 x tensor=2": ("single", {**EXPERTS, **_ALL}),
  "data=2 x expert=4": ("single", {**EXPERTS, "mesh.data": 2, "mesh.expert": 4}),
  "fsdp=2 x expert=4, gathered": (
    "single",
    {**EXPERTS, **GATHERED, "mesh.fsdp": 2, "mesh.expert": 4},
  ),
}
