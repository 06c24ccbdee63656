"""Latent attention: which of its keys go together, and what it does not go with."""

from collections.abc import Iterator

from ml_collections import ConfigDict

# Keys of `model` about latent attention -> their value without it.
_OFF = {"latent_size": 0, "query_latent_size": 0, "latent_norm_epsilon": 1e-6}
# What only grouped-query attention has -> its value without it.
_NONE = {"attention_sinks": False, "attention_scale_by_inverse_layer": False, "clip_qkv": 0.0}


def wrong(config: ConfigDict) -> Iterator[str]:
  """Yields a line for each key of a decoder's attention that does not go with the others.

  Args:
    config: finalized, of a transformer.
  """
  model = config.model
  if model.rotary_pairs == "adjacent" and model.positions != "rotary":
    yield f"model.rotary_pairs='adjacent': model.positions={model.positions!r} turns nothing"
  if model.attention == "latent":
    yield from _sizes(model)
    yield from _others(config)
    return
  sizes = {**_OFF, "value_head_size": model.head_size}
  for key, off in sizes.items():
    if model[key] != off:
      yield (
        f"model.{key}={model[key]} is about model.attention=latent; set that, or leave the key at "
        f"{off}"
      )


def _sizes(model: ConfigDict) -> Iterator[str]:
  if model.latent_size < 1:
    yield (
      f"model.latent_size={model.latent_size}: model.attention=latent computes keys and values "
      f"from a vector of this size; make it at least 1, such as {4 * max(1, model.head_size)}"
    )
  if model.query_latent_size < 0:
    yield f"model.query_latent_size={model.query_latent_size}: at least 1, or 0 for none"
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


def _others(config: ConfigDict) -> Iterator[str]:
  """Yields what latent attention does not go with."""
  model = config.model
  if model.query_key_norm:
    yield (
      "model.query_key_norm=True: model.attention=latent normalizes latent vectors, not heads; set "
      "it to False"
    )
  for key, off in _NONE.items():
    if model[key] != off:
      yield f"model.{key}={model[key]}: model.attention=latent has none; set it to {off}"
  if {*model.biases.split(",")} & {"qkv", "all", "query", "key", "value", "out"}:
    yield (
      f"model.biases={model.biases!r}: of model.attention=latent the projections to latent vectors "
      f"and to the rotary key have biases, and out, all or none; set it to none, mlp, attention or "
      f"attention,mlp"
    )
  if model.base_width:
    yield (
      f"model.base_width={model.base_width}: muP has no rule for the sizes of latent vectors; set "
      f"it to 0"
    )
  if config.lora.rank > 0:
    yield (
      f"lora.rank={config.lora.rank}: the projections of model.attention=latent have no adapters; "
      f"set it to 0, and choose what is trained by training.trainable"
    )
