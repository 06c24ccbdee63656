"""Which keys of a mixture of experts go together."""

from collections.abc import Iterator, Mapping

from ml_collections import ConfigDict

from configs.keys.decoder import DECODER
from runtime.layer_kinds import sparse_layers
from training.tasks import DPO

# Keys about experts -> what they are where they say nothing.
OFF = {f"model.{key}": row.unread for key, row in DECODER.items() if "experts" in row.readers}
TRAINING = {f"training.{key}": 0.0 for key in ("balance_loss", "router_z_loss", "router_bias_rate")}


def wrong(config: ConfigDict, sizes: Mapping[str, int]) -> Iterator[str]:
  """Yields a line for each key of a decoder's experts that does not go with the others.

  Args:
    config: finalized.
    sizes: mesh axis -> size.
  """
  model, devices = config.model, sizes.get("expert", 1)
  if not model.experts:
    for name, off in {**OFF, **TRAINING}.items():
      if (value := _value(config, name)) != off:
        yield f"{name}={value!r}: no layer has experts; leave it at {off!r}, or set model.experts"
    if devices > 1:
      yield (
        f"mesh.expert={devices}: no layer has experts, so it would be a second axis of data; set "
        f"mesh.data={sizes.get('data', 1) * devices} and mesh.expert=1, or set model.experts"
      )
    return
  if model.experts < 0:
    yield f"model.experts={model.experts}: at least 0, with which no layer has experts"
    return
  yield from _layers(model)
  yield from _router(model)
  if model.experts % devices:
    near = [n for n in range(1, model.experts + 1) if model.experts % n == 0]
    near = sorted(near, key=lambda n: abs(n - devices))[:3]
    yield (
      f"model.experts={model.experts} is not divisible by mesh.expert={devices}; set mesh.expert "
      f"to one of {', '.join(map(str, sorted(near)))}"
    )
  yield from _numbers(config)
  yield from _not_supported(config)


def _value(config: ConfigDict, name: str):
  section, key = name.split(".")
  return config[section][key]


def _layers(model: ConfigDict) -> Iterator[str]:
  if model.sparse_every < 1:
    yield f"model.sparse_every={model.sparse_every}: at least 1, which makes each layer sparse"
    return
  if not 0 <= model.dense_layers < model.layers:
    yield (
      f"model.dense_layers={model.dense_layers}: from 0 to {model.layers - 1}, one less than "
      f"model.layers={model.layers}: otherwise no layer has experts; set model.experts=0 for that"
    )
    return
  listed = tuple(model.mlp_only_layers)
  if wrong := [one for one in listed if type(one) is not int or not 0 <= one < model.layers]:
    yield (
      f"model.mlp_only_layers={listed}: {wrong[0]!r} is no number of a layer, from 0 to "
      f"{model.layers - 1}"
    )
  elif not sparse_layers(model):
    yield (
      f"model.layers={model.layers} with model.dense_layers={model.dense_layers}, "
      f"model.sparse_every={model.sparse_every} and model.mlp_only_layers={listed}: no layer has "
      f"experts; set model.experts=0 for that"
    )


def _router(model: ConfigDict) -> Iterator[str]:
  """Yields what is wrong with the numbers of `models.router.Router`, by the names of the keys."""
  experts, each = model.experts, model.experts_per_token
  groups, best = model.router_groups, model.router_top_groups
  if not 1 <= each <= experts:
    yield f"model.experts_per_token={each}: from 1 to model.experts={experts}"
  if groups < 1 or experts % groups:
    near = [n for n in range(1, experts + 1) if experts % n == 0]
    yield (
      f"model.experts={experts} is not divisible into model.router_groups={groups} groups; set "
      f"model.router_groups to one of {', '.join(map(str, near))}"
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


def _numbers(config: ConfigDict) -> Iterator[str]:
  model, training = config.model, config.training
  if not model.expert_capacity > 0:
    yield (
      f"model.expert_capacity={model.expert_capacity}: above 0; 1.25 has space for a quarter more "
      f"than the mean in one round"
    )
  for name in ("gate_limit", "router_scale"):
    if not model[name] >= 0 or (name == "router_scale" and not model[name]):
      yield f"model.{name}={model[name]}: {'above 0' if name == 'router_scale' else 'at least 0'}"
  for name in ("balance_loss", "router_z_loss", "router_bias_rate"):
    if not training[name] >= 0:
      yield f"training.{name}={training[name]}: at least 0; 0 is off"
  if training.router_bias_rate and not model.router_correction:
    yield (
      f"training.router_bias_rate={training.router_bias_rate} moves the bias of "
      f"model.router_correction=True; set that, or leave the rate at 0"
    )


def _not_supported(config: ConfigDict) -> Iterator[str]:
  """Yields what a model with experts cannot be combined with."""
  model, training = config.model, config.training
  if not model.gated:
    yield "model.gated=False: the MLPs of experts are gated; leave it, or set model.experts=0"
  if config.lora.rank:
    yield f"lora.rank={config.lora.rank}: adapters are for dense models; set model.experts=0"
  if training.matmul_dtype != "compute":
    yield (
      f"training.matmul_dtype={training.matmul_dtype!r}: experts are not multiplied in 8 bits; set "
      f"it to compute"
    )
  if config.task == DPO:
    for name, off in TRAINING.items():
      if (value := _value(config, name)) != off:
        yield f"{name}={value!r}: the loss of {DPO} is of pairs of rows; leave it at {off!r}"
