"""What `compare` measures with: the norm, its floor, copies that differ, what is not comparable."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from configs import base
from configs.schema import finalize, validate
from training import parity
from training.parity import CopiesDifferError, Trained


def trained(gradient, *, loss=1.0):
  """Returns what three steps may give, with one gradient and one that is zero."""
  gradients = {"a": np.asarray(gradient), "zero": np.zeros(2)}
  return Trained("", gradients, [loss] * 3, [2.0] * 3, {"a": np.ones(3)})


def test_what_is_equal_to_rounding_is_within_the_bound():
  ours, wanted = trained(np.ones(3) * (1 + 1e-15)), trained(np.ones(3))
  assert parity.beyond(parity.differences(ours, wanted), 1e-12) == []


def test_a_difference_of_rounding_is_measured_and_only_the_same_bits_are_the_same():
  size = np.ones(4)
  size[0] = 1 + 4e-16  # the next number but one
  ours, wanted = trained(size), trained(np.ones(4))
  ours.gradients["large"] = wanted.gradients["large"] = np.full(3, 1e4)
  ours.gradients["zero"][:] = 1e-13, 0.0
  ours.parameters["a"] = -np.zeros(3)
  wanted.parameters["a"] = np.zeros(3)
  found = {(one.what, one.name): one for one in parity.differences(ours, wanted)}
  one = found["gradient", "a"]
  assert (one.distance, one.note) == (pytest.approx(2.2e-16, rel=0.05), "rounding")
  one = found["gradient", "large"]
  assert (one.distance, one.note) == (0.0, "to the bit")
  one = found["gradient", "zero"]  # its own size is zero: relative to all
  assert one.distance == pytest.approx(1e-13 / (3**0.5 * 1e4), rel=1e-6)
  assert one.note == "rounding, relative to all gradients"
  one = found["parameter", "a"]  # of another sign
  assert (one.distance, one.note) == (0.0, "rounding")
  assert {one.note for (what, _), one in found.items() if what == "loss"} == {"to the bit"}


def test_a_small_difference_is_beyond_the_bound_and_is_named():
  ours, wanted = trained(np.ones(3) * (1 + 1e-9)), trained(np.ones(3))
  [wrong] = parity.beyond(parity.differences(ours, wanted), 1e-12)
  assert (wrong.what, wrong.name) == ("gradient", "a")
  assert wrong.distance == pytest.approx(1e-9)


def test_the_first_difference_is_the_one_that_a_step_makes_first():
  ours, wanted = trained(np.ones(3) * 2, loss=1.5), trained(np.ones(3))
  wrong = parity.beyond(parity.differences(ours, wanted), 1e-12)
  assert [one.what for one in wrong] == ["loss", "loss", "loss", "gradient"]


def test_a_tensor_that_is_zero_is_compared_by_the_rounding_of_all():
  ours, wanted = trained(np.ones(3)), trained(np.ones(3))
  rounding = np.finfo(np.float64).eps
  for ours.gradients["zero"][:] in (1e-30, 0.5 * rounding):
    assert parity.beyond(parity.differences(ours, wanted), 1e-12) == []
  ours.gradients["zero"][:] = 10 * rounding
  assert parity.beyond(parity.differences(ours, wanted), 1e-12) != []


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_never_equal(value):
  both = trained(np.array([1.0, value, 1.0]))
  [wrong] = parity.beyond(parity.differences(both, both), 1e-12)
  assert wrong.distance == math.inf


def test_frozen_parameters_in_bfloat16_are_compared():
  ones = np.ones(3, jnp.bfloat16)
  assert parity.beyond(parity.differences(trained(ones), trained(ones)), 1e-12) == []
  other = np.asarray([1, 1, 1.5], jnp.bfloat16)
  [wrong] = parity.beyond(parity.differences(trained(other), trained(ones)), 1e-12)
  assert wrong.distance == pytest.approx(0.5 / 3**0.5)


def test_other_dtypes_are_no_comparison():
  with pytest.raises(ValueError, match="gradients differ in name, shape or dtype: a"):
    parity.differences(trained(np.ones(3, np.float32)), trained(np.ones(3)))


def test_copies_that_differ_are_found():
  mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
  whole = NamedSharding(mesh, PartitionSpec())

  def array(second):
    pieces = [
      jax.device_put(np.array(values, np.float32), device)
      for values, device in zip(([1, 2], second), mesh.devices, strict=True)
    ]
    return jax.make_array_from_single_device_arrays((2,), whole, pieces)

  assert parity._whole(array([1, 2]), "x").tolist() == [1, 2]
  with pytest.raises(CopiesDifferError, match=r"gradient x: .* have different numbers"):
    parity._whole(array([1, 3]), "gradient x")


def test_a_config_with_all_that_a_comparison_exchanges_is_accepted():
  config = base.get_config("lm")
  keys = {
    **{"name": "lion", "arguments": "b1=0.8", "state_dtype": "bfloat16", "ema_decays": (0.9,)},
    **{"groups": ({"parameters": "embed/*", "learning_rate": 0.1},), "clip_groups": True},
    **{"clip_norm": 0.0, "clip_quantile": 0.5, "clip_window": 7, "independent_weight_decay": True},
    **{"schedule": "wsd", "final_fraction": 0.2, "decay_tokens": 2**17, "decay": "1-sqrt"},
    **{"warmup_tokens": 2**16, "weight_decay": 0.3, "learning_rate": 0.1},
  }
  rows = config.data.global_batch_size
  others = {
    **{"training.parameter_dtype": "bfloat16", "training.gradient_reduction_dtype": "float32"},
    **{"training.stochastic_rounding": False, "data.batch_size_ramp": ((0, rows // 2), (9, rows))},
  }
  config.update_from_flattened_dict({f"optimizer.{key}": x for key, x in keys.items()})
  config.update_from_flattened_dict(others)
  validate.check(finalize.finalize(config, "cpu"), dict(config.mesh))
  parity.prove(config, "cpu")
  validate.reset_optimizer(config)
  resolved = finalize.finalize(config, "cpu")
  validate.check(resolved, dict(config.mesh))
  assert (resolved.training.compute_dtype, resolved.optimizer.name) == ("float64", "sgd")


def test_parameters_and_state_in_fewer_bytes_are_not_compared():
  config = base.get_config("lm")
  narrow = {"training.parameter_dtype": "bfloat16", "optimizer.state_dtype": "int8"}
  config.update_from_flattened_dict(narrow)
  parity.prove(config, "cpu")
  assert (config.training.parameter_dtype, config.optimizer.state_dtype) == ("float64", None)
  config.update_from_flattened_dict(narrow)
  with pytest.raises(ValueError, match="are compared in float32 or float64, where rounding is"):
    parity.prove(config, "cpu", keep=["training.parameter_dtype"])
