"""`quantization_config` of a config.json: which quantized weights are read."""

from collections.abc import Mapping
from typing import Any

BLOCK = (128, 128)  # as DeepSeek-V3 has it
UNQUANTIZED = (
  "take the folder of the unquantized model (usually the one that base_model in the README names)"
)


def block_shape(given: Any) -> tuple[int, int]:
  """Returns the rows and columns of a block of scales.

  Args:
    given: `quantization_config` of a config.json.

  Raises:
    ValueError: weights that are quantized in this way are not read.
  """
  if given is None:
    return BLOCK
  keys = given if isinstance(given, Mapping) else {}
  method, block = keys.get("quant_method"), keys.get("weight_block_size")
  if method == "mxfp4":
    return BLOCK
  sizes = (
    isinstance(block, list | tuple)
    and len(block) == 2
    and all(type(one) is int and one > 0 for one in block)
  )
  if method == "fp8" and sizes and keys.get("fmt") in ("e4m3", None):
    return block[0], block[1]
  raise ValueError(
    f"the weights are quantized; {UNQUANTIZED}, or one in 'mxfp4', or in 'fp8' (e4m3) with a "
    f"weight_block_size of two numbers"
  )
