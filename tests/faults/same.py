"""What a run leaves that another must equal to the last bit."""

import dataclasses
import hashlib
import pathlib

import numpy as np
import tensorstore as ts

from tests.faults.harness import saved, story

DIGEST_EVERY = 10  # steps
SAVE_EVERY = 5
# Checkpoints of every tenth step stay, those in between are removed: both are tried.
KEPT = (
  f"--config.checkpoint.every_steps={SAVE_EVERY}",
  "--config.checkpoint.keep=1",
  f"--config.checkpoint.keep_every_steps={DIGEST_EVERY}",
)
# So that each of two processes writes arrays: of copies as small as these process 0 writes all.
SPLIT = ("--config.mesh.data=1", "--config.mesh.fsdp=2")


@dataclasses.dataclass(frozen=True)
class Record:
  """What a run has made of its data.

  The examples of a step need no list: another row would show in the bits of its loss.

  Attributes:
    lines: (step, the text of its loss, gradient norm and evaluation), as they stand.
    arrays: step -> name -> SHA-256 of an array of its checkpoint.
  """

  lines: list[tuple[int, str]]
  arrays: dict[int, dict[str, str]]


def record(workdir: pathlib.Path) -> Record:
  """Returns what a run has left; every tenth step and the last are digested."""
  steps = saved(workdir)
  kept = {step for step in steps if step % DIGEST_EVERY == 0} | set(steps[-1:])
  folder = workdir / "checkpoints"
  return Record(story(workdir), {step: digests(folder / str(step)) for step in sorted(kept)})


def arrays(checkpoint: pathlib.Path) -> dict[str, np.ndarray]:
  """Returns name -> each array of a checkpoint, read without the project."""
  state = {"driver": "ocdbt", "base": f"file://{(checkpoint / 'state').resolve()}"}
  keys = [key.decode() for key in ts.KvStore.open(state).result().list().result()]
  names = sorted(key.removesuffix("/.zarray") for key in keys if key.endswith("/.zarray"))
  specs = [{"driver": "zarr", "kvstore": state, "path": name} for name in names]
  return {n: ts.open(s).result().read().result() for n, s in zip(names, specs, strict=True)}


def digest(array: np.ndarray) -> str:
  """Returns the SHA-256 of an array's dtype, shape and bytes."""
  header = f"{array.dtype} {array.shape} ".encode()
  return hashlib.sha256(header + array.tobytes()).hexdigest()


def digests(checkpoint: pathlib.Path) -> dict[str, str]:
  """Returns name -> digest of each array of a checkpoint."""
  return {name: digest(array) for name, array in arrays(checkpoint).items()}


def difference(found: Record, expected: Record) -> str:
  """Returns where two records differ first, or "" where they are the same.

  Checkpoints that only one of them has are no difference: a run that was stopped saves more.
  """
  for ours, theirs in zip(found.lines, expected.lines, strict=False):
    if ours != theirs:
      return f"metrics.jsonl: {ours} instead of {theirs}"
  if len(found.lines) != len(expected.lines):
    return f"metrics.jsonl: {len(found.lines)} lines instead of {len(expected.lines)}"
  for step, wanted in expected.arrays.items():
    if step not in found.arrays:
      return f"no checkpoint of step {step}, only of {', '.join(map(str, found.arrays))}"
    for name in sorted({*wanted, *found.arrays[step]}):
      if wanted.get(name) != found.arrays[step].get(name):
        return f"step {step}: {name} has other bits"
  return ""


def check(workdir: pathlib.Path, expected: Record) -> None:
  """Fails, saying where, unless a run has left what it should."""
  if text := difference(record(workdir), expected):
    raise AssertionError(f"not the same: {text}")
