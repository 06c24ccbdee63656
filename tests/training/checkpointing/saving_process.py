"""One of several processes that save and restore together, as it is told on standard input.

  saving_process.py FOLDER        with JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID

Reads a JSON list per line, a command and its arguments: see `Saver`. Answers each with a JSON
object: `result`, or `error` (the kind and the text); `said`, the warnings; `computed` and
`checked`, the files whose digests this process has computed and compared for it.
"""

import errno
import json
import os
import sys
import time

import jax

jax.config.update("jax_num_cpu_devices", 4)


from processes import coordination as groups  # noqa: E402
from tests.training.checkpointing import states  # noqa: E402
from training.checkpointing import integrity, reading  # noqa: E402
from training.checkpointing.checkpointer import Checkpointer  # noqa: E402
from training.checkpointing.consensus import Together  # noqa: E402

groups.connect(start_timeout_seconds=60, heartbeat_seconds=20)
reading.SMALL_BYTES = 100  # so that the files of a small state are shared out
computed, checked = [], []


def counted(function, paths_of, found):
  """Returns the function, noting the paths that it is given."""

  def call(folder, files, *more, **keys):
    files = list(files)
    found.extend(paths_of(files))
    return function(folder, files, *more, **keys)

  return call


integrity.compute_digests = counted(integrity.compute_digests, list, computed)
reading.check_contents = counted(
  reading.check_contents, lambda listed: [digest.path for digest in listed], checked
)


class Saver:
  """The commands."""

  def __init__(self, folder: str):
    """Opens the folder."""
    self._said: list[str] = []
    self._checkpointer = Checkpointer(
      folder,
      keep=9,
      warn=self._said.append,
      together=Together(groups.current(), timeout_seconds=60),
    )

  def save(self, step: int) -> None:
    """Starts to save a counting state."""
    tree, config, record = states.counting_tree(step), states.CONFIG, states.RECORD
    self._checkpointer.save(step, tree, config=config, record=record)

  def settle(self) -> int:
    """Checks, as at each of many steps, until the save is over; returns how often it did."""
    count = 0
    while self._checkpointer.saving:
      self._checkpointer.check()
      time.sleep(0.01)
      count += 1
    return count

  def wait(self) -> None:
    """Waits for the save."""
    self._checkpointer.wait()

  def steps(self) -> list[int]:
    """Returns the steps."""
    return self._checkpointer.steps()

  def restore(self) -> int:
    """Restores the newest step, and compares it; returns which."""
    step, tree = self._checkpointer.restore(states.counting_target())
    wanted = states.counting_tree(step)
    for ours, theirs in zip(jax.tree.leaves(tree), jax.tree.leaves(wanted), strict=True):
      for a, b in zip(ours.addressable_shards, theirs.addressable_shards, strict=True):
        assert (a.data == b.data).all()
    return step

  def lose_digests(self) -> None:
    """Lets the next writing of digests fail as on a full disk."""
    write = integrity.write_digests

    def full(folder, listed):
      integrity.write_digests = write
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    integrity.write_digests = full

  def remove_after(self, step: int) -> None:
    """Removes the newer steps."""
    self._checkpointer.remove_after(step)

  def said(self) -> list[str]:
    """Returns the warnings since the last call."""
    said, self._said[:] = list(self._said), []
    return said


def main(folder: str) -> None:
  """Does what it is told until there is nothing more."""
  saver = Saver(folder)
  print(json.dumps({"ready": True}), flush=True)
  for line in sys.stdin:
    name, *arguments = json.loads(line)
    answer = {}
    computed.clear(), checked.clear()
    try:
      answer["result"] = getattr(saver, name)(*arguments)
    except Exception as error:  # the test's to look at
      answer["error"] = [type(error).__name__, str(error)]
    answer |= {"said": saver.said(), "computed": computed[:], "checked": checked[:]}
    print(json.dumps(answer), flush=True)
  groups.part()


if __name__ == "__main__":
  main(sys.argv[1])
