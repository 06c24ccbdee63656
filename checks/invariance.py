"""Invariance: what must not change a step's result.

To rounding: the order of the rows, the number of microbatches and whatever else the description
says gives the same, what stands at masked positions. To the bit: a second run, a state that was
saved and restored. And the state keeps its types and shardings, and its buffers are reused.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from checks import equality
from checks.case import Case, is_key, leaf_of, named_leaves, replaced, to_host
from checks.report import Finding, Outcome
from runtime.collectives import size_text


def check(cases: Sequence[Case]) -> list[Outcome]:
  """Checks every mesh; what is the same to rounding on one device is left to `equality` there."""
  return [check_one(case, rounding=not i) for i, case in enumerate(cases)]


def check_one(case: Case, *, rounding: bool = True) -> Outcome:
  """Checks one mesh.

  Args:
    case: the program.
    rounding: also what must be the same to rounding: more programs are compiled for it.
  """
  step = _Steps(case)
  findings = [*_repeated(step), *_restored(step), *_kept_types(case), *_donated(case)]
  done = ["two runs", "restored state", "types and shardings"]
  done += ["donation"] if case.describe.donated else []
  if rounding:
    for name, found in _to_rounding(case):
      done.append(name)
      findings += found
  return Outcome("invariance", case.name, findings, ", ".join(done))


class _Steps:
  """Runs a step again and again, each time from the same numbers on the devices."""

  def __init__(self, case: Case):
    self.case = case
    self.run = case.jitted()
    self.first = self.after(case.start, 0)

  def after(self, state: Any, number: int) -> Any:
    """Returns the state and the metrics of a step on a batch, on the host."""
    found = self.run(*self.case.place(state, self.case.batch(number)))
    return to_host(dict(zip(("state", "metrics"), found, strict=True)))


def bits_apart(ours: Any, theirs: Any) -> list[str]:
  """Returns the names of the leaves that differ in a bit."""
  pairs = zip(named_leaves(ours).items(), named_leaves(theirs).values(), strict=True)
  return [name for (name, a), b in pairs if _bytes(a) != _bytes(b)]


def _bytes(leaf: Any) -> bytes:
  return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf).tobytes()


def _repeated(step: _Steps) -> Iterator[Finding]:
  apart = bits_apart(step.first, step.after(step.case.start, 0))
  if apart:
    yield Finding(
      f"two runs from the same state on the same batch differ in {len(apart)} leaves",
      apart[0],
      {"leaves": len(named_leaves(step.first))},
      "something outside of the state: random numbers of the host, a callback, the time; on "
      "accelerators also atomic additions, which the compiler can be told to avoid",
    )


def _restored(step: _Steps) -> Iterator[Finding]:
  state = step.first["state"]
  restored = state
  if save_and_restore := step.case.describe.save_and_restore:
    restored = to_host(save_and_restore(step.case.place(state)[0]))
  wanted, found = jax.tree.structure(state), jax.tree.structure(restored)
  if wanted != found:
    yield Finding(
      "the restored state is another tree",
      f"{found} instead of {wanted}",
      {"leaves": found.num_leaves, "leaves before": wanted.num_leaves},
      "a part of the state is not saved, or is restored as another type",
    )
    return
  lost = bits_apart(state, restored)
  apart = bits_apart(step.after(state, 1), step.after(restored, 1))
  if lost or apart:
    lossy = [name for name in lost if _dtype(state, name) != _dtype(restored, name)]
    yield Finding(
      f"a step after saving and restoring differs in {len(apart)} leaves; {len(lost)} leaves were "
      "restored with other bits",
      (lost or apart)[0],
      {"restored as another dtype": len(lossy)},
      "the checkpoint rounds a part of the state, or leaves it out"
      if lost
      else "the step depends on something that is not in the state",
    )


def _dtype(tree: Any, name: str) -> str:
  return str(leaf_of(tree, name).dtype)


def _kept_types(case: Case) -> Iterator[Finding]:
  """Yields a finding where the new state has other shapes, dtypes or shardings than the old."""
  before = named_leaves(case.start)
  after = named_leaves(jax.eval_shape(case.program.step, *case.place())[0])
  if [*before] != [*after]:
    apart = set(before) ^ set(after)
    changed = dict.fromkeys(apart, "in one of them alone") or {"the state": "another order"}
  else:
    changed = {
      name: f"{old.dtype}{list(old.shape)} becomes {after[name].dtype}{list(after[name].shape)}"
      for name, old in before.items()
      if (old.shape, old.dtype) != (after[name].shape, after[name].dtype)
    }
  if changed:
    yield Finding(
      f"the state's type changes in a step, for {len(changed)} leaves",
      next(iter(changed)),
      {},
      "a cast that is missing where the update is applied, or a weakly typed initial value; the "
      "second step is compiled anew, and the buffers cannot be reused",
      [f"{name}: {what}" for name, what in list(changed.items())[:8]],
    )


def _donated(case: Case) -> Iterator[Finding]:
  if not case.describe.donated:
    return
  unused = [text for text in case.compiled.warned if "donated buffers" in text]
  sizes = case.compiled.compiled.memory_analysis()
  reused = sizes.alias_size_in_bytes if sizes is not None else None
  mesh = case.program.mesh
  placed = zip(named_leaves(case.start).values(), jax.tree.leaves(case.shardings[0]), strict=True)
  held = sum(
    int(np.prod(sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
    for leaf, sharding in placed
    if not is_key(leaf)
  )
  # Small leaves, such as counters, may be copied.
  if unused or (reused is not None and reused < 0.9 * held):
    yield Finding(
      f"{size_text(max(0, held - (reused or 0)))} of the state's buffers are not reused",
      f"the state on each of {mesh.size} devices",
      {"state_bytes": held, "reused_bytes": reused if reused is not None else "unknown"},
      "the new state has another dtype or sharding than the old, or the step is not jitted with "
      "donate_argnums; the state is then held twice",
      [text.splitlines()[0] for text in unused[:4]],
    )


# ---- To rounding ----


def _to_rounding(case: Case) -> Iterator[tuple[str, list[Finding]]]:
  """Yields (what was changed, findings) for each thing that must not matter."""
  describe = case.describe
  reference, halves = equality.reference_of(case)
  bounds = equality.bounds_of(reference, halves)

  def compared(name: str, changed: Case, cause: str) -> tuple[str, list[Finding]]:
    found = equality.train(changed, wide=reference.dtype == "float64", start=case.start)
    relative = equality.differences(reference.tensors, found.tensors)
    beyond = [key for key, one in relative.items() if not one <= bounds[key]]
    if not beyond:
      return name, []
    worst = beyond[0]
    return name, [
      Finding(
        f"{name} changes {worst}; {len(beyond)} of {len(relative)} tensors differ",
        worst,
        {"relative difference": relative[worst], "bound": bounds[worst]},
        cause,
      )
    ]

  if describe.rows_in_any_order:
    yield compared(
      "another order of rows",
      _changed(case, batch=lambda batch: jax.tree.map(_reversed_rows, batch)),
      "rows are weighted by their place, dropped at the end, or share something; randomness that "
      "is drawn for each row is no mistake: say rows_in_any_order=False then",
    )
  for name, step in describe.same.items():
    yield compared(
      name,
      _changed(case, step=step),
      "each microbatch's mean is averaged although they hold different numbers of tokens, "
      "gradients are summed where the loss is averaged, or randomness differs",
    )
  if describe.weights and (describe.targets or describe.segments):
    yield compared(
      "what stands at masked positions",
      _changed(case, batch=lambda batch: _other_masked(case, batch)),
      "the loss, or what it is divided by, counts masked positions, or padding is attended to",
    )


def _changed(case: Case, *, step: Any = None, batch: Any = None) -> Case:
  program, own = case.program, case.program.batch
  changed = dataclasses.replace(
    program,
    step=step or program.step,
    batch=(lambda seed: batch(to_host(own(seed)))) if batch else own,
  )
  return Case(changed)


def _reversed_rows(leaf: np.ndarray) -> np.ndarray:
  return leaf[::-1].copy() if leaf.ndim else leaf


def _other_masked(case: Case, batch: Any) -> Any:
  """Returns a batch with other targets where the weight is 0, and other tokens in padding."""
  describe = case.describe
  weights = leaf_of(batch, describe.weights)
  if describe.targets:
    targets = leaf_of(batch, describe.targets)
    masked = np.broadcast_to(weights if weights.ndim == 2 else weights[:, None], targets.shape) == 0
    other = np.where(masked, np.roll(targets, 1, axis=0), targets)
    batch = replaced(batch, describe.targets, other.astype(targets.dtype))
  if describe.segments and describe.tokens:
    tokens, padding = (leaf_of(batch, name) for name in (describe.tokens, describe.segments))
    other = np.where(padding == 0, np.roll(tokens, 1, axis=1), tokens)
    batch = replaced(batch, describe.tokens, other.astype(tokens.dtype))
  return batch
