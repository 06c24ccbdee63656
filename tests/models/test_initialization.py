"""Each parameter is drawn with the standard deviation that its formula says."""

import math

import jax
import numpy as np
import pytest

from models.layer_stack import Block
from partitioning.rules import named_leaves
from tests.helpers.jobs import make_job
from tests.models import families

SIZES = {
  "model.layers": 3,
  "model.model_size": 64,
  "model.feedforward_size": 224,
  "model.heads": 6,
  "model.kv_heads": 2,
  "model.head_size": 20,
  "model.vocabulary_size": 61,
  "data.sequence_length": 48,
}
D, F, N, H = 64, 224, 6, 20
DEPTH = 1 / math.sqrt(2 * 3)  # both of what a layer adds to the residual
KERNELS = {
  "layers/attention/query/kernel": 1 / math.sqrt(D),
  "layers/attention/key/kernel": 1 / math.sqrt(D),
  "layers/attention/value/kernel": 1 / math.sqrt(D),
  "layers/attention/out/kernel": DEPTH / math.sqrt(N * H),
  "layers/mlp/up/kernel": 1 / math.sqrt(D),
  "layers/mlp/down/kernel": DEPTH / math.sqrt(F),
}
GATED = {
  **KERNELS,
  "layers/mlp/gate/kernel": 1 / math.sqrt(D),
  "unembed/kernel": 1 / math.sqrt(D),
  "embed/table": 1.0,
}
SINKS = {"layers/attention/sinks": 0.02}
TIED = {**KERNELS, "embed/table": 1 / math.sqrt(D), "positions/table": 0.02}
MLP = {
  "layer_1/kernel": 1 / math.sqrt(31),
  "layer_2/kernel": 1 / math.sqrt(D),
  "layer_3/kernel": 1 / math.sqrt(F),
  "layer_4/kernel": 1 / math.sqrt(D),
  "layer_1/bias": 0.3,
  "layer_2/bias": 0.3,
  "layer_3/bias": 0.3,
  "layer_4/bias": 0.3,
}
MLP_SIZES = {
  "model.input_size": 31,
  "model.model_size": D,
  "model.feedforward_size": F,
  "model.bias_standard_deviation": 0.3,
}


@pytest.mark.parametrize(
  ("recipe", "changes", "deviations"),
  [
    ("lm", {**SIZES, "model.attention_sinks": True}, {**GATED, **SINKS}),
    ("lm", {**SIZES, **{f"model.{k}": v for k, v in families.GPT_2.items()}}, TIED),
    ("mlp", MLP_SIZES, MLP),
  ],
)
def test_standard_deviations_are_those_of_the_formulas(recipe, changes, deviations):
  job = make_job("single", recipe, **changes)
  found = jax.device_get(named_leaves(job.initial_state().params))
  assert deviations.keys() <= found.keys()
  for name, array in found.items():
    if name in deviations:
      # Of n normal numbers: the standard error of the deviation is 1 / sqrt(2 n), of the mean
      # 1 / sqrt(n), in units of the deviation. Five of them.
      wanted, n = deviations[name], array.size
      assert array.std() == pytest.approx(wanted, rel=5 / math.sqrt(2 * n)), name
      assert abs(array.mean()) < 5 * wanted / math.sqrt(n), name
    else:  # of scales and biases nothing is drawn
      np.testing.assert_array_equal(array, 1.0 if name.endswith("scale") else 0.0, err_msg=name)


@pytest.mark.parametrize("row", ["mlp_norm/scale", "mlp/up/kernel"])
def test_a_parameter_whose_dims_no_module_says_is_refused(row, monkeypatch):
  dims, without = Block.dims, lambda *given: {n: x for n, x in dims(*given).items() if n != row}
  monkeypatch.setattr(Block, "dims", without)
  with pytest.raises(ValueError, match=f"^layers/{row}: the `dims` of its module do not say"):
    make_job("single", "lm")


def test_learned_positions_are_as_many_as_the_config_says_whatever_the_rows():
  learned = {"model.positions": "learned"}
  for keys, rows in (({}, 12), ({"model.max_positions": 32}, 32)):
    job = make_job("single", "lm", **learned, **keys)
    assert named_leaves(job.state.params)["positions/table"].shape == (rows, 40)
