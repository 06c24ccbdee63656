"""Values of the keys about memory that are refused."""

import pytest

from configs import base
from configs.schema import finalize, validate


def refusal(recipe, **keys):
  config = base.get_config(recipe)
  config.update_from_flattened_dict(keys)
  config = finalize.finalize(config, "cpu")
  with pytest.raises(ValueError, match="refused") as error:
    validate.check(config, dict(config.mesh))
  return str(error.value)


def test_the_names_that_a_message_lists_are_those_of_the_model():
  said = refusal("lm", **{"training.rematerialization": "full,quary=save"})
  assert "training.rematerialization: 'quary' is no named activation of this model; did you" in said
  assert "the names are layer_input, attention_input, query, key, value, attention_output" in said
  plain = refusal("lm", **{"training.rematerialization": "gate=save", "model.gated": False})
  assert "'gate' is no named activation of this model" in plain


def test_only_elementwise_optimizers_have_their_state_on_the_host():
  host = {"optimizer.state_memory": "host"}
  assert "state_memory='hots': one of device, host; did you mean 'host'?" in refusal(
    "lm", **{"optimizer.state_memory": "hots"}
  )
  said = refusal("lm", **host, **{"optimizer.name": "muon"})
  assert "optimizer.state_memory=host: layers are updated one by one, and muon may need" in said
  groups = ({"parameters": "embed/*", "name": "contrib.muon"},)
  assert "and contrib.muon may need whole" in refusal("lm", **host, **{"optimizer.groups": groups})
  said = refusal("lm", **host, **{"optimizer.clip_quantile": 0.5, "optimizer.clip_norm": 0.0})
  assert "optimizer.clip_quantile=0.5 needs the norm of all" in said
  said = refusal("lm", **host, **{"optimizer.state_dtype": "int8"})
  assert "optimizer.state_dtype=int8 rounds whole arrays; set it to float32" in said
