"""Compiling without JAX's persistent compilation cache; needs jax alone."""

import contextlib
from collections.abc import Iterator

import jax

# No other API forgets whether the cache is used, which JAX asks once.
from jax.experimental.compilation_cache import compilation_cache


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
  """Turns the cache off: what is read from it has no warnings, and may not be serialized again."""
  before = jax.config.jax_enable_compilation_cache

  def use(value: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", value)
    compilation_cache.reset_cache()  # it remembers whether it is used

  use(False)
  try:
    yield
  finally:
    use(before)
