"""The workdir of a run: before it changes anything there, its files are checked, and it owns it."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

from etils import epath
from ml_collections import ConfigDict

from processes import coordination as groups
from processes.coordination import current
from processes.watchdog import STARTING, Watchdog
from processes.workdir_lease import Ownership, acquire, claims_to
from runtime import files
from training.metrics.console import say
from training.metrics.log_lines import DAMAGED, FILE, MOST_BYTES

CONFIG, GIVEN = "config.json", "given.json"  # the config finalized, and as it was parsed
LAYOUT, BAD_RECORDS = "layout.txt", "bad_records.json"
# The history of a run, and what else is written for its page: the page, drawings of the layout.
HISTORY, REPORT, DRAWINGS = "history.jsonl", "run.html", "layout.json"
WRITTEN = (CONFIG, GIVEN, LAYOUT, BAD_RECORDS, FILE, DAMAGED)
WRITTEN += (HISTORY, REPORT, DRAWINGS)
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


# ------------------------------ its owner ------------------------------

# After exit code 1 a supervisor would restart the run, next to the one that has replaced it.
_REPLACED = 2


@contextlib.contextmanager
def owned(
  workdir: epath.Path, keys: ConfigDict, watch: Watchdog, require_room: Callable[[], None]
) -> Iterator[Ownership]:
  """Owns the workdir until the run ends; if the body is refused, undoes the claim.

  All processes call it. Process 0 claims the workdir and renews the claim until it is released, at
  the end of the run.

  Args:
    workdir: of the run.
    keys: the section `processes`.
    watch: of this process.
    require_room: raises OSError where no checkpoint fits; it is called before a claim is written.

  Raises:
    OwnedError: it belongs to another run that is alive.
    ValueError: its storage has no conditional write.
    OSError: it cannot be read or written, or has no space for a checkpoint.
  """
  group, ownership = watch.group, Ownership()
  watch.at("waiting for the workdir", STARTING)
  if group.first:
    require_room()
    ownership = acquire(
      claims_to(workdir),
      str(workdir),
      lease_seconds=keys.lease_seconds,
      wait_seconds=keys.owner_wait_seconds,
      ending_seconds=keys.start_timeout_seconds,
      processes=group.count,
      say=say,
    )
    groups.before_leaving(ownership.end)
    ownership.watch(lambda: bool(watch.stop), lambda text: _replaced(workdir, text, watch))
  try:
    if group.first:
      group.put("owner/0", {"number": ownership.number})
    # As long as process 0 may wait; the watchdog notifies the others of its refusal.
    longest = 2 * keys.start_timeout_seconds + keys.owner_wait_seconds + 3600
    group.wait("owner", timeout_seconds=longest)
    watch.at("starting", STARTING)
    if not group.first:
      ownership = Ownership(number=group.list("owner")["0"]["number"])
    yield ownership
    ownership.settle()
  except BaseException:  # refused; or another process has died, and this one claims it again
    ownership.end()
    raise


def _replaced(workdir: epath.Path, what: str, watch: Watchdog) -> None:
  """Ends all processes of this run at once, from whichever thread."""
  text = f"{workdir}: {what}; this run stops here, and writes nothing more"
  print(f"error: {groups.label()}{text}", file=sys.stderr, flush=True)
  watch.refusing(text)
  groups.leave(_REPLACED, patience_seconds=3)
