"""Sizes of a vision transformer that do not go together are refused, with the numbers."""

import pytest

from configs import base
from configs.schema import finalize, validate
from partitioning.mesh_sizes import resolve_sizes


def finalized(**changed):
  config = base.get_config("vit", mesh={"data": 2})
  for key, value in changed.items():
    section = config.training if key in config.training else config.model
    section[key] = value
  return finalize.finalize(config, "cpu")


def refusal(**changed):
  config = finalized(**changed)
  with pytest.raises(ValueError, match="the config is refused") as error:
    validate.check(config, resolve_sizes(config.mesh, 2))
  return str(error.value)


def test_sizes_follow_from_the_data_set():
  model = finalized().model
  assert (model.input_size, model.image_size, model.output_size) == (64, 8, 10)
  assert finalized(input_size=3 * 32 * 32, channels=3).model.image_size == 32


@pytest.mark.parametrize(
  ("changed", "why"),
  [
    ({"patch_size": 3}, "patch_size=3: it does not divide model.image_size=8; take one of 1, 2, 4"),
    ({"channels": 3}, "input_size=64: an image of 4 x 4 pixels with model.channels=3 has 48"),
    ({"image_size": 4}, "input_size=64: an image of 4 x 4 pixels with model.channels=1 has 16"),
    ({"heads": 5}, "model.heads=5: model.model_size=64 is no multiple of it"),
    ({"heads": 0}, "model.heads=0: at least 1"),
    ({"dropout_rate": 1.0}, "model.dropout_rate=1.0: at least 0 and below 1"),
    ({"norm_epsilon": 0.0}, "model.norm_epsilon=0.0: above 0"),
    ({"patch_size": 0}, "model.patch_size=0: at least 1"),
    ({"matmul_dtype": "int8"}, "training.matmul_dtype='int8': the model vit does not use it"),
    ({"attention_kernel": "splash"}, "training.attention_kernel='splash': one of xla"),
    ({"loss_chunks": 2}, "training.loss_chunks=2: classification has no vocabulary"),
    ({"rematerialization": "full,query=save"}, "training.rematerialization: "),
  ],
  ids=str,
)
def test_what_does_not_go_together_is_refused(changed, why):
  assert why in refusal(**changed)
