"""The chapters, in their order."""

from reports.tour import (
  arrays,
  collectives,
  computation_follows_data,
  constraints,
  cost,
  network,
  pipeline,
  processes,
  random_numbers,
  vmap_to_mesh,
)
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
  "random_numbers": random_numbers,
  "processes": processes,
  "cost": cost,
}


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
