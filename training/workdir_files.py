"""The files of a workdir; before a run, each is checked to be a plain file, or not there."""

import os
from collections.abc import Callable

from etils import epath

from processes.coordination import current
from runtime import files
from training import history
from training.metrics.log_lines import FILE, MOST_BYTES
from training.metrics.writer import DAMAGED

CONFIG, LAYOUT, BAD_RECORDS = "config.json", "layout.txt", "bad_records.json"
WRITTEN = (CONFIG, LAYOUT, BAD_RECORDS, FILE, DAMAGED)
WRITTEN += (history.FILE, history.REPORT, history.DRAWINGS)
FOLDERS = ("profile", "tokenizer")


def require_plain(workdir: epath.Path) -> None:
  """Checks, without changing anything, that the files of a workdir can be read and written.

  The workdir and its folder of checkpoints may be symbolic links; the files may not, since a run
  would then write elsewhere than it reports.

  Raises:
    OSError: some cannot; all of them in one message, with the fix.
  """
  if not files.is_local(workdir):
    return
  wrong = [text for name in WRITTEN if (text := _wrong_file(workdir / name))]
  wrong += [
    f"{workdir / name} is not a folder"
    for name in FOLDERS
    if os.path.lexists(workdir / name) and not os.path.isdir(workdir / name)
  ]
  if wrong:
    raise OSError(
      "; ".join(wrong) + "; a run keeps files of its own there: move what is there away (mv), or "
      "give another --workdir"
    )


def add_collectives(workdir: epath.Path, table: str, require: Callable[[], None]) -> None:
  """Adds the collectives of the compiled train step to `layout.txt`, on process 0."""
  if current().first:
    text = f"\ncollectives of a train step, by mesh axis:\n{table}\n"
    files.append(workdir / LAYOUT, text.encode(), require=require)


def _wrong_file(path: epath.Path) -> str:
  """Returns why a file cannot be read and written; "" if it can, or does not exist."""
  try:
    if what := files.kind(path):
      target = f" to {os.readlink(path)}" if os.path.islink(path) else ""
      return f"{path} is {what}{target}, not a plain file"
    os.close(files.open_plain(path, os.O_RDWR))
    size = os.stat(path).st_size
  except (FileNotFoundError, NotADirectoryError):  # the latter is reported for the workdir
    return ""
  except OSError as error:
    return f"{path} cannot be read and written: {error.strerror}"
  if size > MOST_BYTES:
    return f"{path} has {size:,} bytes, and at most {MOST_BYTES:,} are read"
  return ""
