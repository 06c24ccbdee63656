"""Dtypes of a config: which follow from others, and what does not go together."""

from collections.abc import Iterator

from ml_collections import ConfigDict

from configs.keys.training import TRAINING
from runtime.suggest import nearest

# Of parameters -> of the optimizer's moments.
STATE_DTYPES = {
  "bfloat16": ("bfloat16", "float32", "int8"),
  "float32": ("float32", "bfloat16", "int8"),
  "float64": ("float64",),
}


def finalize(config: ConfigDict, accelerated: bool) -> None:
  """Fills in the dtypes that follow from that of the parameters; `config` is unlocked."""
  training, stored = config.training, config.training.parameter_dtype
  narrow = stored == "bfloat16"
  derived = {
    "compute_dtype": "bfloat16" if accelerated else "float32" if narrow else stored,
    "frozen_dtype": stored,
    "stochastic_rounding": narrow,
  }
  for key, value in derived.items():
    if training[key] is None:
      training[key] = value
  if config.optimizer.state_dtype is None:
    config.optimizer.state_dtype = stored


def wrong(config: ConfigDict) -> Iterator[str]:
  """Yields a line for each dtype that is none, or that does not go with the others."""
  training = config.training
  stored, compute = training.parameter_dtype, training.compute_dtype
  if stored not in STATE_DTYPES:  # the range of its row says so
    return
  frozen = tuple(dict.fromkeys(("bfloat16", stored)))
  if training.frozen_dtype not in frozen:
    yield _unknown("training.frozen_dtype", training.frozen_dtype, frozen)
  yield from _state(config)
  if training.stochastic_rounding and stored != "bfloat16":
    yield (
      f"training.stochastic_rounding=True: training.parameter_dtype={stored} is not rounded; leave "
      f"it out, or set training.parameter_dtype=bfloat16"
    )
  if compute == "float16":
    yield (
      "training.compute_dtype='float16': gradients below 6e-8 become zero in it, and losses are "
      "not scaled up to prevent that; set training.compute_dtype=bfloat16, whose range is that of "
      "float32"
    )
  elif compute not in TRAINING["compute_dtype"].usual:
    yield _unknown("training.compute_dtype", compute, TRAINING["compute_dtype"].usual)
  if compute == "float64" and stored != "float64":
    yield "training.compute_dtype=float64 needs training.parameter_dtype=float64"
  if training.gradient_reduction_dtype == "float32" and compute == "float64":
    yield (
      "training.gradient_reduction_dtype=float32 is narrower than training.compute_dtype=float64; "
      "leave it at compute"
    )


def _state(config: ConfigDict) -> Iterator[str]:
  dtype, stored = config.optimizer.state_dtype, config.training.parameter_dtype
  known = tuple(dict.fromkeys(name for names in STATE_DTYPES.values() for name in names))
  if dtype not in known:
    yield _unknown("optimizer.state_dtype", dtype, known)
  elif dtype not in STATE_DTYPES[stored]:
    fix = "leave it out" if stored == "float64" else "set training.parameter_dtype=float64 too"
    yield (
      f"optimizer.state_dtype={dtype}: with training.parameter_dtype={stored} it is one of "
      f"{', '.join(STATE_DTYPES[stored])}; {fix}"
    )


def _unknown(name: str, value: str, known: tuple[str, ...]) -> str:
  return f"{name}={value!r}: one of {', '.join(known)}{nearest(value, known)}"
