"""A run makes itself the owner of its workdir before it changes anything in it."""

import contextlib
import sys
from collections.abc import Iterator

from etils import epath

from processes import coordination as groups
from processes.watchdog import STARTING, Watchdog
from processes.workdir_lease import Ownership, acquire, claims_to
from training import restore
from training.metrics.console import say
from training.setup import Job

# After exit code 1 a supervisor would restart the run, next to the one that has replaced it.
REPLACED = 2


@contextlib.contextmanager
def owned(job: Job, workdir: epath.Path, watch: Watchdog) -> Iterator[Ownership]:
  """Owns the workdir until the run ends; if the body is refused, undoes the claim.

  All processes call it. Process 0 claims the workdir and renews the claim until it is released, at
  the end of the run.

  Raises:
    OwnedError: it belongs to another run that is alive.
    ValueError: its storage has no conditional write.
    OSError: it cannot be read or written, or has no space for a checkpoint.
  """
  ownership = _shared(job, workdir, watch)
  try:
    yield ownership
    ownership.settle()
  except BaseException:
    ownership.end()
    raise


def _shared(job: Job, workdir: epath.Path, watch: Watchdog) -> Ownership:
  keys, group = job.config.processes, watch.group
  watch.at("waiting for the workdir", STARTING)
  if group.first:
    restore.require_room(job, workdir)  # before a claim is written
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
    group.put("owner/0", {"number": ownership.number})
  # As long as process 0 may wait; the watchdog notifies the others of its refusal.
  longest = 2 * keys.start_timeout_seconds + keys.owner_wait_seconds + 3600
  group.wait("owner", timeout_seconds=longest)
  watch.at("starting", STARTING)
  return ownership if group.first else Ownership(number=group.list("owner")["0"]["number"])


def _replaced(workdir: epath.Path, what: str, watch: Watchdog) -> None:
  """Ends all processes of this run at once, from whichever thread."""
  text = f"{workdir}: {what}; this run stops here, and writes nothing more"
  print(f"error: {groups.label()}{text}", file=sys.stderr, flush=True)
  watch.refusing(text)
  groups.leave(REPLACED, patience_seconds=3)
