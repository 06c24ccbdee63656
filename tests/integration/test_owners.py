"""A workdir whose owner is alive, as a person at a second terminal meets it."""

import contextlib
import dataclasses
import json
import os
import threading

from processes.workdir_lease import claims_to, this_process
from tests.helpers.cli import TINY_MLP
from tests.training.checkpointing.states import contents

COMMAND = ["--config=configs/dp8.py:mlp", *TINY_MLP, "--config.training.steps=2"]
QUICK = ["--config.processes.lease_seconds=2", "--config.processes.owner_wait_seconds=1"]


@contextlib.contextmanager
def owned(workdir):
  """Keeps a workdir for this process, whose heart beats meanwhile."""
  claims, over = claims_to(workdir), threading.Event()
  number = max(claims.numbers(), default=0) + 1
  said = {**dataclasses.asdict(this_process()), "host": "host\x1b[2J", "since": "noon"}
  assert claims.create(number, json.dumps(said))
  claims.write_beat(number, "running 0")

  def beat():
    count = 0
    while not over.wait(0.05):
      count += 1
      claims.write_beat(number, f"running {count}")

  thread = threading.Thread(target=beat)
  thread.start()
  try:
    yield claims
  finally:
    over.set()
    thread.join()


def test_a_second_start_is_refused_by_name_and_readers_are_not(main, tmp_path):
  command = [*COMMAND, f"--workdir={tmp_path / 'run'}"]
  code, out, err = main(*command)
  assert code == 0, (out, err)
  with owned(tmp_path / "run") as claims:
    there = files_but_beats(tmp_path)
    code, out, err = main(*command, *QUICK)
    assert code == 2, (out, err)
    owner = rf"process {os.getpid()} on host\x1b[2J, since noon"
    assert err == (
      f"refused: {tmp_path / 'run'} belongs to another run that is alive: {owner}; stop it, wait "
      f"for its end, or give another --workdir\n"
    )
    assert f"{owner}; waiting for it to end, 1 s" in out
    code, _, err = main("evaluate", *command)
    assert code == 0, err
    assert files_but_beats(tmp_path) == there
    assert sorted(claims.numbers()) == [1, 2]
  code, out, err = main(*command, *QUICK)  # whose heart beats no longer, though it is alive
  assert code == 0, (out, err)
  assert claims.numbers() == [3]
  assert claims.read_beat(3)[0] == "released"


def files_but_beats(folder):
  """Returns what is in a folder, but for heartbeats."""
  return {path: found for path, found in contents(folder).items() if not path.endswith(".beat")}
