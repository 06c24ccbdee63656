"""The verb `layout`: the sharding of every array, of one or two strategies, as text or a page."""

from collections.abc import Callable

from commands import build, config_flag, flags
from processes.watchdog import Watchdog
from reports import layout_page, layout_text
from runtime import exit_codes
from training.metrics.console import say


def prepare(watch: Watchdog) -> Callable[[], int]:
  """Prints the layout, or two side by side, or writes them as a page."""
  del watch
  if flags.AGAINST.value is None:
    jobs, titles = build.prepare(flags.CONFIG), (config_flag.name(flags.CONFIG), "")
    text = layout_text.job_text(jobs[0])
  else:
    jobs = build.prepare(flags.CONFIG, flags.AGAINST)
    sections = [
      {name: p for section in one.placements.values() for name, p in section.items()}
      for one in jobs
    ]
    titles = (config_flag.name(flags.CONFIG), config_flag.name(flags.AGAINST))
    text = layout_text.against_text(*sections, tuple(one.devices.sizes for one in jobs), titles)
  file = flags.output_file(flags.HTML)

  def run() -> int:
    if file is None:
      say(text)
      return exit_codes.DONE
    page = layout_page.html(*jobs, titles=titles, command=flags.command_line())
    return exit_codes.DONE if flags.write_output(flags.HTML, page) else exit_codes.FAILED

  return run
