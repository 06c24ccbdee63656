r"""What the updates of Muon and SOAP send, and what optax's Muon does, left to XLA, on each mesh.

  python -m benchmarks.matrix_updates [--rounds=5]

A line per mesh and optimizer: bytes of each kind of collective, per device, of the update alone
(the gradients arrive sharded as the parameters), by the compiled program; and the milliseconds of
an update, the median of `--rounds`, on simulated devices a comparison of the work at best. For SOAP
another line says what a refresh of its bases adds. The sizes are those of the recipe `lm`.
"""

import collections
import statistics
import time

import jax
from absl import app, flags

from benchmarks.timing import in_turns, job_of
from partitioning.rules import size_text
from runtime import devices
from runtime.collectives import collectives as collectives_of
from training.state import State

MESHES = ({"data": 8}, {"fsdp": 8}, {"data": 4, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2})
ROUNDS = flags.DEFINE_integer("rounds", 5, "Updates of which the median is taken.", 1)


def measured(name: str, mesh: dict[str, int]) -> tuple[dict[str, int], dict[str, int], float]:
  """Returns kind -> bytes of an update, and of a refresh in addition; and an update's seconds.

  Args:
    name: of the optimizer.
    mesh: axis -> size.
  """
  sizes = {f"mesh.{axis}": size for axis, size in mesh.items()}
  job = job_of("lm", {"optimizer.name": name, **sizes})
  placed = job.state_shardings

  def update(state: State, grads) -> State:
    params, optimizer, _ = job.program.updated(state, job.program.laid_out(grads))
    return State(state.step + 1, params, optimizer, state.variables)

  ways = {"in_shardings": (placed, placed.params), "out_shardings": placed}
  compiled = job.compile(update, job.state, job.state.params, **ways).function
  sent: dict[str, int] = collections.defaultdict(int)
  more: dict[str, int] = collections.defaultdict(int)
  for one in collectives_of(compiled.as_text(), job.mesh):
    refresh = "/cond/branch_1_fun/" in one.source  # where its predicate holds
    (more if refresh else sent)[one.kind] += (one.count or 1) * one.bytes
  state = jax.block_until_ready(job.initial_state())
  grads = state.params

  def take() -> None:
    nonlocal state
    state = jax.block_until_ready(compiled(state, grads))

  [seconds] = in_turns({name: take}, ROUNDS.value, time.monotonic).values()
  return dict(sent), dict(more), statistics.median(seconds)


def main(_) -> None:
  """Prints a line for each mesh and optimizer."""
  devices.start({"data": 8}, simulate=True)
  for mesh in MESHES:
    for name in ("muon", "contrib.muon", "soap"):
      title = " x ".join(f"{axis}={size}" for axis, size in mesh.items())
      sent, more, seconds = measured(name, mesh)
      print(f"{title}, {name}: {_text(sent)}, {seconds * 1000:.0f} ms", flush=True)
      if more:
        print(f"{title}, {name}, each refresh in addition: {_text(more)}", flush=True)


def _text(sent: dict[str, int]) -> str:
  kinds = ", ".join(f"{kind} {size_text(size)}" for kind, size in sorted(sent.items()))
  return f"{size_text(sum(sent.values()))} ({kinds or 'nothing'})"


if __name__ == "__main__":
  app.run(main)
