"""The tensors of a model folder and the parameters that they hold, in both directions.

Theirs have the vocabulary's own size, ours has it padded; nothing else differs between the two but
the order of the dims.

A family's table has a row for each tensor: its name, with {} for the number of the layer, and a
second one for that of the expert; its dims, in the letters of the modules' `dims`, those of
an axis written together; and our parameters. So `("NH D", "layers/attention/query/kernel")` is a
matrix [N * H, D] of what is [D, N, H] here. A fused tensor joins several parameters along one axis,
one after the other, `("NH+KH+KH D", query, key, value)`, or element by element in turn,
`("D M|M", gate, up)`. A tensor of all experts has them first: `("E M+M D", gate, up)`. A row whose
parameters a model does not have, or has with other dims, is left out.
"""

import dataclasses
import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from models.spec import LAYERS, LORA_A, LORA_B, DecoderSpec

# ------------------------------ the tables ------------------------------

Row = tuple[str, ...]  # the dims, and our parameters


@dataclasses.dataclass(frozen=True)
class Names:
  """The tensors of a family.

  Attributes:
    rows: tensor name -> row.
    prefix: of all names but the logits'; a folder may leave it out everywhere.
    inner: beginnings of names in the folder of a model of which this is a part -> what they are.
    unused: patterns of tensors without parameters: buffers that the code computes itself, and
      layers that only training has; {} is the number of layers.
    tied: (the logits' tensor, the embedding's): the first may be stored although it is the second.
    others: rows of which a folder may have one table's in place of those in `rows` with the same
      parameters; they are read, and not written.
  """

  rows: Mapping[str, Row]
  prefix: str = "model."
  inner: Mapping[str, str] = dataclasses.field(default_factory=dict)
  unused: tuple[str, ...] = ("model.layers.*.self_attn.rotary_emb.inv_freq",)
  tied: tuple[str, str] = ("lm_head.weight", "model.embed_tokens.weight")
  others: tuple[Mapping[str, Row], ...] = ()


LAYER = "model.layers.{}."


def linear(name: str, dims: str, *ours: str) -> dict[str, Row]:
  """Returns the rows of a linear layer, or of a fused one: of its kernel [out, in], and its bias.

  Args:
    name: of the module, within a layer.
    dims: of the kernel.
    *ours: our modules, within a layer.
  """
  return {
    f"{LAYER}{name}.weight": (dims, *(f"layers/{one}/kernel" for one in ours)),
    f"{LAYER}{name}.bias": (dims.split(" ")[0], *(f"layers/{one}/bias" for one in ours)),
  }


def norm(name: str, ours: str, dims: str = "D") -> dict[str, Row]:
  """Returns the row of a norm within a layer."""
  return {f"{LAYER}{name}.weight": (dims, f"layers/{ours}/scale")}


ENDS: dict[str, Row] = {
  "model.embed_tokens.weight": ("V D", "embed/table"),
  "model.norm.weight": ("D", "final_norm/scale"),
  "lm_head.weight": ("V D", "unembed/kernel"),
}
NORMS = {
  **norm("input_layernorm", "attention_norm"),
  **norm("post_attention_layernorm", "mlp_norm"),
}
ATTENTION = {
  **linear("self_attn.q_proj", "NH D", "attention/query"),
  **linear("self_attn.k_proj", "KH D", "attention/key"),
  **linear("self_attn.v_proj", "KH D", "attention/value"),
  **linear("self_attn.o_proj", "D NH", "attention/out"),
  **norm("self_attn.q_norm", "attention/query_norm", "H"),
  **norm("self_attn.k_norm", "attention/key_norm", "H"),
}
# Norms of queries and keys across heads.
NORMS_ACROSS_HEADS = {
  **norm("self_attn.q_norm", "attention/query_norm", "NH"),
  **norm("self_attn.k_norm", "attention/key_norm", "KH"),
}
MLP = {
  **linear("mlp.gate_proj", "F D", "mlp/gate"),
  **linear("mlp.up_proj", "F D", "mlp/up"),
  **linear("mlp.down_proj", "D F", "mlp/down"),
}
# Norms after the two parts of a layer alone.
OLMO_NORMS = {
  **norm("post_attention_layernorm", "attention_post_norm"),
  **norm("post_feedforward_layernorm", "mlp_post_norm"),
}
# Norms before and after each of the two parts of a layer.
FOUR_NORMS = {
  **norm("input_layernorm", "attention_norm"),
  **norm("post_attention_layernorm", "attention_post_norm"),
  **norm("pre_feedforward_layernorm", "mlp_norm"),
  **norm("post_feedforward_layernorm", "mlp_post_norm"),
}
QKV = ("attention/query", "attention/key", "attention/value")
FUSED = {
  **linear("self_attn.qkv_proj", "NH+KH+KH D", *QKV),
  **linear("self_attn.o_proj", "D NH", "attention/out"),
  **linear("mlp.gate_up_proj", "F+F D", "mlp/gate", "mlp/up"),
  **linear("mlp.down_proj", "D F", "mlp/down"),
}
LLAMA = Names({**ENDS, **NORMS, **ATTENTION, **MLP})
OLMO_2 = Names({**ENDS, **ATTENTION, **OLMO_NORMS, **NORMS_ACROSS_HEADS, **MLP})
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


def _gpt_2_rows() -> dict[str, Row]:
  """Returns the rows of GPT-2, whose kernels are stored as they multiply, [in, out]."""
  rows: dict[str, Row] = {
    "transformer.wte.weight": ("V D", "embed/table"),
    "transformer.wpe.weight": ("P D", "positions/table"),
    "transformer.ln_f.weight": ("D", "final_norm/scale"),
    "transformer.ln_f.bias": ("D", "final_norm/bias"),
    "lm_head.weight": ("V D", "unembed/kernel"),
  }
  for name, dims, *ours in (
    ("ln_1", "D", "attention_norm"),
    ("attn.c_attn", "D NH+KH+KH", *QKV),
    ("attn.c_proj", "NH D", "attention/out"),
    ("ln_2", "D", "mlp_norm"),
    ("mlp.c_fc", "D F", "mlp/up"),
    ("mlp.c_proj", "F D", "mlp/down"),
  ):
    weight = "kernel" if " " in dims else "scale"
    start = f"transformer.h.{{}}.{name}."
    rows[f"{start}weight"] = (dims, *(f"layers/{one}/{weight}" for one in ours))
    rows[f"{start}bias"] = (dims.split(" ")[-1], *(f"layers/{one}/bias" for one in ours))
  return rows


GPT_2 = Names(
  _gpt_2_rows(),
  prefix="transformer.",
  unused=("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"),
  tied=("lm_head.weight", "transformer.wte.weight"),
)

# Queries have a latent vector, or they have none.
LATENT_ATTENTION = {
  **linear("self_attn.q_proj", "NH D", "attention/query"),
  **linear("self_attn.q_a_proj", "q D", "attention/query_latent"),
  **norm("self_attn.q_a_layernorm", "attention/query_latent_norm", "Q"),
  **linear("self_attn.q_b_proj", "NH Q", "attention/query"),
  **linear("self_attn.kv_a_proj_with_mqa", "c+I D", "attention/latent", "attention/rotary_key"),
  **norm("self_attn.kv_a_layernorm", "attention/latent_norm", "C"),
  **linear("self_attn.kv_b_proj", "KJ C", "attention/key_value"),
  **linear("self_attn.o_proj", "D NU", "attention/out"),
}
ROUTER: dict[str, Row] = {f"{LAYER}mlp.gate.weight": ("e D", "layers/experts/router/kernel")}


def experts_one_by_one(
  where: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> dict[str, Row]:
  """Returns the rows of experts that have tensors of their own, by the names of these."""
  return {
    f"{LAYER}{where}.experts.{{}}.{gate}.weight": ("M D", "layers/experts/gate/kernel"),
    f"{LAYER}{where}.experts.{{}}.{up}.weight": ("M D", "layers/experts/up/kernel"),
    f"{LAYER}{where}.experts.{{}}.{down}.weight": ("D M", "layers/experts/down/kernel"),
  }


_GATE_UP = ("layers/experts/gate/kernel", "layers/experts/up/kernel")
# As version 5 of transformers has them in memory.
MERGED_EXPERTS: dict[str, Row] = {
  f"{LAYER}mlp.experts.gate_up_proj": ("E M+M D", *_GATE_UP),
  f"{LAYER}mlp.experts.down_proj": ("E D M", "layers/experts/down/kernel"),
}
MIXTRAL = Names(
  {
    **ENDS,
    **NORMS,
    **ATTENTION,
    f"{LAYER}block_sparse_moe.gate.weight": ("e D", "layers/experts/router/kernel"),
    **experts_one_by_one("block_sparse_moe", "w1", "w3", "w2"),
  },
  others=(ROUTER, MERGED_EXPERTS),
)
QWEN_3_MOE = Names(
  {**ENDS, **NORMS, **ATTENTION, **MLP, **ROUTER, **experts_one_by_one("mlp")},
  others=(MERGED_EXPERTS,),
)
OLMOE = Names({**QWEN_3_MOE.rows, **NORMS_ACROSS_HEADS}, others=(MERGED_EXPERTS,))
DEEPSEEK = Names(
  {
    **ENDS,
    **NORMS,
    **LATENT_ATTENTION,
    **MLP,
    **ROUTER,
    f"{LAYER}mlp.gate.e_score_correction_bias": ("e", "layers/experts/router/correction"),
    **experts_one_by_one("mlp"),
    **linear("mlp.shared_experts.gate_proj", "W D", "experts/shared/gate"),
    **linear("mlp.shared_experts.up_proj", "W D", "experts/shared/up"),
    **linear("mlp.shared_experts.down_proj", "D W", "experts/shared/down"),
  },
  # The layer behind the last predicts further tokens, in training and to decode speculatively.
  unused=("model.layers.*.self_attn.rotary_emb.inv_freq", "model.layers.{}.*"),
  others=(MERGED_EXPERTS,),
)
# Kernels of experts are stored as they multiply, [in, out]; in MXFP4 as [out, in].
GPT_OSS = Names(
  {
    **ENDS,
    **NORMS,
    **ATTENTION,
    f"{LAYER}self_attn.sinks": ("N", "layers/attention/sinks"),
    f"{LAYER}mlp.router.weight": ("e D", "layers/experts/router/kernel"),
    f"{LAYER}mlp.router.bias": ("e", "layers/experts/router/bias"),
    f"{LAYER}mlp.experts.gate_up_proj": ("E D M|M", *_GATE_UP),
    f"{LAYER}mlp.experts.gate_up_proj_bias": (
      *("E M|M", "layers/experts/gate/bias", "layers/experts/up/bias"),
    ),
    f"{LAYER}mlp.experts.down_proj": ("E M D", "layers/experts/down/kernel"),
    f"{LAYER}mlp.experts.down_proj_bias": ("E D", "layers/experts/down/bias"),
  },
  others=(
    {f"{LAYER}mlp.experts.gate_up_proj_blocks": ("E M|M D", *_GATE_UP)},
    {f"{LAYER}mlp.experts.down_proj_blocks": ("E D M", "layers/experts/down/kernel")},
  ),
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
  "deepseek_v2": DEEPSEEK,
  "deepseek_v3": DEEPSEEK,
  "mixtral": MIXTRAL,
  "qwen3_moe": QWEN_3_MOE,
  "olmoe": OLMOE,
  "gpt_oss": GPT_OSS,
}


# ------------------------------ the maps ------------------------------

_EXPERTS = "E"  # the letter of experts, the first of their parameters in a layer


@dataclasses.dataclass(frozen=True)
class Part:
  """What one parameter has in a tensor.

  Attributes:
    parameter: our name.
    place: its indices along the first dims of our parameter: () where it has no layers, (layer,),
      or (layer, expert).
    letters: of our parameter, without the dims of `place`, in our order.
    axes: letters of each axis of the tensor, or of its matrix.
    start: its first index along the tensor's fused axis.
    step: from one of its indices there to the next.
    column: its first column, in a tensor of blocks that are joined along rows, and 0 elsewhere.
    matrix: its index along the first dim of a tensor of all experts; None: of another.
  """

  parameter: str
  place: tuple[int, ...]
  letters: str
  axes: tuple[str, ...]
  start: int = 0
  step: int = 1
  column: int = 0
  matrix: int | None = None

  def along(self, first: int, stop: int, joined: bool = True) -> slice:
    """Returns where its elements from `first` to `stop` are along an axis of the tensor.

    Args:
      first: of its elements.
      stop: behind the last of them.
      joined: whether the tensor's parts are joined along this axis.
    """
    if not joined:
      return slice(first, stop, 1)
    end = self.start + (stop - 1) * self.step + 1
    return slice(self.start + first * self.step, end, self.step)


@dataclasses.dataclass(frozen=True)
class Tensor:
  """One tensor of a folder.

  Attributes:
    name: with the numbers of its layer and expert.
    shape: as stored.
    axis: along which its parts are joined; of a tensor of all experts, an axis of their matrices.
    parts: in the order in which they are joined; one where it is not fused.
  """

  name: str
  shape: tuple[int, ...]
  axis: int
  parts: tuple[Part, ...]


def sizes_of(spec: DecoderSpec) -> dict[str, int]:
  """Returns letter -> size in a folder: ours, but the vocabulary without padding."""
  found = {letter: dim.size for letter, dim in spec.legend.items()}
  return {**found, "V": spec.vocabulary_size}


def tensors(
  spec: DecoderSpec, model_type: str, rows: Mapping[str, Row] | None = None
) -> dict[str, Tensor]:
  """Returns the tensors of a model of a family, by name, layer after layer.

  Args:
    spec: of the model.
    model_type: the family's, in FAMILIES.
    rows: of the folder; None: those that are written.

  Raises:
    ValueError: a parameter of the model that no tensor of the family holds.
  """
  found: dict[str, Tensor] = {}
  sizes = sizes_of(spec)
  rows = FAMILIES[model_type].rows if rows is None else rows
  in_layers = {name: row for name, row in rows.items() if "{}" in name}
  for name, row in rows.items():
    if name not in in_layers and (one := _tensor(spec, sizes, name, row, ())):
      found[one.name] = one
  for layer in range(spec.layers):
    stack, index = spec.place_of(layer)
    for name, (dims, *ours) in in_layers.items():
      row = dims, *(stack + one.removeprefix(LAYERS) for one in ours)
      each = [(number,) for number in range(spec.experts)]
      for expert in each if name.count("{}") > 1 else [()]:
        if one := _tensor(spec, sizes, name.format(layer, *expert), row, (index, *expert)):
          found[one.name] = one
  used = {part.parameter for one in found.values() for part in one.parts}
  adapters = (LORA_A, LORA_B)  # in no model's folder
  missing = [
    pattern
    for pattern in spec.parameters
    if not pattern.endswith(adapters) and not any(re.fullmatch(pattern, name) for name in used)
  ]
  if missing:
    raise ValueError(f"model_type {model_type!r} has no tensor for {', '.join(missing)}")
  return found


def _tensor(
  spec: DecoderSpec, sizes: Mapping[str, int], name: str, row: Row, place: tuple[int, ...]
) -> Tensor | None:
  """Returns the tensor of a row; None where the model does not have its parameters.

  Args:
    spec: of the model.
    sizes: of `sizes_of`.
    name: with its numbers.
    row: of the table.
    place: of the parameters, without the expert that a tensor of all experts has; see `Part`.
  """
  dims, *parameters = row
  letters = [spec.optional_letters(one) for one in parameters]
  if not any(letters):
    return None
  if not all(letters):
    raise ValueError(f"{name}: {', '.join(parameters)}: the model has only some of them")
  axes = [re.split(r"[+|]", axis) for axis in dims.split(" ")]
  stacked = axes[0] == [_EXPERTS]
  axes = axes[stacked:]
  joined = next((number for number, axis in enumerate(axes) if len(axis) > 1), 0)
  step = len(parameters) if "|" in dims else 1
  parts, start = [], 0
  for number, (parameter, ours) in enumerate(zip(parameters, letters, strict=True)):
    own = tuple(axis[number] if len(axis) > 1 else axis[0] for axis in axes)
    if stacked or len(place) > 1:
      ours = ours.removeprefix(_EXPERTS)
    if {*ours} != {*"".join(own)}:  # the config has it with other dims, which another row is for
      return None
    first = number if step > 1 else start
    parts.append(Part(parameter, place, ours, own, first, step))
    start += _size(own[joined], sizes)
  shape = tuple(
    start if number == joined else _size(axis[0], sizes) for number, axis in enumerate(axes)
  )
  if not stacked:
    return Tensor(name, shape, joined, tuple(parts))
  every = [
    dataclasses.replace(part, place=(*place, expert), matrix=expert)
    for expert in range(sizes[_EXPERTS])
    for part in parts
  ]
  return Tensor(name, (sizes[_EXPERTS], *shape), joined, tuple(every))


def _size(letters: str, sizes: Mapping[str, int]) -> int:
  return math.prod(sizes[letter] for letter in letters)


def joined(
  tensor: Tensor,
  sizes: Mapping[str, int],
  array: Callable[[str, tuple[int, ...]], np.ndarray],
) -> np.ndarray:
  """Returns a tensor as it is stored.

  Args:
    tensor: which.
    sizes: of `sizes_of`.
    array: (parameter, place) -> our array there, with or without the padding of the vocabulary.
  """
  found = None
  for part in tensor.parts:
    ours = array(part.parameter, part.place)
    ours = ours[tuple(slice(0, sizes[letter]) for letter in part.letters)]
    order = [part.letters.index(letter) for letter in "".join(part.axes)]
    piece = ours.transpose(order).reshape([_size(axis, sizes) for axis in part.axes])
    if piece.shape == tensor.shape:
      return piece
    if found is None:
      found = np.zeros(tensor.shape, piece.dtype)
    matrix = found if part.matrix is None else found[part.matrix]
    there = [slice(size) for size in piece.shape]
    there[-1] = slice(part.column, part.column + piece.shape[-1])
    there[tensor.axis] = part.along(0, piece.shape[tensor.axis])
    matrix[tuple(there)] = piece
  return found


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
  stored: Mapping[str, tuple[int, ...]], spec: DecoderSpec, model_type: str
) -> tuple[Matched, list[str]]:
  """Finds the tensor for each name of a folder, and what is wrong with them.

  Args:
    stored: name -> shape, of all tensors of a folder.
    spec: of the model.
    model_type: the family's.

  Returns:
    What they are; and a line for each that is missing, not known or of another shape.
  """
  names = FAMILIES[model_type]
  wanted = tensors(spec, model_type, rows_of(names, stored))
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
  unused = [one.format(spec.layers) for one in names.unused]
  logits, embedding = names.tied
  copies = ""
  for name, given in known.items():
    if name in wanted or any(fnmatch.fnmatchcase(name, one) for one in unused):
      continue
    if name == logits and spec.tied_embeddings and embedding in known:
      copies = given
    else:
      wrong.append(f"{given} is not known: no part of a model of type {model_type!r}")
  return Matched(found, copies, known.get(embedding, "")), wrong


def rows_of(names: Names, stored: Iterable[str]) -> Mapping[str, Row]:
  """Returns the rows of a family that a folder has."""
  there = {re.sub(r"\.\d+(?=\.|$)", ".{}", full_name(name, stored, names)) for name in stored}
  rows = names.rows
  for others in names.others:
    if there.isdisjoint(others):
      continue
    held = {one for _, *ours in others.values() for one in ours}
    kept = {name: row for name, row in rows.items() if held.isdisjoint(row[1:])}
    rows = {**kept, **others}
  return rows


def full_name(name: str, stored: Iterable[str], names: Names) -> str:
  """Returns a tensor's name as the table has it."""
  for theirs, ours in names.inner.items():
    if name.startswith(theirs):
      return ours + name.removeprefix(theirs)
  logits, embedding = names.tied
  bare = embedding.removeprefix(names.prefix) in stored and embedding not in stored
  return names.prefix + name if bare and name != logits else name
