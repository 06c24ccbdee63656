"""Activations by name, for those who want to see them: `record("logits", x)`.

Nothing is recorded, and no program changes, unless a forward pass is traced inside `recording()`.
"""

import collections
import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from runtime.layer_kinds import LAYERS

STACKED = LAYERS  # how names of activations of layers begin, where all are alike
# What is recorded, and what is computed of each activation.
_RECORD: contextvars.ContextVar[tuple[dict[str, Any], Callable] | None] = contextvars.ContextVar(
  "activations", default=None
)


@contextlib.contextmanager
def recording(each: Callable[[jax.Array], Any] = lambda x: x) -> Iterator[dict[str, Any]]:
  """Yields name -> activation of the forward pass that is traced inside the block, in its order.

  Those of stacked layers have the layers as their first dim, and names that begin with that of the
  stack.

  Args:
    each: computed of each activation and recorded in its place, a tree of arrays. A large model has
      no memory for all its activations at once, but for some numbers about each.
  """
  found = collections.OrderedDict()  # JAX sorts the keys of any other dict that a scan returns
  token = _RECORD.set((found, each))
  try:
    yield found
  finally:
    _RECORD.reset(token)


def record(name: str, x: jax.Array, *, length: int | None = None) -> None:
  """Records an activation.

  Not inside of a scan or another function that JAX traces on its own, but for `layer` below.

  Args:
    name: of this place in the model.
    x: the activation, the batch first.
    length: of its last dim, the rest of which is padding; None: there is none.
  """
  if (begun := _RECORD.get()) is not None:
    found, each = begun
    found[name] = each(x[..., :length])


@contextlib.contextmanager
def layer() -> Iterator[dict[str, Any]]:
  """Yields what is recorded inside the block, the body of a scan over layers; {} while nothing is.

  The body returns it, and `record_layers` takes what the scan has stacked.
  """
  if (begun := _RECORD.get()) is None:
    yield {}
    return
  with recording(begun[1]) as found:
    yield found


def record_layers(stacked: Mapping[str, Any], prefix: str = STACKED) -> None:
  """Records what the scan over layers has stacked, the layers first."""
  if (begun := _RECORD.get()) is not None:
    begun[0].update({f"{prefix}{name}": x for name, x in stacked.items()})
