"""Reads `training.rematerialization`: what a backward pass finds of a layer's activations, by name.

A preset, a table of names, or a preset with exceptions:

- `none` saves everything; `elementwise` all but the results of elementwise operations, which a
  compiler fuses into what reads them; `dots` the results of matmuls (of attention, the
  projections'); `full` only the input of each layer.
- `query=save,gate=offload`: what is named is saved on the device or offloaded to pinned host
  memory; the rest is recomputed.
- `full,query=save` or `dots,gate=recompute`: with exceptions, a preset stands for its named
  activations. All else is recomputed, with `none` too: of unnamed arrays (scores, the inside of
  norms) nothing is saved then.

Configs and models both need it, and configs are checked without JAX; `models.layers`
makes policies of it. Source: arXiv:1604.06174 (rematerialization).
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from runtime.extensions import kind_of_model
from runtime.layer_kinds import beside_sparse
from runtime.suggest import nearest

SAVE, RECOMPUTE, OFFLOAD = "save", "recompute", "offload"
CHOICES = (SAVE, RECOMPUTE, OFFLOAD)
PRESETS = ("none", "elementwise", "dots", "full")

# Name -> letters of the activations of a decoder's layer, in the order of the forward pass. Queries
# and keys are named before their norm and rotary positions, which the backward pass repeats.
NAMES = {
  "layer_input": "BRD",
  "attention_input": "BRD",  # after the norm before attention
  # Of latent attention, before their norms and rotary positions; then keys and values, before the
  # rotary key is joined to the keys.
  "latent": "BRC",
  "rotary_key": "BRI",
  "query_latent": "BRQ",
  "query": "BTNH",
  "key_value": "BTKJ",
  "key": "BTKH",
  "value": "BTKH",
  # The values averaged by the softmax; in a kernel or a ring also the logarithm of its normalizer.
  "attention_output": "BTNH",
  "attention_update": "BRD",  # what attention adds to the residual, before a norm or dropout
  "mlp_input": "BRD",  # after the norm before the MLP
  "gate": "BTF",
  "up": "BTF",
  "hidden": "BTF",  # up after the activation function, or times the activated gate
  "mlp_update": "BRD",  # what the MLP adds to the residual, before a norm or dropout
}
LAYER_INPUT, ATTENTION_OUTPUT = "layer_input", "attention_output"
# Letters that differ with model.attention="latent".
_OF_LATENTS = {"attention_output": "BTNU"}
_WHEN: Mapping[str, Callable[[Any], bool]] = {
  **dict.fromkeys(("latent", "rotary_key", "key_value"), lambda model: _is_latent(model)),
  "query_latent": lambda model: _is_latent(model) and model.query_latent_size > 0,
  **dict.fromkeys(("key", "value"), lambda model: not _is_latent(model)),
  # Else what a part reads is the layer's input.
  **dict.fromkeys(
    ("attention_input", "mlp_input"), lambda model: model.pre_norms or model.mixer_pre_norms
  ),
  "gate": lambda model: model.gated and _has_mlp(model),
  **dict.fromkeys(("up", "hidden"), lambda model: _has_mlp(model)),
}
_MATMULS = (
  *("latent", "rotary_key", "query_latent", "query", "key_value", "key", "value"),
  *("attention_update", "gate", "up", "mlp_update"),
)
_OF_PRESET = {
  "none": tuple(NAMES),
  "elementwise": (*_MATMULS, ATTENTION_OUTPUT),
  "dots": _MATMULS,
}


def _is_latent(model: Any) -> bool:
  return model.attention == "latent"


def _has_mlp(model: Any) -> bool:
  """Returns whether any layer has an MLP of all tokens, beside experts or in place of them."""
  return not model.experts or model.shared_feedforward_size > 0 or beside_sparse(model) > 0


def letters_of(name: str, model: Any) -> str:
  """Returns the letters of a named activation of a decoder."""
  return _OF_LATENTS.get(name, NAMES[name]) if _is_latent(model) else NAMES[name]


def names_of(model: Any) -> tuple[str, ...]:
  """Returns the named activations that a layer of a decoder has.

  Args:
    model: the section `model` of a finalized config; () where it is no decoder.
  """
  if kind_of_model(model.name) != "transformer":
    return ()
  return tuple(name for name in NAMES if name not in _WHEN or _WHEN[name](model))


@dataclasses.dataclass(frozen=True)
class Choices:
  """What happens to the activations of a layer.

  Attributes:
    preset: the word that the text begins with; "" if there is none.
    given: name -> choice, of the names in the text.
    by_name: name -> choice, of every name. Under the presets `none`, `elementwise` and `dots`
      without exceptions, unnamed activations are saved too.
  """

  preset: str
  given: Mapping[str, str]
  by_name: Mapping[str, str]

  def chosen(self, choice: str) -> tuple[str, ...]:
    """Returns the names with one choice."""
    return tuple(name for name, one in self.by_name.items() if one == choice)


def parse(text: str, names: Iterable[str] = tuple(NAMES)) -> Choices:
  """Returns the choices of `full`, or of `full,query=save,layer_input=offload`.

  Args:
    text: of `training.rematerialization`.
    names: of the model's activations; () for a model that knows only the presets.

  Raises:
    ValueError: with everything that is wrong, one part after the other.
  """
  names = tuple(names)
  parts = [part.strip() for part in text.split(",")]
  preset = "" if "=" in parts[0] else parts.pop(0)
  wrong: list[str] = []
  if preset not in PRESETS and (preset or not parts):
    table = f", or names as in {names[-1]}={SAVE}" if names else ""
    wrong.append(f"{preset!r}: one of {', '.join(PRESETS)}{nearest(preset, PRESETS)}{table}")
  given: dict[str, str] = {}
  for part in parts:
    name, _, choice = (word.strip() for word in part.partition("="))
    if problem := _problem(part, name, choice, names):
      wrong.append(problem)
    elif name in given:
      wrong.append(f"{name} is given twice")
    given[name] = choice
  if wrong:
    raise ValueError("; ".join(wrong))
  saved = (LAYER_INPUT, *_OF_PRESET.get(preset, ()))
  by_name = {name: given.get(name, SAVE if name in saved else RECOMPUTE) for name in names}
  return Choices(preset, given, by_name)


def _problem(part: str, name: str, choice: str, names: tuple[str, ...]) -> str:
  """Returns what is wrong with one part of a table; "" if nothing is."""
  if "=" not in part:
    return f"{part!r} is not NAME=CHOICE; one preset may come first"
  if name not in names:
    known = f"the names are {', '.join(names)}" if names else "only the presets are there"
    return f"{name!r} is no named activation of this model{nearest(name, names)}; {known}"
  if choice not in CHOICES:
    return f"{name}={choice!r}: one of {', '.join(CHOICES)}{nearest(choice, CHOICES)}"
  if (name, choice) == (LAYER_INPUT, RECOMPUTE):
    return f"{part}: the others are recomputed from it; save or offload it"
  return ""
