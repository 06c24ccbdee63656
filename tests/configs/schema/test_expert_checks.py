"""Keys of experts that do not go together are refused, with what to change."""

import pytest

from configs import base
from configs.schema import finalize, validate
from partitioning.mesh_sizes import resolve_sizes
from tests.helpers.jobs import SMALL


def message(mesh=None, **overrides):
  config = base.get_config("lm")
  config.update_from_flattened_dict({**SMALL["lm"], **overrides})
  config = finalize.finalize(config, "cpu")
  with pytest.raises(ValueError, match="the config is refused") as refusal:
    validate.check(config, resolve_sizes(mesh or {}, None))
  return str(refusal.value)


EXPERTS = {"model.experts": 6}


@pytest.mark.parametrize(
  ("overrides", "said"),
  [
    ({"model.router_scale": 2.0}, "no layer has experts; leave it at 1.0, or set model.experts"),
    ({"training.balance_loss": 0.1}, "training.balance_loss=0.1: no layer has experts"),
    ({**EXPERTS, "model.experts_per_token": 7}, "model.experts_per_token=7: from 1 to"),
    ({**EXPERTS, "model.experts_per_token": 0}, "model.experts_per_token=0"),
    (
      {**EXPERTS, "model.router_groups": 4},
      "model.router_groups=4 groups; set model.router_groups to one of 1, 2, 3, 6",
    ),
    (
      {**EXPERTS, "model.router_groups": 3, "model.router_top_groups": 4},
      "model.router_top_groups=4: from 1 to model.router_groups=3",
    ),
    (
      {**EXPERTS, "model.router_groups": 6, "model.router_group_score": "top2"},
      "model.router_group_score=top2: groups of model.experts / model.router_groups = 1",
    ),
    (
      {**EXPERTS, "model.router_groups": 3, "model.experts_per_token": 4},
      "model.experts_per_token=4 is more than the 2 experts of model.router_top_groups=1 groups",
    ),
    ({**EXPERTS, "model.expert_capacity": 0.0}, "model.expert_capacity=0.0: above 0; 1.25 has"),
    ({**EXPERTS, "model.expert_exchange": "round"}, "one of rounds, gathered; did you mean"),
    ({**EXPERTS, "model.router_scores": "sigmod"}, "did you mean 'sigmoid'"),
    ({**EXPERTS, "training.grouped_matmul": "dense"}, "one of tiles, ragged"),
    ({**EXPERTS, "model.dense_layers": 2}, "model.dense_layers=2: from 0 to 1, one less than"),
    ({**EXPERTS, "model.sparse_every": 3}, "model.mlp_only_layers=(): no layer has experts"),
    ({**EXPERTS, "model.mlp_only_layers": (0, 1)}, "=(0, 1): no layer has experts; set model.exp"),
    ({**EXPERTS, "model.mlp_only_layers": (2,)}, "=(2,): 2 is no number of a layer, from 0 to 1"),
    ({"model.experts": -1}, "model.experts=-1: at least 0, with which no layer has experts"),
    ({**EXPERTS, "model.sparse_every": 0}, "model.sparse_every=0: at least 1"),
    ({**EXPERTS, "training.router_bias_rate": 0.1}, "moves the bias of model.router_correction"),
    ({**EXPERTS, "model.gated": False}, "the MLPs of experts are gated"),
    ({**EXPERTS, "lora.rank": 2}, "lora.rank=2: adapters are for dense models"),
    ({**EXPERTS, "training.matmul_dtype": "int8"}, "experts are not multiplied in 8 bits"),
    ({**EXPERTS, "training.balance_loss": -1.0}, "training.balance_loss=-1.0: at least 0"),
  ],
)
def test_what_does_not_go_together(overrides, said):
  assert said in message(**overrides)


def test_the_experts_of_a_device_are_as_many_on_each():
  said = message({"expert": 4}, **EXPERTS)
  assert (
    "model.experts=6 is not divisible by mesh.expert=4; set mesh.expert to one of 2, 3, 6" in said
  )


def test_the_axis_of_experts_is_refused_without_experts():
  said = message({"data": 2, "expert": 4})
  assert "mesh.expert=4: no layer has experts" in said
  assert "set mesh.data=8 and mesh.expert=1" in said
