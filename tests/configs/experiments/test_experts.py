"""Both sides of the experiment have as many active parameters, but for the router's."""

import pytest

from configs.experiments import experts
from configs.schema import finalize, validate
from models import model_spec
from partitioning.mesh_sizes import resolve_sizes


def test_a_token_uses_as_many_parameters_on_both_sides():
  found = {}
  for side in ("experts", "dense"):
    config = finalize.finalize(experts.get_config(side), "cpu")
    validate.check(config, resolve_sizes(config.mesh, 8))
    found[side] = config
  of_router = 6 * 3 * 128 * 8 * 128  # 6 per weight and token: 3 layers, 128 wide, 8 experts
  flops = {side: model_spec(config).train_flops_per_example() for side, config in found.items()}
  assert flops["experts"] - flops["dense"] == pytest.approx(of_router)
  for section in ("data", "optimizer"):
    assert found["experts"][section].to_dict() == found["dense"][section].to_dict()


def test_another_side_is_refused():
  with pytest.raises(ValueError, match="there are experts, dense"):
    experts.get_config("sparse")
