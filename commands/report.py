"""The verb `report`: the page of a run, or one that overlays several, from their workdirs."""

from etils import epath

from commands import flags
from commands.refusal import refuse
from reports import run_files, run_page, units
from reports.charts import SERIES
from runtime import exit_codes, files
from training.history import REPORT

AGAINST = "against.html"  # in the workdir, where `--html` is not given


def run() -> int:
  """Writes the page and returns the exit code."""
  try:
    folders, file = _folders(), _file()
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


def _folders() -> list[str]:
  """Returns the workdirs.

  Raises:
    ValueError: there is none, one is given twice, or there are more than colors.
  """
  if flags.WORKDIR.value is None:
    raise ValueError("report: give the run's --workdir, such as --workdir=runs/dp4_tp2_lm")
  folders = [flags.WORKDIR.value, *flags.AGAINST_RUN.value]
  if "" in folders:
    raise ValueError("--against= is empty; give the workdir of another run, or leave the flag out")
  paths = [str(epath.Path(folder)) for folder in folders]
  if twice := [path for place, path in enumerate(paths) if path in paths[:place]]:
    raise ValueError(f"report: {twice[0]} is given twice; give each run once")
  if len(paths) > len(SERIES):
    raise ValueError(
      f"report: {len(paths)} runs, and there are colors for {len(SERIES)}; leave some out"
    )
  return paths


def _file() -> epath.Path:
  """Returns the file to write; raises ValueError where that is impossible."""
  if flags.HTML.value is None:
    return epath.Path(flags.WORKDIR.value) / (AGAINST if flags.AGAINST_RUN.value else REPORT)
  file = epath.Path(flags.HTML.value)
  if file.is_dir() or not file.parent.is_dir():
    raise ValueError(f"--html={file}: give a file in a folder that exists")
  return file
