"""Layers on different devices, through which microbatches go one after another."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from partitioning.parallel.pipeline_schedule import Schedule, Work
from reports import pipeline_picture
from reports.tour.scene import Scene, close, mesh_of, say, sent_text, show

TITLE = "A pipeline"
OPENING = """
The axes so far split arrays. The axis `stage` splits the layers: each stage has some of them, and a
batch goes through all stages. So that they work at the same time, the batch is cut into
microbatches: while the second stage has the first microbatch, the first stage has the second.
"""


def schedule_by_hand():
  """Draws a schedule that is small enough to count.

  A tick is a forward pass (F), a backward pass (B), or one of each, of all stages at once. A
  microbatch goes on to the next stage in the next tick, and its gradient comes back the same way.
  """
  tell(Schedule("1f1b", stages=2, microbatches=3))


def all_forward_first():
  """Draws GPipe: all forward passes, then all backward passes.

  The bubble is the same. But each microbatch waits for its backward pass, so memory grows with
  their number, which is what makes the bubble small.
  """
  tell(Schedule("gpipe", stages=2, microbatches=5))


def tell(schedule: Schedule) -> None:
  """Shows a schedule, and says how long it takes and what it keeps."""
  passes = schedule.units + schedule.stages - 1
  # In a tick of stage 0 a forward pass comes before a backward pass.
  kept = itertools.accumulate(
    1 if unit.work == Work.FORWARD else -1
    for tick in range(schedule.ticks)
    for unit in sorted(schedule.at(0, tick), key=lambda unit: unit.work != Work.FORWARD)
  )
  say(
    f"Every stage has {schedule.units} forward passes and as many backward passes to do. The step "
    f"takes the time of {passes} of each: {schedule.stages - 1} of {passes} is the bubble, in "
    f"which a stage waits."
  )
  say(
    f"Stage 0 keeps the inputs of at most {max(kept)} microbatches at a time, until their backward "
    f"passes."
  )
  show(pipeline_picture.text(schedule, schedule.stages))


def forward_passes(stages=4, microbatches=3):
  """Runs the forward passes: one layer on each stage, in one program.

  In each tick every device applies its layer to what it has, and passes the result on. Before the
  first microbatch has come, and after the last has left, it computes numbers that nobody reads.
  """
  mesh = mesh_of(stage=stages)
  w_SDD = jax.random.normal(jax.random.key(0), (stages, 16, 16)) / 4
  x_MBD = jax.random.normal(jax.random.key(1), (microbatches, 8, 16))
  ring = [(stage, (stage + 1) % stages) for stage in range(stages)]

  def on_stage(w_1DD, x_MBD):
    def tick(x_BD, number):
      mine = x_MBD[jnp.minimum(number, microbatches - 1)]
      x_BD = jnp.where(jax.lax.axis_index("stage") == 0, mine, x_BD)
      y_BD = jnp.tanh(x_BD @ w_1DD[0])
      return jax.lax.ppermute(y_BD, "stage", ring), y_BD

    ticks = jnp.arange(microbatches + stages - 1)
    return jax.lax.scan(tick, jnp.zeros_like(x_MBD[0]), ticks)[1]

  run = jax.shard_map(
    on_stage, mesh=mesh, in_specs=(P("stage"), P()), out_specs=P("stage"), check_vma=False
  )
  placed = jax.device_put(w_SDD, NamedSharding(mesh, P("stage")))
  compiled = jax.jit(run).lower(placed, x_MBD).compile()
  y_TBD = compiled(placed, x_MBD)
  ticks = microbatches + stages - 1
  say(
    f"{microbatches} microbatches take {ticks} ticks on {stages} stages; "
    f"{100 * microbatches / ticks:.0f} % of what the devices compute is used."
  )
  say(f"Sent: {sent_text(compiled, mesh)}.")
  wanted = np.asarray(x_MBD)
  for w_DD in np.asarray(w_SDD):
    wanted = np.tanh(wanted @ w_DD)
  found = np.asarray(y_TBD)[-microbatches:]  # of the last stage, when it has had the first
  say(f"What leaves the last stage and all layers by NumPy are {close(found, wanted)}.")


SCENES = (
  Scene("A schedule to count by hand", schedule_by_hand),
  Scene("All forward passes first", all_forward_first),
  Scene("The forward passes in one program", forward_passes),
)
