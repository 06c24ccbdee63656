"""The table of optimizers: what is known of each, in one row.

A row's functions are named, `module:function`, and imported where they are first used: configs are
checked without JAX. Any other name is looked up in optax (`lion`, `contrib.adopt`). The schedule,
clipping (in the step) and which parameters decay are the same for all of them.
"""

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from runtime.extensions import Table


@dataclasses.dataclass(frozen=True)
class DefaultScale:
  """What an optimizer takes where a recipe says what AdamW takes.

  Attributes:
    rate: its learning rate over AdamW's.
    decay: its weight decay over AdamW's.
  """

  rate: float = 1.0
  decay: float = 1.0


@dataclasses.dataclass(frozen=True)
class Optimizer:
  """A row of the table. Functions may be given as `module:function`.

  Attributes:
    build: returns an optax.GradientTransformation. It takes `learning_rate` (a schedule) and
      arguments of its own, those of `optimizer.arguments`; where it takes `weight_decay` with a
      `mask` (or `weight_decay_mask`), both are given by `optimizer.weight_decay` and `decayed`.
    keys: key of the config's section `optimizer` -> the argument that it sets. Of those keys that
      not every optimizer uses, any other is refused where it is set.
    of_model: its `training.optimizers.spec.OptimizerSpec` -> arguments that follow from the model.
    decays: whether it uses `optimizer.weight_decay`.
    plain_decay: whether its decay is learning rate times weight decay times the parameter, so that
      it can be independent of the rate.
    elementwise: whether it updates each element by itself, so that layers can be updated in turn.
    default: learning rate and weight decay, by those of AdamW.
    lm_rate: its learning rate in the recipe `lm`, the best that `python -m benchmarks.optimizers`
      found; None: by `default`.
    schedule: the only schedule that it takes; "": any.
    gradient_point: (trained parameters, the optimizer's whole state) -> where the gradients of a
      step are taken; "": at the parameters.
    width_rule: muP's rule for its learning rates: a name in `groups.RULES`, or `orthogonal`.
    without_width_rule: why it has none, for a message.
    of_matrices: whether it treats hidden matrices alone, and AdamW the other parameters.
    whole_matrices: the class of how it computes on whole matrices, whose fields are arguments of
      it; for Muon and SOAP.
    fits_every_step: whether the tests show that the step can use it; others are tried.
    refused: why the step cannot use it; "": it can.
  """

  build: Callable[..., Any] | str
  keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
  of_model: Callable[[Any], Mapping[str, Any]] | str = lambda spec: {}
  decays: bool = True
  plain_decay: bool = False
  elementwise: bool = False
  default: DefaultScale = DefaultScale()
  lm_rate: float | None = None
  schedule: str = ""
  gradient_point: Callable[[Any, Any], Any] | str = ""
  width_rule: str = ""
  without_width_rule: str = ""
  of_matrices: bool = False
  whole_matrices: str = ""
  fits_every_step: bool = False
  refused: str = ""


_ADAM = {"beta_1": "b1", "beta_2": "b2", "epsilon": "eps"}

OPTIMIZERS: Table = Table(
  "optimizer",
  {
    "adamw": Optimizer(
      "optax:adamw",
      _ADAM,
      plain_decay=True,
      elementwise=True,
      width_rule="entrywise",
      fits_every_step=True,
    ),
    "adafactor": Optimizer(
      "training.optimizers.first_order:adafactor",
      plain_decay=True,
      # Its rate is relative to the root mean square of a parameter: 4e-2 and 8e-2 of `lm` ended
      # alike. Decay as published: none.
      default=DefaultScale(5.0, 0.0),
      lm_rate=8e-2,
      without_width_rule="its updates are a share of the parameter's size, which falls with the "
      "width",
    ),
    "muon": Optimizer(
      "training.optimizers.muon:muon",
      _ADAM,
      "training.optimizers.muon:of_model",
      plain_decay=True,
      lm_rate=3.2e-2,
      width_rule="orthogonal",
      of_matrices=True,
      whole_matrices="training.optimizers.muon:Orthogonalization",
    ),
    "soap": Optimizer(
      "training.optimizers.soap:soap",
      _ADAM,
      "training.optimizers.muon:of_model",
      plain_decay=True,
      without_width_rule="its first updates act on activations as Muon's, and none is known to "
      "hold throughout",
      of_matrices=True,
      whole_matrices="training.optimizers.soap:Preconditioning",
    ),
    "schedule_free_adamw": Optimizer(
      "training.optimizers.first_order:schedule_free_adamw",
      _ADAM,
      plain_decay=True,
      schedule="constant",
      gradient_point="training.optimizers.first_order:gradient_point",
      width_rule="entrywise",
    ),
    "sgd": Optimizer(
      "training.optimizers.first_order:sgd",
      {"momentum": "momentum"},
      decays=False,
      elementwise=True,
      width_rule="by_gradient",
      fits_every_step=True,
    ),
    "contrib.muon": Optimizer(
      "optax.contrib:muon",
      of_model="training.optimizers.muon:optax_dimensions",
      without_width_rule="take optimizer.name=muon",
      of_matrices=True,
    ),
  },
)

_AVERAGES = (
  "its parameters are not those to evaluate, and evaluation and sampling would take them; "
  "optimizer.name=schedule_free_adamw keeps the average as the parameters"
)
# What is known of optax's own.
OF_OPTAX: Mapping[str, Optimizer] = {
  "lion": Optimizer(
    "optax:lion",
    plain_decay=True,
    elementwise=True,
    # Its update is larger, and its decay as much more as its rate is less. Source:
    # arXiv:2302.06675, section 5.
    default=DefaultScale(1 / 8, 8.0),
    lm_rate=4e-3,
    width_rule="entrywise",
  ),
  **{
    name: Optimizer(f"optax:{name}", elementwise=True, width_rule="entrywise")
    for name in ("adam", "amsgrad", "adamax")
  },
  **{
    name: Optimizer(f"optax:{name}", width_rule="entrywise")
    for name in ("adamaxw", "signum", "sign_sgd")
  },
  **{
    name: Optimizer(f"optax:{name}", elementwise=True)
    for name in ("adabelief", "rmsprop", "adagrad")
  },
  **{
    f"contrib.{name}": Optimizer(f"optax.contrib:{name}", refused=_AVERAGES)
    for name in ("schedule_free_adamw", "schedule_free_sgd", "schedule_free")
  },
  "contrib.dpsgd": Optimizer(
    "optax.contrib:dpsgd",
    refused="it needs the gradient of each example, and the step has their sum",
  ),
}


def optimizer_row(name: str) -> Optimizer:
  """Returns what is known of an optimizer; of one that no table has, that it may be optax's."""
  module, _, function = name.rpartition(".")
  other = Optimizer(f"optax{'.contrib' if module else ''}:{function}")
  return OPTIMIZERS.get(name) or OF_OPTAX.get(name) or other


def optimizers_with(wanted: Callable[[Optimizer], object]) -> list[str]:
  """Returns the names of the rows that `wanted` is true of, those of optax last."""
  return [name for name, one in [*OPTIMIZERS.items(), *OF_OPTAX.items()] if wanted(one)]


def optimizer_keys(name: str) -> tuple[str, ...]:
  """Returns the keys of the section `optimizer` that it uses, besides those that all use."""
  one = optimizer_row(name)
  decay = ("weight_decay",) if one.decays else ()
  independent = ("independent_weight_decay",) if one.plain_decay else ()
  return tuple(dict.fromkeys((*one.keys, *decay, *independent)))


def imported(function: Callable[..., Any] | str) -> Callable[..., Any]:
  """Returns the function that a row names."""
  if not isinstance(function, str):
    return function
  module, _, name = function.partition(":")
  return getattr(importlib.import_module(module), name)
