"""Which keys of `lora` are refused, and what follows from them."""

import pytest

from configs import base
from configs.schema import finalize, lora_checks, validate
from partitioning.mesh_sizes import resolve_sizes


def finalized(recipe="lm", **overrides):
  config = base.get_config(recipe)
  config.update_from_flattened_dict(overrides)
  config = finalize.finalize(config, "cpu")
  validate.check(config, resolve_sizes({}, None))
  return config


@pytest.mark.parametrize(
  ("overrides", "said"),
  [
    ({"lora.rank": -2}, r"lora\.rank=-2: at least 1, or 0 for no adapters"),
    ({"lora.alpha": 32.0}, r"lora\.alpha=32\.0: lora\.rank=0 means no adapters; set lora\.rank"),
    ({"lora.targets": ("query",)}, r"lora\.targets=\('query',\): lora\.rank=0 means no adapters"),
    ({"lora.rank": 4, "lora.alpha": 0.0}, r"lora\.alpha=0\.0: above 0"),
    ({"lora.rank": 4, "lora.dropout": 1.0}, r"lora\.dropout=1\.0: at least 0 and below 1"),
    (
      {"lora.rank": 4, "lora.targets": ("query", "q_proj")},
      r"lora\.targets: 'q_proj' matches no linear layer; .* The layers are query, key, value, out, "
      r"gate, up, down; embeddings",
    ),
    ({"lora.rank": 4, "lora.targets": ()}, r"lora\.targets: \(\) names no layer"),
    (
      {"lora.rank": 4, "model.gated": False, "lora.targets": ("gate",)},
      r"'gate' matches no linear layer",
    ),
    ({"training.frozen_dtype": "float16"}, r"training\.frozen_dtype='float16': one of bfloat16, f"),
  ],
)
def test_refused_with_the_key(overrides, said):
  with pytest.raises(ValueError, match=said):
    finalized(**overrides)


def test_a_model_without_adapters_is_refused():
  with pytest.raises(ValueError, match=r"lora\.rank=4: the model mlp has no adapters"):
    finalized("mlp", **{"lora.rank": 4})


def test_targets_become_names_and_the_adapters_are_trained():
  config = finalized(**{"lora.rank": 4, "lora.targets": ("o*", "layers/attention/key")})
  assert config.lora.targets == ("layers/attention/key", "layers/attention/out")
  assert config.training.trainable == ("*/lora_*",)
  again = finalize.finalize(config, "cpu")
  assert again.to_json_best_effort() == config.to_json_best_effort()
  assert finalized(
    **{"lora.rank": 4, "training.trainable": ("final_norm/*",)}
  ).training.trainable == ("*/lora_*", "final_norm/*")
  off = finalized()
  assert off.training.trainable == ("*",)
  assert (off.lora.targets, off.training.frozen_dtype) == (("*",), "float32")


def test_off_is_the_default():
  assert base.get_config("lm").lora.to_dict() == lora_checks.OFF
