"""The verb `tour`: small examples of what sharding does. Without a config."""

from commands import flags
from commands.refusal import refuse
from reports.tour import run as tour
from runtime import exit_codes


def run() -> int:
  """Prints the tour; it needs no config, and starts further processes itself."""
  try:
    chapters_shown = tour.chosen(flags.CHAPTER.value)
    tour.start(simulate=flags.SIMULATE.value)
  except (ValueError, OSError, RuntimeError) as error:
    return refuse(error)
  tour.show(chapters_shown)
  return exit_codes.DONE
