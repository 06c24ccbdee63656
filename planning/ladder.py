"""A ladder: small runs of a family of models, from whose losses that of a large one is predicted.

A family has one shape: the widths are those of the config in proportion, the layers follow the
width, heads stay as large, and muP keeps the learning rate (docs/optimizers.md). A rung of the
ladder is an amount of training compute, which each size spends on as many tokens as it buys.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from ml_collections import ConfigDict

from configs.schema import finalize
from models import model_spec
from models.spec import expanded
from models.transformer import active_elements
from planning.scaling_laws import TRAINING_FLOPS, Observation
from training import coordinate_check

SHARES = (1 / 4, 3 / 8, 1 / 2, 3 / 4, 1)  # of the config's width: the sizes of a ladder
RUNGS = (1 / 16, 1 / 4, 1)  # of the compute of the largest size at so many tokens per parameter:
TOKENS_PER_PARAMETER = 20  # about the compute-optimal ratio of arXiv:2203.15556
FEWEST_STEPS = 100  # of a run: fewer are mostly warm-up
FEWEST_LAYERS = 2  # where the config has as many; one layer cannot copy what came before
_ROUND = 16  # widths of large models are multiples of a power of 2 near this part of them


@dataclasses.dataclass(frozen=True)
class Size:
  """A model of a family.

  Attributes:
    width: model.model_size.
    layers: model.layers.
    parameters: that multiply a token: all but the table of embeddings, and of experts its own.
    setting: overrides of the config, as on a command line.
  """

  width: int
  layers: int
  parameters: int
  setting: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Rung:
  """A run of a ladder.

  Attributes:
    size: of its model.
    compute: FLOPs of training that it is to take.
    steps: that come nearest to these.
    tokens: of all its steps.
  """

  size: Size
  compute: float
  steps: int
  tokens: int


class Family:
  """The models of a config at any width.

  Attributes:
    resolved: the config, finalized.
    base: model.base_width of all of them: the config's, or its own width.
  """

  def __init__(self, config: ConfigDict):
    """Takes a config as parsed; raises ValueError where its width cannot be chosen."""
    self._config = config
    self.resolved = finalize.finalize(config, "cpu")
    coordinate_check.check(
      self.resolved.model, self.resolved.lora, self.resolved.task, steps=1, sizes={}
    )
    self.base = self.resolved.model.base_width or self.resolved.model.model_size
    self._step = coordinate_check.width_step(self.resolved.model)

  def widths(self, given: Sequence[str], most: float = 1) -> list[int]:
    """Returns the widths of a ladder.

    Args:
      given: as on the command line; (): by `SHARES`.
      most: the largest of these as a share of the config's width.

    Raises:
      ValueError: fewer than three, or one that the model cannot have.
    """
    width = self.resolved.model.model_size
    shares = {max(1, round(share * most * width / self._step)) * self._step for share in SHARES}
    found = sorted(shares)
    if given:
      found = coordinate_check.widths(self.resolved.model, given)
    if len(found) < 3:
      raise ValueError(
        f"--widths={','.join(map(str, found))}: a scaling law needs at least three sizes; widths "
        f"of this model are multiples of {self._step}"
      )
    return found

  def of_width(self, width: int) -> Size:
    """Returns the model of a width; that of the config's own is the config's."""
    model = self.resolved.model
    layers = model.layers
    if width != model.model_size:
      least = min(FEWEST_LAYERS, layers)
      layers = max(least, round(layers * width / model.model_size))
    setting = {
      **coordinate_check.overrides(self.resolved, width),
      "model.layers": layers,
      "model.base_width": self.base,
    }
    config = ConfigDict(self._config)
    with config.unlocked():
      config.update_from_flattened_dict(setting)
    texts = {key: str(value) for key, value in setting.items()}
    return Size(width, layers, _parameters(finalize.finalize(config, "cpu")), texts)

  def nearest(self, parameters: float) -> Size:
    """Returns the model whose number of parameters is nearest, of widths that divide well."""
    size = self.of_width(self.resolved.model.model_size)
    for _ in range(8):
      width = size.width * (parameters / size.parameters) ** (1 / 3)
      grain = self._step * 2 ** max(0, math.floor(math.log2(width / self._step / _ROUND)))
      found = self.of_width(max(grain, round(width / grain) * grain))
      if abs(math.log(found.parameters / parameters)) >= abs(
        math.log(size.parameters / parameters)
      ):
        break
      size = found
    return size


def _parameters(resolved: ConfigDict) -> int:
  """Returns `Size.parameters` of a finalized config."""
  spec = model_spec(resolved)
  elements = {
    name: math.prod(spec.sizes(letters))
    for row, letters in spec.parameters.items()
    for name in expanded(row)
    if row != "embed/table" or "unembed/kernel" not in spec.parameters
  }
  return active_elements(resolved.model, elements)


def rungs(
  sizes: Sequence[Size], flops: Sequence[float], tokens_per_step: int
) -> tuple[list[Rung], int]:
  """Returns the runs of a ladder, from the least compute up, and how many have too few steps.

  Args:
    sizes: of the models.
    flops: of training, of each rung; (): by `RUNGS`.
    tokens_per_step: of all runs.
  """
  most = TRAINING_FLOPS * TOKENS_PER_PARAMETER * max(one.parameters for one in sizes) ** 2
  found = []
  for compute in sorted(flops or [share * most for share in RUNGS]):
    for size in sizes:
      steps = round(compute / (TRAINING_FLOPS * size.parameters * tokens_per_step))
      found.append(Rung(size, compute, steps, steps * tokens_per_step))
  kept = [one for one in found if one.steps >= FEWEST_STEPS]
  return kept, len(found) - len(kept)


@dataclasses.dataclass(frozen=True)
class Measured:
  """A run of a ladder that is done.

  Attributes:
    name: of the run.
    rung: what it is.
    others: the keys that differ besides -> values.
    seed: of the run.
    bits_per_byte: of its last evaluation.
  """

  name: str
  rung: Rung
  others: Mapping[str, str]
  seed: int
  bits_per_byte: float


def observations(measured: Sequence[Measured], unique_tokens: float) -> list[Observation]:
  """Returns what a law is fitted to: of each size and its tokens the runs of the best setting.

  Args:
    measured: runs that are done; where keys such as the learning rate differ, each size takes the
      values with the least mean over seeds.
    unique_tokens: of the training split.
  """
  groups: dict[tuple, dict[tuple, list[Measured]]] = {}
  for one in measured:
    cell = groups.setdefault((one.rung.size.parameters, one.rung.compute), {})
    cell.setdefault(tuple(one.others.items()), []).append(one)
  best = [
    min(cell.values(), key=lambda runs: sum(one.bits_per_byte for one in runs) / len(runs))
    for cell in groups.values()
  ]
  return [observation(one, unique_tokens) for runs in best for one in runs]


def observation(one: Measured, unique_tokens: float) -> Observation:
  """Returns a run as a point of a fit."""
  rate, rows = (one.others.get(key) for key in (LEARNING_RATE, BATCH_SIZE))
  return Observation(
    one.rung.size.parameters,
    one.rung.tokens,
    one.bits_per_byte,
    seed=one.seed,
    unique_tokens=unique_tokens,
    learning_rate=float(rate) if rate else None,
    batch_size=one.rung.tokens / one.rung.steps if rows else None,
  )


LEARNING_RATE, BATCH_SIZE = "optimizer.learning_rate", "data.global_batch_size"
