"""Sizes of a model that follow from its width and depth, where they are not set.

A recipe's sizes belong together. At another width than the recipe's the hidden width stays in
proportion, and there are as many heads until each has 64 dims, then more of them.
"""

import math

from ml_collections import ConfigDict, config_dict

from configs.schema.model_checks import divisors

# Width of a model, for each of its layers: 12 layers have 768 dims, as GPT-2's and ViT-B's.
WIDTH_PER_LAYER = 64
HEAD_SIZE = 64  # of the same models: wider ones have more heads of this size, not larger ones
_HIDDEN_MULTIPLE = 8  # of a hidden width that is no whole number in proportion


def unset(model: ConfigDict) -> None:
  """Makes the keys of a recipe's model that are derived placeholders, where it has a depth."""
  for key in RULES if "depth" in model else ():
    if key in model:
      del model[key]
      model[key] = config_dict.placeholder(int)


def finalize_sizes(model: ConfigDict, recipe: ConfigDict) -> dict[str, tuple[int, str]]:
  """Fills in the derived keys; `model` is unlocked.

  Args:
    model: the section as parsed, with overrides.
    recipe: that of the recipe.

  Returns:
    Key of `model` -> (its value, why), of those that are derived and not the recipe's.

  Raises:
    ValueError: a depth of a model folder, whose sizes are its own.
  """
  found = {}
  if "depth" not in model:
    return found
  if recipe.layers is None:
    if model.depth:
      raise ValueError(f"model.depth={model.depth}: a model folder has its own sizes; leave it out")
    return found
  for key, rule in RULES.items():
    if key in model and model[key] is None:
      model[key], why = rule(model, recipe)
      if model[key] != recipe[key]:
        found[key] = (model[key], why)
  return found


def _layers(model: ConfigDict, recipe: ConfigDict) -> tuple[int, str]:
  return model.depth or recipe.layers, "model.depth"


def _width(model: ConfigDict, recipe: ConfigDict) -> tuple[int, str]:
  if not model.depth:
    return recipe.model_size, ""
  return WIDTH_PER_LAYER * model.depth, f"{WIDTH_PER_LAYER} for each layer of model.depth"


def _feedforward(model: ConfigDict, recipe: ConfigDict) -> tuple[int, str]:
  width, size = recipe.model_size, recipe.feedforward_size
  exact = model.model_size * size
  parts = exact // width
  if exact % width:
    parts = -(-exact // (width * _HIDDEN_MULTIPLE)) * _HIDDEN_MULTIPLE
  return parts, f"{size / width:.4g} x model_size"


def _heads(model: ConfigDict, recipe: ConfigDict) -> tuple[int, str]:
  """Returns the number of heads: by the size of a head where that is set."""
  width, size = max(1, model.model_size), model.head_size if "head_size" in model else None
  before = recipe.head_size if "head_size" in recipe else None
  if (width, size) == (recipe.model_size, before):
    return recipe.heads, ""
  if size is not None and size == before:
    return max(1, round(recipe.heads * width / recipe.model_size)), "in proportion to model_size"
  if size is not None:
    whole = size > 0 and width % size == 0
    return (width // size, "model_size / head_size") if whole else (recipe.heads, "")
  counts = range(max(recipe.heads, width // HEAD_SIZE), 0, -1)
  even = (count for count in counts if width % (2 * count) == 0)  # as rotary embeddings need
  count = next(even, 1)
  return count, f"of {width // count} dims"


def _kv_heads(model: ConfigDict, recipe: ConfigDict) -> tuple[int, str]:
  """Returns the number that is nearest to the recipe's share of the heads and divides them."""
  if model.attention == "latent" or model.heads < 1:
    return model.heads, "as heads"
  wanted = model.heads * recipe.kv_heads / recipe.heads
  count = min(divisors(model.heads), key=lambda count: abs(math.log(count / wanted)))
  return count, f"{model.heads // count} heads share one"


# Key of `model` -> its value and why; those of later rules follow from those of earlier ones.
RULES = {
  "layers": _layers,
  "model_size": _width,
  "feedforward_size": _feedforward,
  "heads": _heads,
  "kv_heads": _kv_heads,
}


# ------------------------------ the learning rate ------------------------------

# muP's rule for a learning rate of hidden matrices (training.optimizers.groups) -> its power of the
# width. Without muP the best one of AdamW falls so, for all parameters together
# (docs/optimizers.md).
_POWERS = {"entrywise": -1.0, "orthogonal": -0.5}


def rate_factor(model: ConfigDict, recipe: ConfigDict, width_rule: str) -> tuple[float, str]:
  """Returns the factor of a recipe's learning rate at this width, and why; "" where it is 1.

  Narrower models keep the recipe's; those with muP (model.base_width) keep it at every width.

  Args:
    model: with its sizes.
    recipe: its section `model`.
    width_rule: of the optimizer.
  """
  if "depth" not in model or recipe.model_size is None or model.get("base_width"):
    return 1.0, ""
  ratio = model.model_size / recipe.model_size
  if ratio <= 1 or width_rule not in _POWERS:
    return 1.0, ""
  factor = ratio ** _POWERS[width_rule]
  return factor, f"{factor:.3g} of that at model_size={recipe.model_size}, by muP's rule"
