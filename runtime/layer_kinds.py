"""Of which kind each layer of a decoder is: sparse or dense, with a window or without; its biases.

A sparse layer has a mixture of experts in place of a dense MLP, a mixer layer has a recurrence or a
convolution in place of attention, or beside it. Layers alike are a stack, whose parameters are
stacked; the name of one begins with that of its stack.
"""

from typing import Any

# Of `training.frozen_dtype`: those in which kernels of layers are quantized (models/quantized.py).
QUANTIZED = ("int8", "nf4")
QUANTIZED_BLOCK = 64  # elements along the width, with one scale
# In `model.layer_types`: a mixer in place of attention, or beside it.
MIXER, WITH_MIXER = "mixer", "full_with_mixer"
MLP = "mlp"  # an MLP alone: then all layers have one part, which another layer's type names
LAYERS, DENSE_LAYERS, MIXER_LAYERS = "layers/", "dense_layers/", "mixer_layers/"
DENSE_MIXER_LAYERS, MLP_LAYERS = "dense_mixer_layers/", "mlp_layers/"
# Those in which layers have a mixer, and those in which they have no experts beside sparse ones.
OF_MIXERS, OF_DENSE = (MIXER_LAYERS, DENSE_MIXER_LAYERS), (DENSE_LAYERS, DENSE_MIXER_LAYERS)
# Values of `model.biases` that stand for several linear layers. GPT-2's `all` has no gate.
BIASES = {
  "none": (),
  "qkv": ("query", "key", "value"),
  "attention": ("query", "key", "value", "out"),
  "mlp": ("gate", "up", "down"),
  "all": ("query", "key", "value", "out", "up", "down"),
}


def layer_type(model: Any, layer: int) -> str:
  """Returns the type of a layer, counted from 0: an entry of model_checks.LAYER_TYPES."""
  if model.layer_types:
    return model.layer_types[layer % len(model.layer_types)]
  last_of_some = model.global_every > 0 and (layer + 1) % model.global_every == 0
  return "full" if not model.window or last_of_some else "sliding"


def is_sparse(model: Any, layer: int) -> bool:
  """Returns whether a layer, counted from 0, is sparse.

  The first `model.dense_layers` are dense; of the others every `model.sparse_every`-th is sparse,
  the last of each so many, if it is not among `model.mlp_only_layers`. Of layers with one part
  those of the type mlp alone can be.

  Args:
    model: the section `model` of a finalized config.
    layer: its number.
  """
  after = layer - model.dense_layers + 1
  # A config is read before its numbers are checked: none may divide by 0.
  in_turn = after > 0 and after % max(1, model.sparse_every) == 0
  feeds = parts_of_layers(model) == 2 or layer_type(model, layer) == MLP
  return model.experts > 0 and in_turn and feeds and layer not in model.mlp_only_layers


def sparse_layers(model: Any) -> int:
  """Returns the number of sparse layers; 0 without experts."""
  return sum(is_sparse(model, layer) for layer in range(model.layers))


def beside_sparse(model: Any) -> int:
  """Returns the number of layers with a dense MLP of a model with experts."""
  return sum(stack_of(model, layer) in OF_DENSE for layer in range(model.layers))


def stack_of(model: Any, layer: int) -> str:
  """Returns the stack that a decoder's layer, counted from 0, is in."""
  if (kind := layer_type(model, layer)) == MLP:
    return MLP_LAYERS
  two = parts_of_layers(model) == 2
  dense = model.experts > 0 and two and not is_sparse(model, layer)
  return ((LAYERS, DENSE_LAYERS), (MIXER_LAYERS, DENSE_MIXER_LAYERS))[kind == MIXER][dense]


def alike(model: Any, parts: int) -> bool:
  """Returns whether parts of so many layers have layers of the same stacks, in the same order."""
  size, rest = divmod(model.layers, parts)
  stacks = [stack_of(model, layer) for layer in range(model.layers)]
  return not rest and stacks == stacks[:size] * parts


def layers_of_type(model: Any, kind: str) -> int:
  """Returns the number of layers of a type, such as MIXER."""
  return sum(layer_type(model, layer) == kind for layer in range(model.layers))


def mixer_layers(model: Any) -> int:
  """Returns the number of layers with a mixer in place of attention."""
  return layers_of_type(model, MIXER)


def parts_of_layers(model: Any) -> int:
  """Returns how many parts each layer of a decoder has: two, or one, where some are MLPs alone."""
  return 1 if MLP in model.layer_types else 2


def mixers_beside(model: Any) -> int:
  """Returns the number of layers with a mixer beside attention: all of a decoder, or none."""
  return layers_of_type(model, WITH_MIXER)
