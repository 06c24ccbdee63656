"""The models by their `config.model.name`, and the interfaces that a model implements.

A model is a module (or any object) with the members of `Model`; one that can generate text also
has those of `Generator`. `build` returns an NNX module with the methods of `Network`. `model_spec`
turns a finalized config into the model's spec; nothing below reads the config.
"""

import inspect
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import jax
from etils import epy
from flax import nnx
from ml_collections import ConfigDict

from models import transformer
from models.losses import Batch, Sums
from models.spec import ModelSpec
from runtime.extensions import Table

with epy.lazy_imports():
  from models import mlp as _mlp
  from models import vit as _vit


@runtime_checkable
class Network(Protocol):
  """The NNX module that a model builds."""

  def loss_sums(self, batch: Batch, key: jax.Array | None = None) -> Sums:
    """Returns sums over the rows of a batch: scalars, float32 or wider.

    `loss` is what training minimises, divided by the sum of the weights: weighted by the batch's
    `weights`, with auxiliary losses, if any, already added. Every other sum is a metric; those
    that the task does not define are logged as they are named, divided by the sum of the weights.

    Args:
      batch: the arrays of the task's batch, `weights` among them.
      key: draws what is random in training, such as dropout; None turns it off.
    """
    ...


@runtime_checkable
class Model(Protocol):
  """What training, the layout and the planner know of a model.

  One that is registered may also have READS: which of the keys `training.rematerialization`,
  `training.matmul_dtype`, `training.gradient_reduction_dtype`, `training.scan_unroll`,
  `training.attention_kernel`, `training.loss_chunks` and `training.z_loss` it reads; the others are
  refused where they are set.
  With `training.gradient_reduction` it says that its loss is a sum over rows, and that what it
  draws for a row depends on the row's number in the batch (`partitioning.constraints.batch_part`),
  so that gradients can be reduced once per step.

  Attributes:
    SPEC: the class of its specs, see `models.spec`: legend (letter -> Dim; `B` is the batch),
      parameters (name pattern -> letters; exactly one pattern matches each parameter), FLOPs.
  """

  SPEC: type[ModelSpec]

  def build(self, spec: ModelSpec, *, rngs: nnx.Rngs) -> Network:
    """Returns the module, its parameters drawn from `rngs.params`."""
    ...


@runtime_checkable
class Generator(Model, Protocol):
  """A model that generates tokens one by one; its Network has `extend` as `Extending` does.

  Its legend has the letters B (rows), T and R (tokens, in a block and between blocks) and L
  (layers).

  Attributes:
    CACHE: array of the cache -> its letters.
  """

  CACHE: Mapping[str, str]

  def empty_cache(self, spec: ModelSpec, rows: int, slots: int) -> Any:
    """Returns a cache before any token: a mapping of arrays [B=rows, S=slots, ...].

    Among them is `lengths`, int32 [B]: the tokens read of each row.
    """
    ...


@runtime_checkable
class Extending(Network, Protocol):
  """The NNX module of a Generator."""

  def extend(self, tokens_BT: jax.Array, counts_B: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
    """Reads tokens that follow those in the cache, without dropout.

    Args:
      tokens_BT: int32 token ids, each row padded on the right.
      counts_B: int32, how many of a row's T are tokens, at least 1.
      cache: with space for T more slots in every row.

    Returns:
      The logits [B, V] of each row's last token; the cache with the tokens.
    """
    ...


@runtime_checkable
class Scoring(Network, Protocol):
  """The NNX module of a model of tokens whose rows can be scored one by one."""

  def row_scores(self, batch: Batch) -> Sums:
    """Returns numbers of each row of a batch, without dropout: float32 or wider, [B].

    `log_likelihood` is the sum of log p(target) over a row's weighted targets, in nats; `likeliest`
    how many of these targets are the model's first choice (of equal logits, the lowest token).

    Args:
      batch: `tokens`, `targets`, `weights` (0 or 1) and `segments`, each [B, T].
    """
    ...


MODELS: Table = Table(
  "model",
  {
    "transformer": transformer,
    "mlp": _mlp,
    "vit": _vit,
  },
)


def model_spec(config: ConfigDict) -> ModelSpec:
  """Returns what the model of a finalized config is made of.

  Raises:
    ValueError: it lacks members of `Model`, or its classes those of `ModelSpec` or `Network`.
  """
  return find(config.model.name).SPEC.of_sections(config)


def find(name: str) -> Model:
  """Returns a model by its name.

  Raises:
    ValueError: it lacks members of `Model`, or its classes those of `ModelSpec` or `Network`.
  """
  model = MODELS[name]
  missing = [] if callable(getattr(model, "build", None)) else ["build()"]
  spec = getattr(model, "SPEC", None)
  if not (isinstance(spec, type) and issubclass(spec, ModelSpec)):
    missing.append("SPEC, a class that extends models.spec.ModelSpec")
  else:
    missing += [f"{one} of its SPEC" for one in sorted(spec.__abstractmethods__)]
  if inspect.isclass(build := getattr(model, "build", None)):
    missing += _missing_in_network(build)
  if missing:
    _refuse(name, missing)
  return model


def check_network(name: str, network: Any) -> None:
  """Raises ValueError if what a model has built lacks members of `Network`."""
  if missing := _missing_in_network(network):
    _refuse(name, missing)


def _missing_in_network(network: Any) -> list[str]:
  return [
    f"{one}() of what build returns"
    for one in vars(Network)
    if not one.startswith("_") and not callable(getattr(network, one, None))
  ]


def _refuse(name: str, missing: list[str]) -> None:
  origin = MODELS.origins.get(name, "models/__init__.py")
  raise ValueError(
    f"model.name={name!r}, registered by {origin}: it lacks {', '.join(missing)}; see Model and "
    f"Network in models/__init__.py"
  )
