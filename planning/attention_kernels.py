"""Fused attention kernels in traced programs, each counted as one operation.

A kernel reads its arguments from HBM and writes its results to it: forward queries, keys and
values, and the output with the logarithms of the sums of the softmax; backward these, the output
and its gradient, and three gradients. Scores stay on the chip. There are JAX's splash attention for
TPUs and cuDNN's attention for GPUs. The latter is a call by its name: where there is no GPU, what
is inside of it is only a stand-in with the same matmuls.
"""

import math
from typing import Any

import numpy as np

from models import blockwise_attention

# Splash attention -> its matmuls: of the scores (again), and of what is made of them.
_SPLASH = {"fwd": 2, "dkv": 4, "dq": 3}
# Primitives of JAX for cuDNN -> matmuls over the head size of queries and keys, and of values.
_CUDNN = {"dot_product_attention_fwd": (1, 1), "dot_product_attention_bwd": (3, 2)}


def is_call(equation: Any) -> bool:
  """Returns whether an equation is a call of cuDNN's attention, whose inside is not in HBM."""
  called = equation.primitive.name in ("jit", "pjit")
  return called and equation.params["name"] == blockwise_attention.CUDNN_KERNEL


def flops(equation: Any) -> float:
  """Returns the operations of the matmuls of a kernel; 0 for what is none, and for calls.

  Blocks of scores that the mask excludes are skipped.
  """
  name = equation.primitive.name
  if name == "pallas_call":
    return _of_splash(equation)
  products = _CUDNN.get(name.removesuffix("_wrapper"))
  return _of_cudnn(equation, *products) if products else 0.0


def _of_cudnn(equation: Any, over_keys: int, over_values: int) -> float:
  """Returns them of q_BTNH, k_BSKH and v_BSKU, the first arguments; the mask is causal."""
  (rows, queries, heads, size), (_, keys, _, _), (*_, of_values) = (
    x.aval.shape for x in equation.invars[:3]
  )
  window = equation.params["sliding_window_length"] or keys
  # Query t of `queries`, the last of which attends to the last key.
  pairs = np.minimum(np.arange(keys - queries, keys) + 1, window).sum()
  return 2.0 * rows * heads * float(pairs) * (over_keys * size + over_values * of_values)


def _of_splash(equation: Any) -> float:
  called = str(equation.params.get("name") or equation.params.get("name_and_src_info", ""))
  products = next((n for part, n in _SPLASH.items() if part in called), 0)
  arrays = [x.aval.shape for x in equation.invars if x.aval.ndim > 2 and x.aval.dtype.kind != "i"]
  if not products or len(arrays) < 2:
    return 0.0
  queries, keys = arrays[:2]
  tables = [x.aval for x in equation.invars if x.aval.ndim > 2 and x.aval.dtype.kind == "i"]
  share = 1.0  # where nothing is masked, or blocks are chosen at run time, by int32
  if tables and tables[0].dtype.itemsize < 4:
    grid = equation.params["grid_mapping"].grid  # ends in heads and blocks: of queries, of keys
    count, most = grid[-3 if "dkv" in called else -2], grid[-1]
    share = (1 + 1 / count) / 2 if most == count else most / count  # with a window, fewer
  return products * 2.0 * math.prod(queries) * keys[-2] * share
