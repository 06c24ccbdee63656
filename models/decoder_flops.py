"""Floating-point operations of a decoder's train step, for MFU and the planner."""

import fnmatch
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from models.layer_pattern import is_global
from models.spec import DENSE_LAYERS, LAYERS, LORA_A, LORA_B, DecoderSpec

_KERNELS = ("/kernel", f"/{LORA_A}", f"/{LORA_B}")
_LAYERS = (LAYERS, DENSE_LAYERS)
_BELOW = (*_LAYERS, "embed/", "positions/")  # parameters whose gradient needs that of the layers
# Parameters of which each token uses those of its own experts.
_ROUTED = re.compile(f"{LAYERS}experts/(gate|up|down)/.*")


def train_flops_per_example(spec: DecoderSpec, *, causal: bool = False) -> float:
  """Returns floating-point operations per sequence, forward and backward.

  6 per token and element of a weight matrix, and attention's two matmuls without the causal mask,
  12 L N H T per token (arXiv:2204.02311, appendix B), or 6 L N (H + U) T where the heads of values
  have another size U; a layer with a sliding window has the window
  instead of T. A weight matrix that is not trained counts 4: it has no gradient, but that of its
  input is computed with it; and 2 if nothing below it is trained. Of routed experts those of a
  token count.

  Args:
    spec: of the decoder.
    causal: count only unmasked scores (half, without a window).
  """
  names, length = dict(_names(spec)), spec.sequence_length
  trained = {name for name in names if any(fnmatch.fnmatchcase(name, x) for x in spec.trainable)}
  into_layers = any(name.startswith(_BELOW) for name in trained)
  into_logits = into_layers or any(name.startswith("final_norm/") for name in trained)
  unembedding = "embed/table" if spec.tied_embeddings else "unembed/kernel"
  total = 0.0
  for name, elements in names.items():
    if name == unembedding or name.endswith(_KERNELS):
      backward = into_layers if name.startswith(_LAYERS) else into_logits
      share = active_share(spec, name)
      total += (2 + 2 * backward + 2 * (name in trained)) * elements * share
  windows = [
    length if is_global(spec, layer) else min(length, spec.window) for layer in range(spec.layers)
  ]
  # With a window w, the first w tokens attend to fewer.
  seen = sum(one - one**2 / (2 * length) if causal else one for one in windows)
  attention = (6 if into_layers else 2) * spec.heads * (spec.head_size + spec.value_head_size)
  return float(length) * (total + attention * seen)


def active_share(model: Any, name: str) -> float:
  """Returns the share of a parameter's elements that one token uses: of routed experts, its own.

  Args:
    model: a spec, or the section `model` of a decoder's finalized config.
    name: of the parameter.
  """
  return model.experts_per_token / model.experts if _ROUTED.fullmatch(name) else 1.0


def active_elements(model: ConfigDict, elements: Mapping[str, int]) -> int:
  """Returns how many elements of the parameters one token uses; tables count as a whole.

  Args:
    model: the section of a finalized config; of any model, of which only a decoder has experts.
    elements: of each parameter, by its name.
  """
  if model.name != "transformer" or not model.experts:
    return sum(elements.values())
  return round(sum(count * active_share(model, name) for name, count in elements.items()))


def _names(spec: DecoderSpec) -> Iterator[tuple[str, int]]:
  """Yields the name and the number of elements of each parameter."""
  for pattern, letters in spec.parameters.items():
    before, _, rest = pattern.partition("(")
    choices, _, after = rest.rpartition(")")
    for choice in choices.split("|"):
      yield (f"{before}{choice}{after}" if rest else pattern), math.prod(spec.sizes(letters))
