"""The keys that take one of a few words, and the words."""

from ml_collections import ConfigDict

from configs.schema import (
  attention_checks,
  decoder_checks,
  expert_checks,
  matmul_checks,
  memory_checks,
  precision_checks,
)
from input_pipeline.text.conversations import DROP, REFUSE
from input_pipeline.text.packing import ALGORITHMS
from training.optimizer import OPTIMIZERS
from training.tasks import TASKS

MATMUL_PRECISIONS = ("default", "high", "highest")
SCHEDULES = ("cosine", "linear", "constant", "wsd", "inverse_sqrt")
DECAYS = ("linear", "1-sqrt")
VERIFY = ("full", "size", "off")
GRADIENT_REDUCTIONS = ("auto", "step", "microbatch")
ON_BAD_STEP = ("stop", "roll_back")


def of(config: ConfigDict) -> dict[str, tuple[str, ...]]:
  """Returns dotted key -> its words, of a config's model and task: others are refused."""
  task = TASKS[config.task]
  return {
    "training.matmul_precision": MATMUL_PRECISIONS,
    "training.attention_kernel": attention_checks.KERNELS if task.of_tokens else ("xla",),
    "training.on_bad_step": ON_BAD_STEP,
    "training.gradient_reduction": GRADIENT_REDUCTIONS,
    **matmul_checks.CHOICES,
    "data.packing": ALGORITHMS,
    "data.untrained_conversations": (REFUSE, DROP),
    "data.long_conversations": (REFUSE, DROP),
    "optimizer.schedule": SCHEDULES,
    "optimizer.decay": DECAYS,
    "checkpoint.keep_best": ("", *task.metrics),
    "checkpoint.verify": VERIFY,
    **(decoder_checks.CHOICES if config.model.name == "transformer" else {}),
  }


def usual(config: ConfigDict) -> dict[str, tuple[str, ...]]:
  """Returns dotted key -> words that it often has, besides those of `of`; others are possible."""
  text = {"model.biases": decoder_checks.BIASES} if "biases" in config.model else {}
  return {
    "training.parameter_dtype": precision_checks.PARAMETER_DTYPES,
    "training.compute_dtype": precision_checks.COMPUTE_DTYPES,
    "training.gradient_reduction_dtype": precision_checks.REDUCTION_DTYPES,
    "training.rematerialization": ("none", "dots", "full"),
    "optimizer.state_memory": memory_checks.STATE_MEMORIES,
    "optimizer.state_dtype": ("float32", "bfloat16", "int8"),
    "optimizer.name": (*OPTIMIZERS, "lion"),
    **text,
    **(expert_checks.CHOICES if config.model.name == "transformer" else {}),
  }
