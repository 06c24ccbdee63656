"""muP: what `model.base_width` implies, and what it does not go with."""

from collections.abc import Iterator

from ml_collections import ConfigDict

from interop import hf_folder


def finalize(model: ConfigDict) -> None:
  """Fills in the head size of the base model, and the scale of a decoder's attention.

  With larger heads than the base model's, scores are scaled by 1 / head size, as much at the base
  as without muP. Source: arXiv:2203.03466, definition 4.1.
  """
  if model.base_head_size is None:
    model.base_head_size = model.head_size
  if model.attention_scale is None:
    model.attention_scale = _attention_scale(model.head_size, model.base_head_size)


def _attention_scale(head_size: int, base: int) -> float:
  if head_size < 1 or base < 1:  # refused
    return 1.0
  return head_size**-0.5 if head_size == base else base**0.5 / head_size


def wrong(config: ConfigDict) -> Iterator[str]:
  """Yields a line for each thing that muP does not go with, of a finalized config."""
  model = config.model
  base, head = (model.get(key) or 0 for key in ("base_width", "base_head_size"))
  if base < 0:
    yield f"model.base_width={base}: at least 1, or 0 to turn muP off"
  if base == 0 and head != (model.get("head_size") or 0):
    yield (
      f"model.base_head_size={head} is about muP, which is off; set model.base_width, or leave it "
      f"out"
    )
  if base < 1:
    return
  if "folder" in model or hf_folder.is_model(config.checkpoint.initialize_from):
    which = model.get("folder") or config.checkpoint.initialize_from
    yield (
      f"model.base_width={base}: the parameters of {which} are a trained model's, and muP would "
      f"divide its logits; set it to 0. muP is for models that are trained from the start"
    )
  if config.lora.rank > 0:
    yield (
      f"model.base_width={base} with lora.rank={config.lora.rank}: muP has no rule for adapters, "
      f"whose rank is no width; set model.base_width=0"
    )
