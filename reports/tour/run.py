"""The tour in a terminal: `python main.py tour [--chapter=NAME]`."""

from collections.abc import Mapping
from typing import Any

import jax

# Not covered by JAX's compatibility policy (JEP 15856). It replaces devices that the tour cannot
# use by simulated ones in the same process; its public name was removed (jax#24865).
import jax.extend
from rich.console import Console, Group
from rich.markdown import Markdown
from rich.padding import Padding
from rich.text import Text

from reports import drawings
from reports.tour import (
  arrays,
  collectives,
  computation_follows_data,
  constraints,
  network,
  pipeline,
  processes,
  random_numbers,
  states,
  vmap_to_mesh,
)
from reports.tour.scene import DEVICES, Shown
from runtime import devices
from runtime.suggest import nearest

# name -> module
CHAPTERS = {
  "arrays": arrays,
  "computation_follows_data": computation_follows_data,
  "constraints": constraints,
  "vmap_to_mesh": vmap_to_mesh,
  "collectives": collectives,
  "network": network,
  "pipeline": pipeline,
  "states": states,
  "random_numbers": random_numbers,
  "processes": processes,
}
WIDTH = 100
INDENT = 2


def chosen(name: str | None) -> dict:
  """Returns the chapter of a name, or all of them.

  Raises:
    ValueError: there is no such chapter; with the nearest name.
  """
  if name is None:
    return CHAPTERS
  if name in CHAPTERS:
    return {name: CHAPTERS[name]}
  raise ValueError(
    f"unknown chapter {name!r}; there are {', '.join(CHAPTERS)}{nearest(name, CHAPTERS)}"
  )


def start(*, simulate: bool = False) -> None:
  """Starts JAX's backend: 8 real devices if available, else 8 simulated ones."""
  if not simulate and devices.hardware() is not None:
    try:
      devices.start({"data": DEVICES})
      return
    except ValueError:  # another number of them
      jax.extend.backend.clear_backends()
  devices.start({"data": DEVICES}, simulate=True)


def show(shown: Mapping[str, Any], *, console: Console | None = None) -> None:
  """Runs chapters and prints what they show.

  Args:
    shown: name -> chapter, of `chosen`.
    console: where to print; the standard output.
  """
  console = console or Console(highlight=False)
  console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
  kind = jax.devices()[0].device_kind
  console.print(f"{DEVICES} devices of {jax.device_count()} x {kind}, jax {jax.__version__}")
  for name, module in shown.items():
    console.print()
    console.rule(Text(f"{name}: {module.TITLE}", style="bold"), align="left")
    console.print()
    console.print(markdown(module.OPENING))
    for number, scene in enumerate(module.SCENES, start=1):
      console.print(Text(f"\n{number}. {scene.title}\n", style="bold"))
      console.print(markdown(scene.markdown))
      console.print(outcome(scene.play(), width=console.width))


def outcome(shown: Shown, *, width: int) -> Group:
  """Returns what is printed after a scene has run: pictures, text, and what to notice."""
  parts = []
  for picture in shown.pictures:
    drawn = drawings.terminal(picture, width=width - 2 * INDENT)
    parts += [Text(), Padding(drawn, (0, INDENT))]
  return Group(*parts, Text(), markdown(shown.markdown(shown.measured)))


def markdown(text: str) -> Markdown:
  """Returns text that the terminal wraps, with its code in color."""
  return Markdown(text, code_theme="ansi_dark", inline_code_lexer="python")
