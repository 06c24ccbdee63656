"""JAX reads its variables (JAX_ENABLE_X64, ...) when it is imported, and raises over wrong ones."""

import sys

from runtime import exit_codes


def load() -> None:
  """Imports JAX; ends the process with one message where a variable of JAX's has a wrong value."""
  try:
    import jax  # noqa: F401
  except ValueError as error:
    print(f"refused: {error}", file=sys.stderr, flush=True)
    sys.exit(exit_codes.REFUSED)
