"""Keeps transfers to a GPU away from the first execution of a program.

When cuDNN's frontend loads an attention kernel, it captures a CUDA graph on the stream on which the
device computes (`warmup` of its graph). A transfer that another thread starts meanwhile waits for
that stream, and becomes part of the capture: the execution fails with "capturing stream has
unjoined work". Kernels are loaded when a program is first executed.
"""

import threading
from collections.abc import Callable
from typing import Any

from etils import epy

with epy.lazy_imports():
  import jax

_DEVICES = threading.Lock()


def placed(place: Callable[[], Any]) -> Any:
  """Returns the arrays that `place` puts onto devices, complete, while no program runs first."""
  with _DEVICES:
    return jax.block_until_ready(place())


class AloneAtFirst:
  """A compiled function whose first call has no transfers of `placed` beside it."""

  def __init__(self, compiled: Callable):
    """Wraps a function, whose attributes it has."""
    self._compiled = compiled
    self._ran = False

  def __call__(self, *arguments: Any) -> Any:
    """Calls the function; the first time it waits for what it returns."""
    if self._ran:
      return self._compiled(*arguments)
    with _DEVICES:
      returned = jax.block_until_ready(self._compiled(*arguments))
    self._ran = True
    return returned

  def __getattr__(self, name: str) -> Any:
    """Returns an attribute of the function."""
    return getattr(self._compiled, name)


def alone_at_first(compiled: Callable, platform: str) -> Callable:
  """Returns a compiled function for a platform; on GPUs one that is alone when it first runs."""
  return AloneAtFirst(compiled) if platform == "gpu" else compiled
