"""What a budget buys, by a scaling law, a search of the mesh, a plan, and simulated failures."""

import copy
import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from commands import config_flag, flags, plan_process, search_process
from commands import plan as plan_verb
from planning import ladder, scaling_laws, search_results, search_space, topology
from planning.scaling_laws import TRAINING_FLOPS, Fit, Prediction
from runtime.chips import overridden

MONEY, CHIP_HOURS, TOKENS = "money", "chip-hours", "tokens"
FIRST_GUESS = 0.4  # of the chips' peak, at which a search for the size begins
ROUNDS = 4
_ROUGHLY = ("data", "fsdp")  # axes by which the speed of a size is found: there are few meshes
NEAR = 0.2  # of the logarithm of the best size: a size as near is kept
_FORMS = (
  "'$2000 on v6e-64', '500 chip-hours on h100:8', '2e9 tokens' or '2e9 tokens on v5p-128' (of the "
  "config's own model)"
)
_BUDGET = re.compile(
  r"(?P<sign>[$€£]?)\s*(?P<number>[\d.,]+(?:e[+-]?\d+)?)\s*(?P<scale>[kKMBT]?)\s*"
  r"(?P<unit>(?:chip|device|gpu|tpu)[- ]hours?|tokens)?(?:\s+on\s+(?P<topology>\S+))?",
)
_SCALES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


@dataclasses.dataclass(frozen=True)
class Budget:
  """What is to be spent.

  Attributes:
    text: as given.
    unit: MONEY, CHIP_HOURS, or TOKENS of the config's own model.
    amount: of these.
    topology: on what; None: only the loss is asked for.
    price: of a chip-hour; 0: unknown.
    sign: of the currency.
    chips: of the topology, whole chips.
    peak: FLOPs per second of all of them.
  """

  text: str
  unit: str
  amount: float
  topology: str | None
  price: float = 0.0
  sign: str = ""
  chips: float = 0.0
  peak: float = 0.0

  @property
  def seconds(self) -> float:
    """Returns the time on all chips that it buys; not of TOKENS."""
    hours = self.amount / self.price if self.unit == MONEY else self.amount
    return 3600 * hours / self.chips


def read_budget() -> Budget:
  """Returns --budget with --price; raises ValueError for what cannot be meant."""
  text = flags.BUDGET.value
  if not text:
    raise ValueError(f"forecast: what is to be spent? Give --budget={_FORMS}")
  found = _BUDGET.fullmatch(text.strip())
  amount = math.nan
  if found:
    try:
      amount = float(found["number"].replace(",", "")) * _SCALES[found["scale"]]
    except ValueError:
      found = None
  if not found or bool(found["sign"]) == bool(found["unit"]) or not 0 < amount < math.inf:
    raise ValueError(f"--budget={text!r} is none of {_FORMS}")
  unit = MONEY if found["sign"] else TOKENS if found["unit"] == TOKENS else CHIP_HOURS
  name = found["topology"]
  if name is None:
    if unit != TOKENS:
      raise ValueError(f"--budget={text!r}: on what? For example, {text.strip()} on v6e-64")
    if flags.PRICE.value:
      raise ValueError(f"--price goes with a topology: --budget='{text.strip()} on v6e-64'")
    return Budget(text, unit, amount, None)
  planning = flags.CONFIG.value.planning
  chips, _ = overridden(planning.constants)
  parsed = topology.parse(name, chips)
  kind, devices = parsed.chip, parsed.devices * parsed.slices
  prices = search_results.prices(flags.PRICE.value, planning.price_per_chip_hour, [kind.name])
  price = prices.get(kind.name, 0.0)
  if unit == MONEY and not price:
    raise ValueError(
      f"--budget={text!r}: what does an hour of a chip cost? Give --price={kind.name}=2.7"
    )
  count = devices / kind.devices_per_chip
  return Budget(text, unit, amount, name, price, found["sign"], count, devices * kind.flops)


@dataclasses.dataclass(frozen=True)
class Target:
  """A run that a budget buys.

  Attributes:
    title: why it is this one.
    size: of the model.
    prediction: of its bits per byte.
    unique_tokens: of the training split.
    parameters: at which the law has its optimum, with an interval; None of a given model.
    served: tokens that were counted as served.
    planned: parts of forecast.json, as far as they are known: mesh, rematerialization and overrides
      of the search; the plan, as plan.json has it; lines about failures, the seconds that the run
      takes with them, their cost; `refused`, why nothing fits.
  """

  title: str
  size: ladder.Size
  prediction: Prediction
  unique_tokens: float
  parameters: scaling_laws.Interval | None = None
  served: float = 0.0
  planned: Mapping[str, Any] = dataclasses.field(default_factory=lambda: _UNPLANNED)

  @property
  def fits(self) -> bool:
    """Returns whether it can be trained, as far as that was asked."""
    return not self.planned["refused"]

  def with_planned(self, **planned: Any) -> "Target":
    """Returns a target of which more is planned."""
    return dataclasses.replace(self, planned={**self.planned, **planned})

  def as_json(self) -> dict[str, Any]:
    """Returns the part of forecast.json about it."""
    found, plan = self.prediction, self.planned["plan"]
    return {
      "title": self.title,
      **self.planned,
      "width": self.size.width,
      "layers": self.size.layers,
      "parameters": self.size.parameters,
      "best_parameters": self.parameters and vars(self.parameters),
      "tokens": found.tokens,
      "epochs": found.tokens / self.unique_tokens,
      "effective_tokens": found.effective_tokens,
      "served_tokens": self.served,
      "bits_per_byte": vars(found.loss),
      "flops": TRAINING_FLOPS * self.size.parameters * found.tokens,
      "times_largest": found.times_largest,
      "extrapolated": found.extrapolated,
      "train": _command(self),
      "plan": plan and {key: plan[key] for key in _KEPT if key in plan},
    }


_UNPLANNED = {
  **{"mesh": "", "rematerialization": "", "overrides": "", "plan": None, "failures": ()},
  **{"seconds": None, "cost": None, "refused": ""},
}
_KEPT = ("peak_bytes_per_device", "hbm_bytes_per_device", "compiled", "mfu", "goodput", "steps")
_KEPT += ("devices", "chip_hours", "accuracy", "step_seconds", "topology")


def of_budget(
  fit: Fit, family: ladder.Family, budget: Budget, unique_tokens: float
) -> list[Target]:
  """Returns the runs that a budget buys: the config's own model, or the best sizes.

  Raises:
    ValueError: a search or a plan refuses the config.
    WorkerError: one of them fails.
  """
  if budget.unit == TOKENS:
    size = family.of_width(family.resolved.model.model_size)
    found = _predicted(fit, "the config's model", size, budget.amount, unique_tokens)
    return [_planned(found, budget) if budget.topology else found]
  best = _bought(fit, family, budget, unique_tokens, "compute-optimal", 0.0)
  served = flags.SERVED_TOKENS.value or best.prediction.tokens
  cheap = _bought(fit, family, budget, unique_tokens, "inference-aware", served)
  return [best, cheap]


def _predicted(
  fit: Fit, title: str, size: ladder.Size, tokens: float, unique: float, **more: Any
) -> Target:
  prediction = scaling_laws.predict(fit, size.parameters, tokens, unique_tokens=unique)
  return Target(title, size, prediction, unique, **more)


def _bought(
  fit: Fit, family: ladder.Family, budget: Budget, unique: float, title: str, served: float
) -> Target:
  """Returns the best run for time on some chips; its speed depends on its size, and conversely."""
  rate, size = FIRST_GUESS * budget.peak, None
  for _ in range(ROUNDS):
    best = scaling_laws.optimal_size(
      fit, rate * budget.seconds, served_tokens=served, unique_tokens=unique
    ).parameters
    if size is not None and abs(math.log(best.value / size.parameters)) < NEAR:
      break
    size = family.nearest(best.value)
    tokens = rate * budget.seconds / (TRAINING_FLOPS * size.parameters)
    target = _predicted(fit, title, size, tokens, unique, parameters=best, served=served)
    found = _searched(target, budget, axes=_ROUGHLY)
    if found.best is None:
      break
    rate = TRAINING_FLOPS * size.parameters / found.best.seconds_per_token
  planned = _planned(target, budget)
  if not planned.fits:
    return planned
  # The plan knows the time of a step, and failures take a part of all time.
  plan = planned.planned["plan"]
  share = plan["goodput"]["best"]["share"]
  steps = max(1, math.floor(budget.seconds * share / plan["step_seconds"]["expected"]))
  tokens = steps * plan["token_budget"] / plan["steps"]
  again = _predicted(
    fit, title, size, tokens, unique, parameters=target.parameters, served=served
  ).with_planned(**planned.planned)
  return _with_plan(again, budget, {**plan, "steps": steps})


def _config(target: Target) -> ConfigDict:
  """Returns the config of a target."""
  config = copy.deepcopy(flags.CONFIG.value)
  known = {key: (section, last) for key, section, last in config_flag.keys(config)}
  with config.unlocked():
    for key, text in target.size.setting.items():
      config_flag.set_key(known, key, text, flags.CONFIG.name)
    config.planning.token_budget = float(target.prediction.tokens)
  return config


def _searched(
  target: Target, budget: Budget, axes: tuple[str, ...] = (), compilations: int = 0
) -> search_results.Found:
  """Returns a search for the mesh of a target, among these axes; (): all."""
  asked = search_process.Asked(
    _config(target),
    f"{config_flag.name(flags.CONFIG)} at width {target.size.width}",
    axes=axes,
    batches=tuple(map(int, flags.BATCH_SIZES.value)),
    compilations=compilations,
    simulate=flags.SIMULATE.value,
    debug=flags.DEBUG.value,
    command=flags.command_line(),
  )
  return search_process.of_topology(asked, budget.topology)


def _refused(target: Target, found: search_results.Found) -> Target:
  """Returns a target that does not fit, with what would."""
  ways = [
    f"{search_space.text(more)} {f'on {name} ' if name else ''}".strip()
    for more, name, _ in found.nearest
  ]
  would = f"; these would: {'; '.join(ways)}" if ways else ""
  return target.with_planned(refused=f"no setting fits on {found.topology}{would}")


def _planned(target: Target, budget: Budget) -> Target:
  """Returns a target with the best mesh of a search, planned."""
  count = flags.COMPILATIONS.value if flags.given(flags.COMPILATIONS) else 0
  found = _searched(target, budget, compilations=count)
  if found.best is None:
    return _refused(target, found)
  best = found.best.estimate
  plan = plan_process.made(
    search_process.with_setting(_config(target), best.setting),
    budget.topology,
    title=config_flag.name(flags.CONFIG),
    simulate=flags.SIMULATE.value,
    debug=flags.DEBUG.value,
    label="forecast: plan",
    command=flags.command_line(),
  )["plan"]
  target = target.with_planned(
    mesh=best.mesh_text,
    rematerialization=best.rematerialization,
    overrides=search_space.text(best.setting),
    plan=plan,
  )
  if not plan["fits"]:
    return target.with_planned(refused=f"it does not fit on {found.topology}")
  return _with_plan(target, budget, plan)


def _with_plan(target: Target, budget: Budget, plan: Mapping[str, Any]) -> Target:
  """Returns a target with its plan, time and cost, failures included."""
  plan, config = dict(plan), flags.CONFIG.value
  failures = plan_verb.with_failures(plan, config.planning, config.checkpoint)
  seconds = plan["goodput"]["best"]["seconds"][0]
  cost = seconds / 3600 * budget.chips * budget.price if budget.price else None
  return target.with_planned(plan=plan, failures=tuple(failures), seconds=seconds, cost=cost)


def _command(target: Target) -> str:
  """Returns the command that trains a target."""
  data = flags.CONFIG.value.data
  steps = math.ceil(target.prediction.tokens / (data.global_batch_size * data.sequence_length))
  if plan := target.planned["plan"]:
    steps = plan["steps"]
  own = {**target.size.setting, "training.steps": str(steps)}
  if "evaluation.final_steps" not in flags.CONFIG.overridden:
    own["evaluation.final_steps"] = "0"  # all of the split, as the ladder's
  words = [f"{key}={value}" for key, value in own.items()]
  return " ".join([flags.command_to_train(), *words, target.planned["overrides"]]).strip()
