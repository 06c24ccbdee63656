"""Invariance: what must not change a step's result.

To rounding: the order of the rows, the number of microbatches and whatever else the description
says gives the same, what stands at masked positions. To the bit: a second run, a state that was
saved and restored. And the state keeps its types and shardings, and its buffers are reused.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from checks import equality
from checks.case import Case, axes_of, is_key, leaf_of, named_leaves, replaced, to_host
from checks.program import Description, Program
from checks.report import SHOWN, Finding, Outcome, counted
from runtime import units


def check(case: Case, first: Case) -> Outcome:
  """Checks one mesh; what is the same to rounding, which compiles more programs, on the first."""
  run = case.jitted()

  def after(state: Any, number: int) -> dict[str, Any]:
    """Returns the state and the metrics of a step on a batch, on the host."""
    found = run(*case.place(state, case.batch(number)))
    return to_host(dict(zip(("state", "metrics"), found, strict=True)))

  found = after(case.start, 0)
  findings = [*_repeated(found, after(case.start, 0)), *_restored(case, found["state"], after)]
  findings += [*_kept_types(case), *_donated(case)]
  done = ["two runs", "restored state", "types and shardings"]
  done += ["donation"] if case.describe.donated else []
  for name, program, cause in _variants(case.program) if case is first else ():
    done.append(name)
    findings += _to_rounding(case, name, program, cause)
  return Outcome("invariance", case.name, findings, ", ".join(done))


# ---- To the bit ----


def bits_apart(ours: Any, theirs: Any) -> list[str]:
  """Returns the names of the leaves that differ in a bit."""
  bits = lambda x: np.asarray(jax.random.key_data(x) if is_key(x) else x).tobytes()  # noqa: E731
  pairs = zip(named_leaves(ours).items(), named_leaves(theirs).values(), strict=True)
  return [name for (name, a), b in pairs if bits(a) != bits(b)]


def _repeated(first: Any, second: Any) -> Iterator[Finding]:
  if apart := bits_apart(first, second):
    yield Finding(
      f"two runs from the same state on the same batch differ in "
      f"{counted(len(apart), 'leaf', 'leaves')}",
      apart[0],
      {"leaves": len(named_leaves(first))},
      "something outside of the state: random numbers of the host, a callback, the time; on "
      "accelerators also atomic additions, which the compiler can be told to avoid",
    )


def _restored(case: Case, state: Any, after: Callable[[Any, int], Any]) -> Iterator[Finding]:
  restored = state
  if save_and_restore := case.describe.save_and_restore:
    restored = to_host(save_and_restore(case.place(state)[0]))
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
  apart = bits_apart(after(state, 1), after(restored, 1))
  if lost or apart:
    types = [named_leaves(tree) for tree in (state, restored)]
    yield Finding(
      f"a step after saving and restoring differs in {len(apart)} leaves; {len(lost)} leaves were "
      "restored with other bits",
      (lost or apart)[0],
      {"restored as another dtype": sum(len({one[x].dtype for one in types}) > 1 for x in lost)},
      "the checkpoint rounds a part of the state, or leaves it out"
      if lost
      else "the step depends on something that is not in the state",
    )


def _kept_types(case: Case) -> Iterator[Finding]:
  """Yields a finding where leaves of the new state have another shape, dtype or sharding."""
  mesh, executable = case.program.mesh, case.compiled[0]
  new = jax.eval_shape(case.program.step, *case.place())[0]
  placed = (executable.input_shardings[0][0], executable.output_shardings[0])

  def described(leaf: Any, sharding: Any) -> str:
    cut = "+".join(sorted(set().union(*axes_of(sharding, leaf.shape, mesh)))) or "no axis"
    return f"{leaf.dtype}{list(leaf.shape)} cut by {cut}"

  before, after = (
    {
      name: described(leaf, sharding)
      for (name, leaf), sharding in zip(
        named_leaves(tree).items(), jax.tree.leaves(cuts), strict=True
      )
    }
    for tree, cuts in zip((case.start, new), placed, strict=True)
  )
  names = dict.fromkeys((*before, *after))
  known = {name: [types.get(name, "nothing") for types in (before, after)] for name in names}
  changed = [f"{name}: {old} becomes {new}" for name, (old, new) in known.items() if old != new]
  if changed:
    yield Finding(
      f"the state's type changes in a step, for {counted(len(changed), 'leaf', 'leaves')}",
      changed[0].partition(":")[0],
      {},
      "a cast that is missing where the update is applied, or a weakly typed initial value; the "
      "second step is compiled anew, and the buffers cannot be reused",
      changed[:SHOWN],
    )


def _donated(case: Case) -> Iterator[Finding]:
  if not case.describe.donated:
    return
  executable, warned, _ = case.compiled
  unused = [text.splitlines()[0] for text in warned if "donated buffers" in text]
  placed = zip(case.leaves.values(), jax.tree.leaves(case.shardings[0]), strict=True)
  held = sum(
    int(np.prod(sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
    for leaf, sharding in placed
    if not is_key(leaf)
  )
  sizes = executable.memory_analysis()  # None where the backend does not know
  reused = held if sizes is None else sizes.alias_size_in_bytes
  if unused or reused < 0.9 * held:  # small leaves, such as counters, may be copied
    yield Finding(
      f"{units.size(max(0, held - reused))} of the state's buffers are not reused",
      f"the state on each of {case.program.mesh.size} devices",
      {"state_bytes": held, "reused_bytes": reused},
      "the new state has another dtype or sharding than the old, or the step is not jitted with "
      "donate_argnums; the state is then held twice",
      unused[:4],
    )


# ---- To rounding ----


def _variants(program: Program) -> Iterator[tuple[str, Program, str]]:
  """Yields (what is changed, the changed program, the likely cause if its numbers change)."""
  describe = program.describe

  def with_batches(change: Callable[[Any], Any]) -> Program:
    return dataclasses.replace(program, batch=lambda seed: change(to_host(program.batch(seed))))

  if describe.rows_in_any_order:
    backwards = lambda leaf: leaf[::-1].copy() if leaf.ndim else leaf  # noqa: E731
    yield (
      "another order of rows",
      with_batches(lambda batch: jax.tree.map(backwards, batch)),
      "rows are weighted by their place, dropped at the end, or share something; randomness that "
      "is drawn for each row is no mistake: say rows_in_any_order=False then",
    )
  for name, step in describe.same.items():
    yield (
      name,
      dataclasses.replace(program, step=step),
      "each microbatch's mean is averaged although they hold different numbers of tokens, "
      "gradients are summed where the loss is averaged, or randomness differs",
    )
  if describe.weights and (describe.targets or describe.segments):
    yield (
      "what stands at masked positions",
      with_batches(lambda batch: _other_masked(describe, batch)),
      "the loss, or what it is divided by, counts masked positions, or padding is attended to",
    )


def _to_rounding(case: Case, name: str, program: Program, cause: str) -> Iterator[Finding]:
  reference, bounds, wide = equality.reference_of(case)
  relative = equality.differences(
    reference, equality.train(Case(program), wide=wide, start=case.start)
  )
  if beyond := equality.beyond_bounds(relative, bounds):
    worst = next(iter(beyond))
    yield Finding(
      f"{name} changes {worst}; {len(beyond)} of {len(relative)} tensors differ",
      worst,
      {"relative difference": relative[worst], "bound": bounds[worst]},
      cause,
    )


def _other_masked(describe: Description, batch: Any) -> Any:
  """Returns a batch with other targets where the weight is 0, and other tokens in padding."""
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
