"""Activations by name, for those who want to see them: `record("logits", x)`.

Nothing is recorded, and no program changes, unless a forward pass is traced inside `recording()`.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Mapping

import jax

STACKED = "layers/"  # how names of activations of all layers begin
_RECORD: contextvars.ContextVar[dict[str, jax.Array] | None] = contextvars.ContextVar(
  "activations", default=None
)


@contextlib.contextmanager
def recording() -> Iterator[dict[str, jax.Array]]:
  """Yields name -> activation of the forward pass that is traced inside the block.

  Those of stacked layers have the layers as their first dim, and names that begin with STACKED.
  """
  found: dict[str, jax.Array] = {}
  token = _RECORD.set(found)
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
  if (found := _RECORD.get()) is not None:
    found[name] = x[..., :length]


@contextlib.contextmanager
def layer() -> Iterator[dict[str, jax.Array]]:
  """Yields what is recorded inside the block, the body of a scan over layers; {} while nothing is.

  The body returns it, and `record_layers` takes what the scan has stacked.
  """
  if _RECORD.get() is None:
    yield {}
    return
  with recording() as found:
    yield found


def record_layers(stacked: Mapping[str, jax.Array]) -> None:
  """Records the activations of stacked layers, the layers first."""
  for name, x in stacked.items():
    record(f"{STACKED}{name}", x)
