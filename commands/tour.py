"""The verb `tour`: small examples of what sharding does. Without a config."""

from collections.abc import Callable

from commands import flags
from reports.tour import run as tour
from runtime import exit_codes


def run() -> Callable[[], int]:
  """Starts the tour, which needs no config, and returns what prints it."""
  chapters_shown = tour.chosen(flags.CHAPTER.value)
  tour.start(simulate=flags.SIMULATE.value)

  def show() -> int:
    tour.show(chapters_shown)
    return exit_codes.DONE

  return show
