"""Consistency checks of the processes of a run, before the first collective.

A collective between processes that differ hangs or silently computes something else. So each
process publishes what it is about to do in the coordination service, with a digest. Process 0
compares the digests, and names two processes that differ: every process verifies that difference
itself. Comparing all with all would be N * N facts.
"""

import collections
import hashlib
import json
import secrets
import time
from collections.abc import Mapping
from typing import Any

from etils import epath

from processes.coordination import Group, NotTogetherError
from runtime import forms

_MOST_LINES = 12
_MOST_KINDS = 64  # distinct sets of facts that are compared
_LATE_SECONDS = 4.0


class DifferenceError(ValueError):
  """The processes differ; every one of them raises this with the same message."""


def agree(group: Group, stage: str, facts: Mapping[str, Any], *, timeout_seconds: float) -> None:
  """Compares facts over all processes.

  Args:
    group: the processes.
    stage: a name, used once in a run.
    facts: name -> what JSON can write.
    timeout_seconds: how long the slowest may take to arrive.

  Raises:
    DifferenceError: with the processes that differ, each key and both values.
    NotTogetherError: naming those that did not arrive.
  """
  if group.alone:
    return
  digest = _digest(facts)
  group.put(f"facts/{stage}/{group.index}", facts)
  group.put(f"digests/{stage}/{group.index}", {"digest": digest})
  limits = {"timeout_seconds": timeout_seconds, "shown": f"digests/{stage}"}
  group.wait(stage, **limits)
  if group.first:
    group.put(f"verdicts/{stage}", _verdict(group, stage))
  group.wait(f"the comparison of {stage}", **limits)
  verdict = group.get(f"verdicts/{stage}") or {}
  if not verdict.get("text") and verdict.get("digest") == digest:
    return
  examples = [group.get(f"digests/{stage}/{index}") for index in verdict.get("examples", ())]
  if len(examples) == 2 and None not in examples and examples[0] != examples[1]:
    raise DifferenceError(verdict["text"])
  # This process does not see the difference, so it does not refuse.
  raise NotTogetherError(
    f"process 0 reports on {stage!r} what this process does not see: {verdict}"
    f"{group.unsigned_text()}"
  )


def _digest(facts: Mapping[str, Any]) -> str:
  as_read = json.loads(json.dumps(facts))
  return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


def _verdict(group: Group, stage: str) -> dict[str, Any]:
  """Returns what process 0 has found: `text`, "" if all agree, and two processes that differ."""
  holders = collections.defaultdict(list)  # digest -> indices
  for index, value in group.list(f"digests/{stage}").items():
    holders[value["digest"]].append(int(index))
  if len(holders) == 1:
    return {"text": "", "digest": next(iter(holders))}
  shown = {}
  for indices in sorted(holders.values(), key=min)[:_MOST_KINDS]:
    facts = group.get(f"facts/{stage}/{min(indices)}") or {}
    shown |= dict.fromkeys(indices, facts)
  head = "the processes differ; a collective would hang or compute nonsense:"
  found = forms.refusal(head, differences(shown), _MOST_LINES)
  text = f"{found}\nstart all with the same command, code and libraries"
  return {"text": text, "examples": sorted(map(min, holders.values()))[:2]}


def differences(shown: Mapping[int, Mapping[str, Any]]) -> list[str]:
  """Returns a line for each key whose values differ, with the processes of each value.

  Args:
    shown: index of the process -> its facts.
  """
  lines = []
  for key in sorted({key for facts in shown.values() for key in facts}):
    holders = collections.defaultdict(list)
    for index in sorted(shown):
      value = json.dumps(shown[index][key]) if key in shown[index] else "missing"
      holders[value].append(index)
    if len(holders) > 1:
      # The majority first; in a tie, those with process 0.
      groups = sorted(holders.items(), key=lambda item: (-len(item[1]), item[1]))
      lines.append(
        f"{key}: " + "; ".join(f"{value} on {_names(indices)}" for value, indices in groups)
      )
  return lines


def _names(indices: list[int]) -> str:
  if len(indices) == 1:
    return f"process {indices[0]}"
  few = ", ".join(map(str, indices[:6])) + (", ..." if len(indices) > 6 else "")
  return f"processes {few}"


def _reads(path: epath.Path, token: str) -> bool:
  """Returns whether a file appears with its content; file systems may delay that some seconds."""
  try:
    next(iter(path.parent.iterdir()), None)  # makes a network file system ask its server
    return path.exists() and path.read_text() == token
  except OSError:
    return False


def same_folder(group: Group, folder: epath.Path, *, timeout_seconds: float) -> None:
  """Checks that all processes see the same folder: process 0 writes a file, all read it back.

  Raises:
    DifferenceError: some do not see it.
    OSError: process 0 cannot write there.
  """
  if group.alone:
    return
  made = [path for path in (folder, *folder.parents) if not path.exists()]
  token = secrets.token_hex(16)
  if group.first:
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".preflight-*"):  # by a start that was killed
      left.unlink(missing_ok=True)
    (folder / f".preflight-{token}").write_text(token)
    group.put("token/0", {"token": token})
  group.wait("token", timeout_seconds=timeout_seconds)
  token = group.get("token/0")["token"]
  path = folder / f".preflight-{token}"
  sees, until = _reads(path, token), time.monotonic() + _LATE_SECONDS
  while not sees and time.monotonic() < until:
    time.sleep(0.2)
    sees = _reads(path, token)
  if not sees:  # only these publish anything: all read every entry
    group.put(f"blind/{group.index}", {})
  group.wait("sees", timeout_seconds=timeout_seconds)
  blind = [int(index) for index in group.list("blind")]
  if group.first:
    path.unlink()
    for empty in made if blind else ():
      empty.rmdir()
  if blind:
    raise DifferenceError(
      f"{_names(sorted(blind))} of {group.count} cannot read what process 0 writes to the workdir "
      f"{folder}; name a folder that all see (a network file system, or gs://...) with --workdir"
    )
