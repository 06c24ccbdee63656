"""The tensors of a model folder and the parameters that they hold, in both directions.

A family's table has a row for each tensor: its name, with {} for the number of the layer; its dims,
in the letters of models/transformer_dims.py, those of an axis written together; and our parameter.
So `("NH D", "layers/attention/query/kernel")` is a matrix [N * H, D] of what is [D, N, H] here. A
fused tensor joins several parameters along one axis: `("NH+KH+KH D", (query, key, value))`. A row
whose parameters a config does not have is left out.

Theirs have the vocabulary's own size, ours has it padded; nothing else differs between the two but
the order of the dims.
"""

import dataclasses
import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Mapping

import numpy as np
from ml_collections import ConfigDict

from models import transformer_dims

Row = tuple[str, str | tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class Names:
  """The tensors of a family.

  Attributes:
    rows: tensor name -> (dims, our parameter, or several of a fused tensor).
    prefix: of all names but the logits'; a folder may leave it out everywhere.
    inner: beginnings of names in the folder of a model of which this is a part -> what they are.
    unused: patterns of tensors without parameters: buffers that the code computes itself.
    tied: (the logits' tensor, the embedding's): the first may be stored although it is the second.
  """

  rows: Mapping[str, Row]
  prefix: str = "model."
  inner: Mapping[str, str] = dataclasses.field(default_factory=dict)
  unused: tuple[str, ...] = ("model.layers.*.self_attn.rotary_emb.inv_freq",)
  tied: tuple[str, str] = ("lm_head.weight", "model.embed_tokens.weight")


@dataclasses.dataclass(frozen=True)
class Part:
  """What one parameter has in a tensor.

  Attributes:
    parameter: our name.
    layer: its index along L; None where it has no L.
    letters: of our parameter, without L, in our order.
    axes: letters of each axis of the tensor.
    start: its first index along the tensor's fused axis.
  """

  parameter: str
  layer: int | None
  letters: str
  axes: tuple[str, ...]
  start: int = 0


@dataclasses.dataclass(frozen=True)
class Tensor:
  """One tensor of a folder.

  Attributes:
    name: with its layer's number.
    shape: as stored.
    axis: along which its parts are joined.
    parts: in the order in which they are joined; one where it is not fused.
  """

  name: str
  shape: tuple[int, ...]
  axis: int
  parts: tuple[Part, ...]


def sizes_of(config: ConfigDict) -> dict[str, int]:
  """Returns letter -> size in a folder: ours, but the vocabulary without padding."""
  found = {letter: dim.size for letter, dim in transformer_dims.legend(config).items()}
  return {**found, "V": config.model.vocabulary_size}


def tensors(config: ConfigDict, model_type: str) -> dict[str, Tensor]:
  """Returns the tensors of a model of a family, by name, layer after layer.

  Args:
    config: finalized.
    model_type: the family's, in FAMILIES.

  Raises:
    ValueError: a parameter of the model that no tensor of the family holds.
  """
  found: dict[str, Tensor] = {}
  used = set()
  rows = FAMILIES[model_type].rows
  in_layers = {name: row for name, row in rows.items() if "{}" in name}
  for name, row in rows.items():
    if name not in in_layers and (one := _tensor(config, name, row, None)):
      found[one.name] = one
  for layer in range(config.model.layers):
    for name, row in in_layers.items():
      if one := _tensor(config, name, row, layer):
        found[one.name] = one
  used = {part.parameter for one in found.values() for part in one.parts}
  patterns = transformer_dims.parameters(config)
  adapters = (transformer_dims.LORA_A, transformer_dims.LORA_B)  # in no model's folder
  missing = [
    pattern
    for pattern in patterns
    if not pattern.endswith(adapters) and not any(re.fullmatch(pattern, name) for name in used)
  ]
  if missing:
    raise ValueError(f"model_type {model_type!r} has no tensor for {', '.join(missing)}")
  return found


def _tensor(config: ConfigDict, name: str, row: Row, layer: int | None) -> Tensor | None:
  """Returns the tensor of a row; None where the config does not have its parameters."""
  dims, parameters = row[0], (row[1],) if isinstance(row[1], str) else row[1]
  letters = [transformer_dims.optional_letters(config, one) for one in parameters]
  if not any(letters):
    return None
  if not all(letters):
    raise ValueError(f"{name}: {', '.join(parameters)}: the model has only some of them")
  sizes, axes = sizes_of(config), [axis.split("+") for axis in dims.split(" ")]
  joined = next((number for number, axis in enumerate(axes) if len(axis) > 1), 0)
  parts, start = [], 0
  for number, (parameter, ours) in enumerate(zip(parameters, letters, strict=True)):
    own = tuple(axis[number] if len(axis) > 1 else axis[0] for axis in axes)
    parts.append(Part(parameter, layer, ours, own, start))
    start += _size(own[joined], sizes)
  shape = tuple(
    start if number == joined else _size(axis[0], sizes) for number, axis in enumerate(axes)
  )
  name = name if layer is None else name.format(layer)
  return Tensor(name, shape, joined, tuple(parts))


def _size(letters: str, sizes: Mapping[str, int]) -> int:
  return math.prod(sizes[letter] for letter in letters)


def joined(
  tensor: Tensor,
  sizes: Mapping[str, int],
  array: Callable[[str, int | None], np.ndarray],
) -> np.ndarray:
  """Returns a tensor as it is stored.

  Args:
    tensor: which.
    sizes: of `sizes_of`.
    array: (parameter, layer) -> our array without L, of which vocabulary padding is cut off.
  """
  pieces = []
  for part in tensor.parts:
    ours = array(part.parameter, part.layer)
    ours = ours[tuple(slice(0, sizes[letter]) for letter in part.letters)]
    order = [part.letters.index(letter) for letter in "".join(part.axes)]
    pieces.append(ours.transpose(order).reshape([_size(axis, sizes) for axis in part.axes]))
  return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=tensor.axis)


# ------------------------------ names in a folder ------------------------------


@dataclasses.dataclass(frozen=True)
class Matched:
  """What a folder's tensors are.

  Attributes:
    tensors: name in the folder -> the tensor that it is.
    copies: name in the folder of the logits' tensor, where the embedding is the same and read in
      its place; "": none.
    embedding: name in the folder of that embedding.
  """

  tensors: dict[str, Tensor]
  copies: str = ""
  embedding: str = ""


def match(
  stored: Mapping[str, tuple[int, ...]], config: ConfigDict, model_type: str
) -> tuple[Matched, list[str]]:
  """Finds the tensor for each name of a folder, and what is wrong with them.

  Args:
    stored: name -> shape, of all tensors of a folder.
    config: finalized.
    model_type: the family's.

  Returns:
    What they are; and a line for each that is missing, not known or of another shape.
  """
  names, wanted = FAMILIES[model_type], tensors(config, model_type)
  known = {full_name(name, stored, names): name for name in stored}
  found, wrong = {}, []
  for name, tensor in wanted.items():
    if name not in known:
      wrong.append(f"{name} is missing; it would have shape {list(tensor.shape)}")
    elif tuple(stored[known[name]]) != tensor.shape:
      shape = list(stored[known[name]])
      wrong.append(f"{name} has shape {shape}, and the config says {list(tensor.shape)}")
    else:
      found[known[name]] = tensor
  logits, embedding = names.tied
  copies = ""
  for name, given in known.items():
    if name in wanted or any(fnmatch.fnmatchcase(name, one) for one in names.unused):
      continue
    if name == logits and config.model.tied_embeddings and embedding in known:
      copies = given
    else:
      wrong.append(f"{given} is not known: no part of a model of type {model_type!r}")
  return Matched(found, copies, known.get(embedding, "")), wrong


def full_name(name: str, stored: Iterable[str], names: Names) -> str:
  """Returns a tensor's name as the table has it."""
  for theirs, ours in names.inner.items():
    if name.startswith(theirs):
      return ours + name.removeprefix(theirs)
  logits, embedding = names.tied
  bare = embedding.removeprefix(names.prefix) in stored and embedding not in stored
  return names.prefix + name if bare and name != logits else name


# ------------------------------ the families ------------------------------

LAYER = "model.layers.{}."
ENDS: dict[str, Row] = {
  "model.embed_tokens.weight": ("V D", "embed/table"),
  "model.norm.weight": ("D", "final_norm/scale"),
  "lm_head.weight": ("V D", "unembed/kernel"),
}
NORMS: dict[str, Row] = {
  f"{LAYER}input_layernorm.weight": ("D", "layers/attention_norm/scale"),
  f"{LAYER}post_attention_layernorm.weight": ("D", "layers/mlp_norm/scale"),
}
ATTENTION: dict[str, Row] = {
  f"{LAYER}self_attn.q_proj.weight": ("NH D", "layers/attention/query/kernel"),
  f"{LAYER}self_attn.k_proj.weight": ("KH D", "layers/attention/key/kernel"),
  f"{LAYER}self_attn.v_proj.weight": ("KH D", "layers/attention/value/kernel"),
  f"{LAYER}self_attn.o_proj.weight": ("D NH", "layers/attention/out/kernel"),
  f"{LAYER}self_attn.q_proj.bias": ("NH", "layers/attention/query/bias"),
  f"{LAYER}self_attn.k_proj.bias": ("KH", "layers/attention/key/bias"),
  f"{LAYER}self_attn.v_proj.bias": ("KH", "layers/attention/value/bias"),
  f"{LAYER}self_attn.o_proj.bias": ("D", "layers/attention/out/bias"),
  f"{LAYER}self_attn.q_norm.weight": ("H", "layers/attention/query_norm/scale"),
  f"{LAYER}self_attn.k_norm.weight": ("H", "layers/attention/key_norm/scale"),
}
MLP: dict[str, Row] = {
  f"{LAYER}mlp.gate_proj.weight": ("F D", "layers/mlp/gate/kernel"),
  f"{LAYER}mlp.up_proj.weight": ("F D", "layers/mlp/up/kernel"),
  f"{LAYER}mlp.down_proj.weight": ("D F", "layers/mlp/down/kernel"),
  f"{LAYER}mlp.gate_proj.bias": ("F", "layers/mlp/gate/bias"),
  f"{LAYER}mlp.up_proj.bias": ("F", "layers/mlp/up/bias"),
  f"{LAYER}mlp.down_proj.bias": ("D", "layers/mlp/down/bias"),
}
# Norms after the two parts of a layer alone, and of queries and keys across heads.
OLMO_NORMS: dict[str, Row] = {
  f"{LAYER}post_attention_layernorm.weight": ("D", "layers/attention_post_norm/scale"),
  f"{LAYER}post_feedforward_layernorm.weight": ("D", "layers/mlp_post_norm/scale"),
  f"{LAYER}self_attn.q_norm.weight": ("NH", "layers/attention/query_norm/scale"),
  f"{LAYER}self_attn.k_norm.weight": ("KH", "layers/attention/key_norm/scale"),
}
# Norms before and after each of the two parts of a layer.
FOUR_NORMS: dict[str, Row] = {
  f"{LAYER}input_layernorm.weight": ("D", "layers/attention_norm/scale"),
  f"{LAYER}post_attention_layernorm.weight": ("D", "layers/attention_post_norm/scale"),
  f"{LAYER}pre_feedforward_layernorm.weight": ("D", "layers/mlp_norm/scale"),
  f"{LAYER}post_feedforward_layernorm.weight": ("D", "layers/mlp_post_norm/scale"),
}
FUSED: dict[str, Row] = {
  f"{LAYER}self_attn.qkv_proj.weight": (
    "NH+KH+KH D",
    tuple(f"layers/attention/{name}/kernel" for name in ("query", "key", "value")),
  ),
  f"{LAYER}self_attn.o_proj.weight": ("D NH", "layers/attention/out/kernel"),
  f"{LAYER}mlp.gate_up_proj.weight": (
    "F+F D",
    ("layers/mlp/gate/kernel", "layers/mlp/up/kernel"),
  ),
  f"{LAYER}mlp.down_proj.weight": ("D F", "layers/mlp/down/kernel"),
}
LLAMA = Names({**ENDS, **NORMS, **ATTENTION, **MLP})
OLMO_2 = Names({**ENDS, **ATTENTION, **OLMO_NORMS, **MLP})
GEMMA_2 = Names({**ENDS, **FOUR_NORMS, **ATTENTION, **MLP})
# Also the decoder of a folder with images, as transformers 4 and 5 write it.
GEMMA_3 = dataclasses.replace(
  GEMMA_2,
  inner={
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
  },
  unused=(
    *GEMMA_2.unused,
    *("vision_tower.*", "model.vision_tower.*"),
    *("multi_modal_projector.*", "model.multi_modal_projector.*"),
  ),
)

GPT_2_LAYER = "transformer.h.{}."
# Its kernels are stored as they multiply, [in, out].
GPT_2 = Names(
  {
    "transformer.wte.weight": ("V D", "embed/table"),
    "transformer.wpe.weight": ("P D", "positions/table"),
    "transformer.ln_f.weight": ("D", "final_norm/scale"),
    "transformer.ln_f.bias": ("D", "final_norm/bias"),
    "lm_head.weight": ("V D", "unembed/kernel"),
    f"{GPT_2_LAYER}ln_1.weight": ("D", "layers/attention_norm/scale"),
    f"{GPT_2_LAYER}ln_1.bias": ("D", "layers/attention_norm/bias"),
    f"{GPT_2_LAYER}attn.c_attn.weight": (
      "D NH+KH+KH",
      tuple(f"layers/attention/{name}/kernel" for name in ("query", "key", "value")),
    ),
    f"{GPT_2_LAYER}attn.c_attn.bias": (
      "NH+KH+KH",
      tuple(f"layers/attention/{name}/bias" for name in ("query", "key", "value")),
    ),
    f"{GPT_2_LAYER}attn.c_proj.weight": ("NH D", "layers/attention/out/kernel"),
    f"{GPT_2_LAYER}attn.c_proj.bias": ("D", "layers/attention/out/bias"),
    f"{GPT_2_LAYER}ln_2.weight": ("D", "layers/mlp_norm/scale"),
    f"{GPT_2_LAYER}ln_2.bias": ("D", "layers/mlp_norm/bias"),
    f"{GPT_2_LAYER}mlp.c_fc.weight": ("D F", "layers/mlp/up/kernel"),
    f"{GPT_2_LAYER}mlp.c_fc.bias": ("F", "layers/mlp/up/bias"),
    f"{GPT_2_LAYER}mlp.c_proj.weight": ("F D", "layers/mlp/down/kernel"),
    f"{GPT_2_LAYER}mlp.c_proj.bias": ("D", "layers/mlp/down/bias"),
  },
  prefix="transformer.",
  unused=("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"),
  tied=("lm_head.weight", "transformer.wte.weight"),
)

# model_type -> its tensors. Optional ones (biases, norms of heads) follow the config.
FAMILIES: dict[str, Names] = {
  "llama": LLAMA,
  "mistral": LLAMA,
  "qwen2": LLAMA,
  "qwen3": LLAMA,
  "gemma": LLAMA,
  "gemma2": GEMMA_2,
  "gemma3_text": GEMMA_3,
  "gpt2": GPT_2,
  "phi3": Names({**ENDS, **NORMS, **FUSED}),
  "olmo2": OLMO_2,
  "olmo3": OLMO_2,
  "smollm3": LLAMA,
  "granite": LLAMA,
}
