"""Reading training.rematerialization: presets, tables, exceptions, and what is refused."""

import re

import ml_collections
import pytest

from runtime import rematerialization
from runtime.rematerialization import NAMES, OFFLOAD, RECOMPUTE, SAVE, parse

MODEL = {
  **{"name": "transformer", "pre_norms": True, "mixer_pre_norms": False, "gated": True},
  "attention": "grouped_query",
  **{
    "experts": 0,
    "shared_feedforward_size": 0,
    "dense_layers": 0,
    "sparse_every": 1,
    "mlp_only_layers": (),
    "layers": 4,
    **{"layer_types": (), "global_every": 0, "window": 0},
  },
}
LATENTS = ("latent", "rotary_key", "query_latent", "key_value")


def test_a_preset_with_exceptions():
  found = parse("full, query=save,layer_input = offload")
  assert found.preset == "full"
  assert found.given == {"query": SAVE, "layer_input": OFFLOAD}
  assert found.chosen(SAVE) == ("query",)
  assert found.chosen(OFFLOAD) == ("layer_input",)
  assert len(found.chosen(RECOMPUTE)) == len(NAMES) - 2


def test_what_a_table_does_not_name_is_recomputed_but_for_the_layers_input():
  assert parse("gate=save").by_name == parse("full,gate=save").by_name
  assert parse("gate=save").chosen(SAVE) == ("layer_input", "gate")


def test_the_presets():
  assert parse("none").chosen(SAVE) == tuple(NAMES)
  assert parse("full").chosen(SAVE) == ("layer_input",)
  matmuls = ("query", "key", "value", "attention_update", "gate", "up", "mlp_update")
  found = parse("dots").chosen(SAVE)
  assert tuple(name for name in found if name not in LATENTS) == ("layer_input", *matmuls)
  assert {*found} > {*LATENTS}
  assert parse("dots,gate=recompute").by_name["gate"] == RECOMPUTE


def test_the_names_are_those_of_the_model():
  def names(**changes):
    return rematerialization.names_of(ml_collections.ConfigDict({**MODEL, **changes}))

  assert names() == tuple(name for name in NAMES if name not in LATENTS)
  latent = {"attention": "latent", "query_latent_size": 0}
  assert {*names(**latent)} - {*names()} == {"latent", "rotary_key", "key_value"}
  assert {*names()} - {*names(**latent)} == {"key", "value"}
  of_mlp = {"gate", "up", "hidden"}
  assert {*names()} - {*names(experts=8)} == of_mlp
  for other in ({"shared_feedforward_size": 4}, {"dense_layers": 1}):
    assert names(experts=8, **other) == names()
  assert {*names()} - {*names(gated=False)} == {"gate"}
  assert {*names()} - {*names(pre_norms=False)} == {"attention_input", "mlp_input"}
  assert names(name="mlp") == ()


@pytest.mark.parametrize(
  ("text", "said"),
  [
    (
      "ful",
      "'ful': one of none, elementwise, dots, full; did you mean 'full'?, "
      "or names as in mlp_update=save",
    ),
    ("", "'': one of none, elementwise, dots, full"),
    ("full,", "'' is not NAME=CHOICE"),
    ("full,dots", "'dots' is not NAME=CHOICE; one preset may come first"),
    ("query", "'query': one of none, elementwise, dots, full"),
    ("querry=save", "'querry' is no named activation of this model; did you mean 'query'?"),
    ("querry=save", "the names are layer_input, attention_input, latent, rotary_key, query_lat"),
    ("query=sav", "query='sav': one of save, recompute, offload; did you mean 'save'?"),
    ("query=", "query='': one of save, recompute, offload"),
    ("query=save,query=offload", "query is given twice"),
    ("layer_input=recompute", "the others are recomputed from it; save or offload it"),
    ("query=x,key=y", "query='x': one of save, recompute, offload; key='y': one of"),
  ],
)
def test_what_is_refused(text, said):
  with pytest.raises(ValueError, match=re.escape(said)):
    parse(text)


def test_a_model_without_names_has_only_the_presets():
  assert parse("dots", ()).preset == "dots"
  with pytest.raises(ValueError, match=r"'query' is no named activation .*; only the presets are"):
    parse("query=save", ())
