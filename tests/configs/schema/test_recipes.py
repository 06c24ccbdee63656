"""Recipes, and models and data sets picked apart."""

import pytest

from tests.configs.loading import finalized, load


def test_model_and_data_are_picked_apart():
  config = finalized("model=mlp,data=mnist")
  assert (config.model.name, config.data.name) == ("mlp", "mnist")
  assert (config.model.input_size, config.model.output_size) == (784, 10)
  assert (config.data.input_size, config.data.target_size) == (784, 10)
  assert finalized("mlp").model.input_size == 64
  assert finalized("data=my_text").model.name == "transformer"


def test_an_unknown_image_data_set_asks_for_its_sizes():
  with pytest.raises(ValueError, match=r"data\.name='cats': set model\.input_size") as refusal:
    finalized("model=mlp,data=cats")
  assert "it is known for digits, mnist, fashion_mnist only" in str(refusal.value)
  with pytest.raises(ValueError, match=r"data\.name='cats': set model\.output_size"):
    finalized("model=mlp,data=cats", **{"model.input_size": 507})
  sizes = {"model.input_size": 507, "model.output_size": 11}
  assert finalized("model=mlp,data=cats", **sizes).data.input_size == 507


NEAR = ("mlp_tutoral", "model=llama3_8", "model=mlq")


@pytest.mark.parametrize(
  ("argument", "said"),
  [
    ("mlp_tutoral", "unknown recipe 'mlp_tutoral'; there are lm, mlp, mlp_tutorial, vit, lm_bpe,"),
    ("mlp_tutoral", "; did you mean 'mlp_tutorial'?"),
    ("model=llama3_8", "unknown model 'llama3_8'; there are lm, mlp"),
    ("model=llama3_8", "; did you mean 'llama3_8b'?"),
    ("zebra", "unknown recipe 'zebra'; there are lm, mlp, mlp_tutorial"),
    ("model=mlq", "; did you mean 'mlp'?"),
    ("model=mlp,date=mnist", "'date=mnist' is neither model=NAME nor data=NAME"),
    ("model=", "--config=FILE:model=: 'model=' is neither model=NAME nor data=NAME"),
    ("model=mlp,mnist", "'mnist' is neither model=NAME nor data=NAME"),
  ],
)
def test_an_unknown_choice_is_refused_with_the_nearest(argument, said):
  with pytest.raises(ValueError, match=r"NAME|unknown") as refusal:
    load("dp8", argument)
  assert said in str(refusal.value)
  assert ("did you mean" in str(refusal.value)) == (argument in NEAR)
