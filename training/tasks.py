"""Tasks, by `config.task`: the arrays of a batch, how rows are read, and the metrics.

A recipe names its task. The losses themselves are the models' (`models.Network.loss_sums`). This
module imports nothing slow, so that configs can be checked without JAX. A new task is a new entry
of TASKS.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping

from runtime.extensions import Table

Totals = Mapping[str, float]  # sums over the rows of an evaluation, by name
DPO = "dpo"  # the task of data=preferences
GRPO = "grpo"  # the task of data=prompts
BYTES_PER_TOKEN = "bytes_per_token"  # among the totals: of the split, no sum


def mean_loss(totals: Totals) -> float:
  """Returns the loss per unit of weight."""
  return totals["loss"] / totals["weight"]


def accuracy(totals: Totals) -> float:
  """Returns the share of rows whose likeliest class is the label."""
  return totals["correct"] / totals["weight"]


def bits_per_byte(totals: Totals) -> float:
  """Returns the mean loss in bits, over the bytes that a token stands for."""
  return mean_loss(totals) / math.log(2) / totals[BYTES_PER_TOKEN]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
  """A kind of learning problem; a config file registers one in TASKS.

  Attributes:
    batch: array of a batch -> (its letters, of which B and T are sized by `config.data` and the
      others by the model's legend; its dtype, of which float64 is float32 where JAX has no other).
      `weights` is one of them.
    rows: how a data set is read: `text`, `image` or `random` (`input_pipeline.row_source`). "":
      only registered data sources have such rows.
    metrics: name in metrics.jsonl -> function of an evaluation's sums; `eval_loss` is one of them.
    sums: of the model's loss sums, those that the metrics are computed from. Any others are a
      model's own metrics and logged as such.
    sequences: how many sequences the model reads of a row.
  """

  batch: Mapping[str, tuple[str, str]]
  metrics: Mapping[str, Callable[[Totals], float]]
  rows: str = ""
  sums: tuple[str, ...] = ("loss", "weight")
  sequences: int = 1

  def __post_init__(self):
    """Raises ValueError for a task that lacks what every run needs."""
    if "weights" not in self.batch:
      raise ValueError(
        "a task: batch lacks `weights`, by which the loss and each metric are divided"
      )
    if "eval_loss" not in self.metrics:
      raise ValueError(
        "a task: metrics lacks `eval_loss`, such as training.tasks.mean_loss; by it a run knows "
        "which evaluations are done"
      )

  @property
  def of_tokens(self) -> bool:
    """Returns whether rows have sequences of tokens."""
    return any("T" in letters for letters, _ in self.batch.values())

  @property
  def weighs_tokens(self) -> bool:
    """Returns whether each token of a row has a weight, and not the row alone."""
    return "T" in self.batch["weights"][0]

  @property
  def unit(self) -> str:
    """Returns what throughput counts."""
    return "tokens" if self.weighs_tokens else "examples"

  def evaluated(self, totals: Totals, bytes_per_token: float = 1.0) -> dict[str, float]:
    """Returns the metrics of an evaluation, a model's own ones after those of the task.

    Args:
      totals: sums over the rows.
      bytes_per_token: of the split (`input_pipeline.source.Source`).
    """
    own = {f"eval_{n}": x / totals["weight"] for n, x in totals.items() if n not in self.sums}
    totals = {**totals, BYTES_PER_TOKEN: bytes_per_token}
    return {name: metric(totals) for name, metric in self.metrics.items()} | own


# Of names that a line about a step has already, there is None.
_TAKEN = ("loss", "weight", "z_loss", "grad_norm", "learning_rate", "step", "tokens_per_second")
# Functions (logits [B, T, V], arrays of the batch) -> a number for each token, [B, T], of which
# steps and evaluations report the mean by the tokens' weights. A decoder's, which
# `training.metrics` and `evaluation.metrics` name; config files register them.
METRICS: Table = Table("metric", dict.fromkeys(_TAKEN), numerics=False)


def _pairs() -> dict[str, tuple[str, str]]:
  """Returns the batch of DPO: of each side tokens, and log p under the reference; pairs weigh."""
  batch = {"weights": ("B", "float32")}
  for side in ("chosen", "rejected"):
    kinds = {"tokens": "int32", "targets": "int32", "weights": "float32"}
    batch |= {f"{side}_{key}": ("BT", kind) for key, kind in kinds.items()}
    batch[f"reference_{side}"] = ("B", "float32")
  return batch


# A row is an answer behind its prompt; of the tokens of answers `token_weights` is above 0.
_ANSWERS = {
  "weights": ("B", "float32"),  # 0 of an answer whose reward failed
  "tokens": ("BT", "int32"),
  "targets": ("BT", "int32"),
  "token_weights": ("BT", "float64"),  # of the tokens in the loss of their answer
  "sampled": ("BT", "float64"),  # log p, by the sampler
  "reference": ("BT", "float64"),  # log p, by the reference
  "advantages": ("B", "float64"),
  "rewards": ("B", "float64"),
}


TASKS: Table = Table(
  "task",
  {
    "causal_lm": Task(
      batch={
        "tokens": ("BT", "int32"),
        "targets": ("BT", "int32"),
        "weights": ("BT", "float32"),
        "segments": ("BT", "int32"),  # the document, within the row, of each target
      },
      rows="text",
      metrics={"eval_loss": mean_loss, "eval_bits_per_byte": bits_per_byte},
    ),
    DPO: Task(batch=_pairs(), rows="text", metrics={"eval_loss": mean_loss}, sequences=2),
    GRPO: Task(batch=_ANSWERS, rows="text", metrics={"eval_loss": mean_loss}),
    "classification": Task(
      batch={"inputs": ("BI", "float32"), "targets": ("B", "int32"), "weights": ("B", "float32")},
      rows="image",
      metrics={"eval_loss": mean_loss, "eval_accuracy": accuracy},
      sums=("loss", "weight", "correct"),
    ),
    "regression": Task(
      batch={
        "inputs": ("BI", "float32"),
        "targets": ("BO", "float32"),
        "weights": ("B", "float32"),
      },
      rows="random",
      metrics={"eval_loss": mean_loss},
    ),
  },
)
