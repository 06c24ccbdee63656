"""Rematerialization by name: the policies of `training.rematerialization`.

`runtime.rematerialization` has the names and reads the key.
"""

from collections.abc import Callable, Iterable

import jax
from jax.ad_checkpoint import checkpoint_name

from partitioning.parallel.sharded_function import GATHERED
from partitioning.rules import HOST
from runtime.rematerialization import LAYER_INPUT, NAMES, OFFLOAD, RECOMPUTE, SAVE, parse

# Preset -> its policy without exceptions; None: no rematerialization.
_POLICIES = {
  "none": None,
  "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  "full": jax.checkpoint_policies.nothing_saveable,
}


def named(x: jax.Array, name: str) -> jax.Array:
  """Returns an activation under its name, one of `NAMES`.

  Outside of a matmul's own `jax.checkpoint`: the policy of the layer's does not see inside.
  """
  assert name in NAMES, name
  return checkpoint_name(x, name)


def kept(text: str, names: Iterable[str]) -> bool:
  """Returns whether any of these activations is saved or offloaded for the backward pass.

  Args:
    text: of `training.rematerialization`.
    names: of activations.
  """
  choices = parse(text)
  return any(choices.by_name[name] != RECOMPUTE for name in names)


def rematerialized(layer: Callable, text: str, *, reshard: bool = True) -> Callable:
  """Returns a layer's function, whose backward pass finds of its activations what `text` says.

  Args:
    layer: the body of a scan.
    text: of `training.rematerialization`.
    reshard: of `partitioning.reshard_after_forward`; False saves gathered kernels as well.
  """
  choices = parse(text)
  if choices.given or not choices.preset:
    # The layer's input, if it is saved, is saved as the function's argument.
    saved = [name for name in choices.chosen(SAVE) if name != LAYER_INPUT]
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
      names_which_can_be_saved=saved if reshard else [*saved, GATHERED],
      names_which_can_be_offloaded=choices.chosen(OFFLOAD),
      offload_src="device",
      offload_dst=HOST,
    )
  elif (policy := _POLICIES[choices.preset]) is None:
    return layer
  elif not reshard:
    gathered = jax.checkpoint_policies.save_only_these_names(GATHERED)
    policy = jax.checkpoint_policies.save_from_both_policies(policy, gathered)
  return jax.checkpoint(layer, prevent_cse=False, policy=policy)
