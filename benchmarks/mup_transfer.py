"""The best learning rate at two widths, with and without muP.

  python -m benchmarks.mup_transfer

Trains the recipe `lm` on one device, at width 64 and at 4 times its widths, for each learning rate
on the same batches, and prints the mean loss of the last steps: the table of docs/optimizers.md.
"""

import statistics
from collections.abc import Sequence

from absl import app

from benchmarks.timing import Trainer, prepared, table
from configs import single
from configs.schema import finalize
from training import coordinate_check
from training.splits import training_batches

BASE, WIDE = 64, 256
# Title of a column -> its width and the config's base width.
COLUMNS = {
  f"width {BASE}": (BASE, 0),
  f"width {WIDE}": (WIDE, 0),
  f"width {WIDE}, muP": (WIDE, BASE),
}
RATES = tuple(2.0**power for power in range(-10, -3))
STEPS, LAST = 100, 10  # of a run; those whose mean loss is reported
SMALL = {"model.layers": 2, "data.sequence_length": 64, "data.global_batch_size": 16}


def loss(width: int, base_width: int, rate: float) -> float:
  """Returns the mean loss of the last steps of a run."""
  config = single.get_config("lm")
  keys = {"training.steps": STEPS, "optimizer.learning_rate": rate}
  config.update_from_flattened_dict({**SMALL, **keys})
  schedule = {key: config.optimizer[key] for key in ("schedule", "warmup_steps", "final_fraction")}
  config = coordinate_check.of_width(config, finalize.finalize(config, "cpu"), width)
  with config.unlocked():
    config.optimizer.update(schedule)
    config.model.base_width = base_width
  job = prepared(finalize.finalize(config, "cpu"))
  _, losses = Trainer(job).run(0, training_batches(job.config), STEPS)
  return statistics.fmean(losses[-LAST:])


def main(_: Sequence[str]) -> None:
  """Prints the table."""
  found: dict[str, list[float]] = {title: [] for title in COLUMNS}
  for title, (width, base_width) in COLUMNS.items():
    for rate in RATES:
      found[title].append(loss(width, base_width, rate))
      print(f"{title}, {rate:.4f}: {found[title][-1]:.3f}", flush=True)
  rows = []
  for rate, *losses in zip(RATES, *found.values(), strict=True):
    least = [min(of) for of in found.values()]
    cells = (f"**{x:.3f}**" if x == y else f"{x:.3f}" for x, y in zip(losses, least, strict=True))
    rows.append([f"{rate:.4f}", *cells])
  print(table(["learning rate", *found], rows))


if __name__ == "__main__":
  app.run(main)
