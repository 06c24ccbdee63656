"""Checks of decoders with experts or latent attention; see `model_checks`."""

import functools
from collections.abc import Iterator

from ml_collections import ConfigDict

from runtime.layer_kinds import LAYERS, MLP, layers_of_type, sparse_layers, stack_of


def latent_errors(model: ConfigDict) -> Iterator[str]:
  """Yields what does not go with latent attention, which the model has."""
  if model.latent_size < 1:
    yield (
      f"model.latent_size={model.latent_size}: model.attention=latent computes keys and values "
      f"from a vector of this size; make it at least 1, such as {4 * max(1, model.head_size)}"
    )
  if model.kv_heads != model.heads:
    yield (
      f"model.kv_heads={model.kv_heads}: with model.attention=latent each head has keys and values "
      f"of its own; set it to model.heads={model.heads}"
    )
  if model.positions != "rotary":
    yield (
      f"model.positions={model.positions!r}: model.attention=latent has a rotary key; set it to "
      f"rotary"
    )
  elif not 0 < model.rotary_size < model.head_size:
    yield (
      f"model.rotary_size={model.rotary_size}: with model.attention=latent a part of the "
      f"model.head_size={model.head_size} dims of a head is rotated; make it even, above 0 and "
      f"below {model.head_size}, such as {max(2, model.head_size // 3 // 2 * 2)}"
    )
  if {*model.biases.split(",")} & {"qkv", "all", "query", "key", "value", "out"}:
    yield (
      f"model.biases={model.biases!r}: of model.attention=latent the projections to latent vectors "
      f"and to the rotary key have biases, and out, all or none; set it to none, mlp, attention or "
      f"attention,mlp"
    )


def layer_errors(model: ConfigDict) -> Iterator[str]:
  """Yields why no layer would have experts."""
  if model.sparse_every < 1:  # refused as such
    return
  if not 0 <= model.dense_layers < model.layers:
    yield (
      f"model.dense_layers={model.dense_layers}: from 0 to {model.layers - 1}, one less than "
      f"model.layers={model.layers}: otherwise no layer has experts; set model.experts=0 for that"
    )
    return
  listed, stacks = tuple(model.mlp_only_layers), functools.partial(stack_of, model)
  if wrong := [one for one in listed if type(one) is not int or not 0 <= one < model.layers]:
    yield (
      f"model.mlp_only_layers={listed}: {wrong[0]!r} is no number of a layer, from 0 to "
      f"{model.layers - 1}"
    )
  elif sparse_layers(model) and LAYERS not in {*map(stacks, range(model.layers))}:
    yield (
      f"model.mixer={model.mixer!r}: none of the layers with attention has experts; with "
      f"model.dense_layers={model.dense_layers}, model.sparse_every={model.sparse_every}, "
      f"model.mlp_only_layers={listed} and model.layer_types={tuple(model.layer_types)} one of "
      f"them has to"
    )
  elif 0 < sparse_layers(model) < (alone := layers_of_type(model, MLP)):
    yield (
      f"model.layer_types={tuple(model.layer_types)}: of layers of the type mlp all have experts, "
      f"or none, and {sparse_layers(model)} of {alone} would; set model.dense_layers=0, "
      f"model.sparse_every=1 and model.mlp_only_layers=()"
    )
  elif not sparse_layers(model):
    yield (
      f"model.layers={model.layers} with model.dense_layers={model.dense_layers}, "
      f"model.sparse_every={model.sparse_every} and model.mlp_only_layers={listed}: no layer has "
      f"experts; set model.experts=0 for that"
    )


def router_errors(model: ConfigDict, divisors: str) -> Iterator[str]:
  """Yields what is wrong with the numbers of `models.experts.Router`, by the names of the keys.

  `divisors` are those of `model.experts`, as text.
  """
  experts, each = model.experts, model.experts_per_token
  groups, best = model.router_groups, model.router_top_groups
  if not 1 <= each <= experts:
    yield f"model.experts_per_token={each}: from 1 to model.experts={experts}"
  if model.router_scales_inputs and each != 1:
    yield (
      f"model.router_scales_inputs=True: the input of one expert is scaled; set "
      f"model.experts_per_token={each} to 1, or model.router_scales_inputs to False"
    )
  if groups < 1 or experts % groups:
    yield (
      f"model.experts={experts} is not divisible into model.router_groups={groups} groups; set "
      f"model.router_groups to one of {divisors}"
    )
    return
  if not 1 <= best <= groups:
    yield f"model.router_top_groups={best}: from 1 to model.router_groups={groups}"
    return
  if model.router_group_score == "top2" and groups > 1 and experts == groups:
    yield (
      "model.router_group_score=top2: groups of model.experts / model.router_groups = 1 have no "
      "second score; set it to max"
    )
  if each <= experts and each > (there := best * experts // groups):
    yield (
      f"model.experts_per_token={each} is more than the {there} experts of "
      f"model.router_top_groups={best} groups"
    )
