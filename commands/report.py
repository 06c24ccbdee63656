"""The verb `report`: the page of a run, or one that overlays several, from their workdirs."""

import re
from collections.abc import Sequence

from etils import epath

from commands import flags
from commands.refusal import refuse
from reports import run_files, run_page, units
from reports.charts import SERIES
from runtime import exit_codes, files
from training.history import REPORT

AGAINST = "against.html"  # in the first of several workdirs, where `--html` is not given


def run(*words: str) -> int:
  """Writes the page of the runs that words name, and returns the exit code."""
  try:
    folders = _folders([*([flags.WORKDIR.value] if flags.given(flags.WORKDIR) else []), *words])
    file = _file(folders)
    runs = [run_files.read(folder) for folder in folders]
    command = flags.command_line()
    if len(runs) == 1:
      text = run_page.html(runs[0], command=command)
    else:
      text = run_page.comparison(runs, command=command)
    files.replace(file, text)
  except (ValueError, OSError) as error:
    return refuse(error)
  print(f"wrote {file}, {units.size(len(text.encode()))}", flush=True)
  return exit_codes.DONE


def _folders(words: Sequence[str]) -> list[epath.Path]:
  """Returns the workdirs that words name; a pattern, such as `runs/lr*`, names all that match.

  Raises:
    ValueError: there is none, one is given twice, or there are more than colors.
  """
  if not words:
    raise ValueError("report: name a run, such as runs/dp4_tp2_lm, or several")
  if "" in words:
    raise ValueError("report: a run's name is empty; give its workdir, or leave it out")
  paths = [path for word in words for path in _matching(word)]
  if twice := [path for place, path in enumerate(paths) if path in paths[:place]]:
    raise ValueError(f"report: {twice[0]} is given twice; give each run once")
  if len(paths) > len(SERIES):
    raise ValueError(
      f"report: {len(paths)} runs, and there are colors for {len(SERIES)}; leave some out"
    )
  return paths


def _matching(word: str) -> list[epath.Path]:
  """Returns the workdir of this name, or those that match it in the order of their names.

  Shells expand patterns, but not quoted ones, nor those in buckets.

  Raises:
    ValueError: no run matches.
  """
  begins = re.search(r"[*?[]", word)
  if begins is None or epath.Path(word).exists():
    return [epath.Path(word)]
  parent, slash, _ = word[: begins.start()].rpartition("/")
  found = epath.Path(parent or slash or ".").glob(word[len(parent + slash) :])
  if not (runs := sorted(path for path in found if run_files.is_run(path))):
    raise ValueError(f"report: no run's workdir matches {word!r}")
  return runs


def _file(folders: Sequence[epath.Path]) -> epath.Path:
  """Returns the file to write; raises ValueError where that is impossible."""
  if flags.HTML.value is None:
    return folders[0] / (AGAINST if len(folders) > 1 else REPORT)
  file = epath.Path(flags.HTML.value)
  if file.is_dir() or not file.parent.is_dir():
    raise ValueError(f"--html={file}: give a file in a folder that exists")
  return file
