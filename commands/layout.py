"""The verb `layout`: the sharding of every array, of one or two strategies, as text or a page."""

import sys
from collections.abc import Callable

from etils import epath

from commands import build, config_flag, flags
from partitioning import rules
from processes import coordination as groups
from processes.watchdog import Watchdog
from reports import layout_page, layout_text
from runtime import exit_codes, files
from runtime.printable import printable
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
  file = flags.HTML.value and epath.Path(flags.HTML.value)
  if file and (file.is_dir() or not file.parent.is_dir()):
    raise ValueError(f"--html={file}: give a file in a folder that exists")

  def run() -> int:
    if file is None:
      say(text)
      return exit_codes.DONE
    written = layout_page.html(*jobs, titles=titles, command=flags.command_line())
    try:
      if groups.current().first:
        files.replace(file, written)
    except OSError as error:
      print(printable(f"error: --html={file}: {error}"), file=sys.stderr, flush=True)
      return exit_codes.FAILED
    say(f"wrote {file}, {rules.size_text(len(written.encode()))}")
    return exit_codes.DONE

  return run
