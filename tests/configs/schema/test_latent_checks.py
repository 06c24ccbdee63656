"""Keys of latent attention that do not go together, one message each."""

import pytest

from configs.schema import latent_checks
from tests.configs.loading import finalized
from tests.parity.latents import LATENTS


def lines(overrides):
  return list(latent_checks.wrong(finalized("lm", **overrides)))


@pytest.mark.parametrize(
  ("overrides", "said"),
  [
    ({"model.latent_size": 0}, "model.latent_size=0: model.attention=latent computes keys and"),
    ({"model.query_latent_size": -1}, "model.query_latent_size=-1: at least 1, or 0 for none"),
    ({"model.kv_heads": 4}, "values of its own; set it to model.heads=8"),
    ({"model.rotary_size": 0}, "make it even, above 0 and below 10, such as 2"),
    ({"model.rotary_size": 10}, "model.rotary_size=10: with model.attention=latent a part of the"),
    ({"model.positions": "learned"}, "model.positions='learned': model.attention=latent has a"),
    ({"model.query_key_norm": True}, "normalizes latent vectors, not heads; set it to False"),
    ({"model.attention_sinks": True}, "model.attention=latent has none; set it to False"),
    ({"model.attention_scale_by_inverse_layer": True}, "=latent has none; set it to False"),
    ({"model.clip_qkv": 2.0}, "model.clip_qkv=2.0: model.attention=latent has none; set it to 0.0"),
    ({"model.biases": "query,up"}, "model.biases='query,up': of model.attention=latent the"),
    ({"model.biases": "all"}, "all or none; set it to none, mlp, attention or attention,mlp"),
    ({"model.base_width": 20}, "muP has no rule for the sizes of latent vectors; set it to 0"),
    ({"lora.rank": 2}, "lora.rank=2: the projections of model.attention=latent have no adapters"),
  ],
)
def test_what_latent_attention_cannot_have_is_refused(overrides, said):
  [line] = lines({**LATENTS, **overrides})
  assert said in line


@pytest.mark.parametrize(
  ("overrides", "said"),
  [
    ({"model.latent_size": 8}, "model.latent_size=8 is about model.attention=latent; set that, or"),
    ({"model.query_latent_size": 8}, "model.query_latent_size=8 is about"),
    ({"model.latent_norm_epsilon": 1e-5}, "model.latent_norm_epsilon=1e-05 is about"),
    ({"model.value_head_size": 7}, "model.value_head_size=7 is about model.attention=latent; set"),
    (
      {"model.positions": "learned", "model.rotary_pairs": "adjacent"},
      "model.rotary_pairs='adjacent': model.positions='learned' turns nothing",
    ),
  ],
)
def test_its_keys_are_refused_without_it(overrides, said):
  [line] = lines(overrides)
  assert said in line


def test_what_goes_together_is_accepted():
  assert lines({}) == []
  assert lines({"model.rotary_pairs": "adjacent"}) == []
  assert lines({**LATENTS, "model.biases": "mlp", "model.window": 5}) == []
  assert lines({**LATENTS, "model.biases": "attention,mlp"}) == []
  assert lines({**LATENTS, "training.matmul_dtype": "int8"}) == []
