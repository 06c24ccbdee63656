"""The verb `report`: the page of a run, or one of several, from their workdirs."""

import re
import shutil
import sys
from collections.abc import Sequence

from etils import epath

from commands import flags
from reports import run_files, run_index, run_page
from runtime import exit_codes, files, units
from training.workdir_files import REPORT

# The page of several runs, where `--html` is not given: in the first of them, or in their folder.
AGAINST, INDEX = "against.html", "index.html"


def run(*words: str) -> int:
  """Writes the page of the runs that words name, and returns the exit code."""
  words = [*([flags.WORKDIR.value] if flags.given(flags.WORKDIR) else []), *words]
  folders = _folders(words)
  file = _file(words, folders)
  runs = [run_files.read(folder) for folder in folders]
  command = flags.command_line()
  if len(runs) == 1 and run_files.is_run(epath.Path(words[0])):
    text = run_page.html(runs[0], command=command)
  else:
    _write_missing_pages(runs)
    text = run_index.html(runs, page=file, command=command)
    print(run_index.terminal(runs, shutil.get_terminal_size((100, 24)).columns), flush=True)
  files.replace(file, text)
  print(f"wrote {file}, {units.size(len(text.encode()))}", flush=True)
  return exit_codes.DONE


def _write_missing_pages(runs: Sequence[run_files.Run]) -> None:
  """Writes the page of each run that has none, so that the page of all links to it."""
  for run in runs:
    file = epath.Path(run.folder) / REPORT
    if not file.exists():
      try:
        files.replace(file, run_page.html(run))
      except OSError as error:
        print(f"{file} is not written: {error}", file=sys.stderr, flush=True)


def _folders(words: Sequence[str]) -> list[epath.Path]:
  """Returns the workdirs that words name: each a run, a folder of runs, or a pattern.

  Raises:
    ValueError: there is none, or one is given twice.
  """
  if not words:
    raise ValueError("report: name a run, such as runs/dp4_tp2_lm, or several")
  if "" in words:
    raise ValueError("report: a run's name is empty; give its workdir, or leave it out")
  paths = [path for word in words for path in _matching(word)]
  if twice := [path for place, path in enumerate(paths) if path in paths[:place]]:
    raise ValueError(f"report: {twice[0]} is given twice; give each run once")
  return paths


def _matching(word: str) -> list[epath.Path]:
  """Returns the workdir of this name, or those in it or that match it, in the order of their names.

  Shells expand patterns, but not quoted ones, nor those in buckets.

  Raises:
    ValueError: no run matches.
  """
  begins = re.search(r"[*?[]", word)
  if begins is None or epath.Path(word).exists():
    return run_files.in_folder(epath.Path(word)) or [epath.Path(word)]
  parent, slash, _ = word[: begins.start()].rpartition("/")
  found = epath.Path(parent or slash or ".").glob(word[len(parent + slash) :])
  if not (runs := sorted(path for path in found if run_files.is_run(path))):
    raise ValueError(f"report: no run's workdir matches {word!r}")
  return runs


def _file(words: Sequence[str], folders: Sequence[epath.Path]) -> epath.Path:
  """Returns the file to write; raises ValueError where that is impossible."""
  if flags.HTML.value is None:
    if len(words) == 1 and run_files.in_folder(folder := epath.Path(words[0])):
      return folder / INDEX
    return folders[0] / (AGAINST if len(folders) > 1 else REPORT)
  return flags.output_file(flags.HTML)
