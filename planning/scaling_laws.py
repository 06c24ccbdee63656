"""Scaling laws: what a larger run will have learned, fitted to finished small runs.

The loss of N parameters trained on D tokens is taken as L(N, D) = E + A/N^alpha + B/D^beta and
fitted as in the third approach of arXiv:2203.15556, section 3.3: L-BFGS from a grid of starts on
the Huber loss between logarithms. Intervals hold 90 %, by a bootstrap over runs and their seeds.
Tokens that are seen again count for less (arXiv:2305.16264, section 3.1), and a model that will
serve many tokens is better smaller than the compute-optimal one (arXiv:2401.00448).
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import threadpoolctl
from scipy import optimize, stats

COVERAGE = 0.9  # of each interval
DRAWS = 200  # of the bootstrap
FAR = 100  # times the largest run's compute: beyond, a prediction is marked
HUBER = 1e-3  # where the loss of a log residual turns from square to linear; arXiv:2203.15556
REPETITION = 15.39  # epochs after which a repeated token's worth has decayed; arXiv:2305.16264
STARTS = 8  # of the grid, the best by their objective
LARGEST_EXPONENT = 3.0
COEFFICIENTS = 5
LEAST_SETTINGS = 8  # else nearly all draws of the bootstrap would be the same
NEAR_TOKENS = 0.1  # of the logarithm: so far are tokens of batches of several sizes the same
PER_DRAW = 20  # values of the noise for each law of the bootstrap
TRAINING_FLOPS = 6  # per parameter and token, a third of them forward


@dataclasses.dataclass(frozen=True)
class Observation:
  """A finished run as a point of a fit.

  Attributes:
    parameters: of the model.
    tokens: it was trained on, repeated ones included.
    loss: at its end, in the unit of the fit, such as bits per byte.
    seed: of the run; runs that differ in it alone are one setting.
    unique_tokens: of the data set.
    flops: of training; None: six per parameter and token.
    learning_rate: where it was swept.
    batch_size: in tokens, where it was swept.
  """

  parameters: float
  tokens: float
  loss: float
  seed: int = 0
  unique_tokens: float = math.inf
  flops: float | None = None
  learning_rate: float | None = None
  batch_size: float | None = None

  @property
  def compute(self) -> float:
    """Returns the FLOPs of its training."""
    return self.flops or TRAINING_FLOPS * self.parameters * self.tokens

  @property
  def setting(self) -> tuple[float, float, float]:
    """Returns what runs have in common that differ in their seed alone."""
    return self.parameters, self.tokens, self.unique_tokens


@dataclasses.dataclass(frozen=True)
class Interval:
  """A value with the ends of its 90 % interval."""

  value: float
  low: float
  high: float


@dataclasses.dataclass(frozen=True)
class Law:
  """L(N, D) = E + A/N^alpha + B/D^beta."""

  E: float
  A: float
  alpha: float
  B: float
  beta: float

  def loss(self, parameters, tokens, unique_tokens=math.inf):
    """Returns the loss of so many parameters and tokens (numbers or arrays)."""
    effective = effective_tokens(tokens, unique_tokens)
    return self.E + self.A / parameters**self.alpha + self.B / effective**self.beta


@dataclasses.dataclass(frozen=True)
class Fit:
  """A law with its uncertainty.

  Attributes:
    law: that fits all observations best.
    draws: laws of the bootstrap.
    observations: it was fitted to.
    residuals: of the log losses of these, widened for the coefficients that were fitted: the
      chance of their seeds, and what the law does not describe.
    freedom: degrees of freedom of the residuals: settings less coefficients.
  """

  law: Law
  draws: tuple[Law, ...]
  observations: tuple[Observation, ...]
  residuals: np.ndarray
  freedom: int

  @property
  def coefficients(self) -> dict[str, Interval]:
    """Returns E, A, alpha, B and beta."""
    return {
      field.name: _interval(
        getattr(self.law, field.name), [getattr(draw, field.name) for draw in self.draws]
      )
      for field in dataclasses.fields(Law)
    }

  @property
  def noise(self) -> float:
    """Returns the standard deviation of a run's log loss about the law."""
    return float(np.sqrt(np.mean(self.residuals**2)))

  @property
  def largest_compute(self) -> float:
    """Returns the FLOPs of the largest run of the fit."""
    return max(one.compute for one in self.observations)


@dataclasses.dataclass(frozen=True)
class Prediction:
  """The loss of a run that is not there yet.

  Attributes:
    parameters: of the model.
    tokens: it is to be trained on, repeated ones included.
    effective_tokens: what they are worth in tokens seen once.
    loss: with the interval of a single run, its seed's chance included.
    times_largest: its compute, relative to the largest run of the fit.
  """

  parameters: float
  tokens: float
  effective_tokens: float
  loss: Interval
  times_largest: float

  @property
  def extrapolated(self) -> bool:
    """Returns whether its compute is more than 100 times that of the largest run of the fit."""
    return self.times_largest > FAR


@dataclasses.dataclass(frozen=True)
class HeldOut:
  """A prediction of runs that were left out of the fit.

  Attributes:
    prediction: by the fit to the other runs.
    measured: loss, the mean over seeds.
    seeds: that were trained.
  """

  prediction: Prediction
  measured: float
  seeds: int

  @property
  def error(self) -> float:
    """Returns the predicted loss relative to the measured one, less 1."""
    return self.prediction.loss.value / self.measured - 1

  @property
  def inside(self) -> bool:
    """Returns whether the measured loss lies in the interval."""
    return self.prediction.loss.low <= self.measured <= self.prediction.loss.high


@dataclasses.dataclass(frozen=True)
class OptimalSize:
  """How a budget of training is best divided between parameters and tokens.

  Attributes:
    parameters: of the model.
    tokens: to train on.
    prediction: of this run.
    training_flops: the budget.
    serving_flops: for the tokens that the model will serve.
  """

  parameters: Interval
  tokens: Interval
  prediction: Prediction
  training_flops: float
  serving_flops: float


@dataclasses.dataclass(frozen=True)
class BestValue:
  """The best learning rate or batch size of a model and its tokens.

  Attributes:
    parameters: of the model.
    tokens: it was trained on.
    value: where the parabola through the logarithms of the best value and its neighbors is lowest.
    at_edge: whether the best value is the least or the largest tried, so that the optimum may lie
      beyond; `value` is then the tried one.
  """

  parameters: float
  tokens: float
  value: float
  at_edge: bool


@dataclasses.dataclass(frozen=True)
class PowerLaw:
  """A best value as constant * parameters^p * tokens^d.

  Attributes:
    names: of the sizes that it depends on, of "parameters" and "tokens".
    fitted: log of the constant, and an exponent for each name.
    covariance: of these.
    freedom: degrees of freedom of the covariance.
    best: values that it was fitted to.
    left_out: those at the edge of what was tried.
  """

  names: tuple[str, ...]
  fitted: np.ndarray
  covariance: np.ndarray
  freedom: int
  best: tuple[BestValue, ...]
  left_out: tuple[BestValue, ...]

  @property
  def exponents(self) -> dict[str, Interval]:
    """Returns the exponent of each size."""
    rows = np.eye(len(self.fitted))[1:]
    return {name: self._along(row) for name, row in zip(self.names, rows, strict=True)}

  def at(self, parameters: float, tokens: float) -> Interval:
    """Returns the best value for so many parameters and tokens."""
    sizes = {"parameters": parameters, "tokens": tokens}
    found = self._along(np.array([1, *(math.log(sizes[name]) for name in self.names)]))
    return Interval(*(math.exp(log) for log in (found.value, found.low, found.high)))

  def _along(self, row: np.ndarray) -> Interval:
    value = float(row @ self.fitted)
    error = math.sqrt(row @ self.covariance @ row) * stats.t.ppf((1 + COVERAGE) / 2, self.freedom)
    return Interval(value, float(value - error), float(value + error))


def _interval(value: float, draws) -> Interval:
  tail = (1 - COVERAGE) / 2
  low, high = np.quantile(np.asarray(draws), [tail, 1 - tail])
  return Interval(float(value), float(low), float(high))


def effective_tokens(tokens, unique_tokens):
  """Returns how many tokens seen once are worth as much as these.

  Args:
    tokens: seen in training, a number or an array.
    unique_tokens: of the data set; what is beyond them is repeated.

  Source: arXiv:2305.16264, section 3.1, with the constant of its section 6. The decay of excess
  parameters, which it also describes, is left out.
  """
  tokens = np.asarray(tokens, float)
  unique = np.minimum(tokens, unique_tokens)
  return unique + unique * REPETITION * -np.expm1(-(tokens / unique - 1) / REPETITION)


# ------------------------------ the fit ------------------------------


class _Points:
  """Logarithms of observations about their means, which keeps the objective well conditioned."""

  def __init__(self, observations: Sequence[Observation]):
    """Takes the observations in their order."""
    table = np.array([(one.parameters, one.tokens, one.unique_tokens) for one in observations])
    logs = np.log([table[:, 0], effective_tokens(table[:, 1], table[:, 2])])
    self.means = logs.mean(axis=1)
    self.x, self.y = logs - self.means[:, None]
    self.z = np.log([one.loss for one in observations])

  def law(self, fitted: np.ndarray) -> Law:
    """Returns the law of a fitted vector."""
    e, a, alpha, b, beta = fitted
    A, B = np.exp([a, b] + np.array([alpha, beta]) * self.means)
    return Law(E=math.exp(e), A=float(A), alpha=float(alpha), B=float(B), beta=float(beta))


def _objective(vector: np.ndarray, points: _Points, weights: np.ndarray):
  """Returns the Huber loss of the log residuals, over HUBER, and its gradient.

  Args:
    vector: log E, log A', alpha, log B', beta, where A' and B' belong to sizes over their mean.
    points: the runs.
    weights: of the runs.
  """
  e, a, alpha, b, beta = vector
  terms = np.stack([np.full_like(points.x, e), a - alpha * points.x, b - beta * points.y])
  top = terms.max(axis=0)
  shares = np.exp(terms - top)
  total = shares.sum(axis=0)
  residuals = (points.z - top - np.log(total)) / HUBER
  slopes = np.clip(residuals, -1, 1)
  value = np.sum(weights * slopes * (residuals - slopes / 2)) * HUBER
  pulls = -weights * slopes * shares / total
  gradient = [pulls[0], pulls[1], -pulls[1] * points.x, pulls[2], -pulls[2] * points.y]
  return value, np.array([part.sum() for part in gradient])


def _minimize(start: np.ndarray, points: _Points, weights: np.ndarray):
  """Returns the result of L-BFGS from a start."""
  lowest, highest = points.z.min(), points.z.max()
  size, exponent = (lowest - 12, highest + 1), (0.0, LARGEST_EXPONENT)
  return optimize.minimize(
    _objective,
    start,
    args=(points, weights),
    jac=True,
    method="L-BFGS-B",
    bounds=[(lowest - 12, lowest), size, exponent, size, exponent],
    options={"maxiter": 1000, "ftol": 1e-10, "gtol": 1e-7},
  )


def _starts(points: _Points, weights: np.ndarray) -> list[np.ndarray]:
  """Returns the best of a grid: E a share of the least loss, the rest divided between the terms."""
  least = points.z.min()
  grid = []
  for share in (0.1, 0.3, 0.5, 0.7, 0.9):
    rest = math.log(math.exp(points.z.mean()) - share * math.exp(least))
    for part in (0.1, 0.3, 0.5, 0.7, 0.9):
      for alpha in (0.1, 0.3, 0.6, 1.2):
        for beta in (0.1, 0.3, 0.6, 1.2):
          sizes = rest + math.log(part), rest + math.log1p(-part)
          grid.append(np.array([least + math.log(share), sizes[0], alpha, sizes[1], beta]))
  return sorted(grid, key=lambda start: _objective(start, points, weights)[0])[:STARTS]


def _check(observations: Sequence[Observation]) -> None:
  """Raises ValueError where no law can be fitted to the runs."""
  wrong = [
    f"{one.parameters:g} parameters, {one.tokens:g} tokens: loss {one.loss:g}"
    for one in observations
    if not (one.parameters > 0 and one.tokens > 0 and 0 < one.loss < math.inf)
  ]
  if wrong:
    raise ValueError(
      "a scaling law needs finite losses above 0; leave these runs out: " + "; ".join(wrong)
    )
  lacking = [
    f"{count} {name}, at least {least}"
    for name, (count, least) in _distinct(observations, LEAST_SETTINGS).items()
    if count < least
  ]
  if lacking:
    raise ValueError(
      "a scaling law has five coefficients; the runs have too few "
      f"({'; '.join(lacking)}): train more sizes on more numbers of tokens"
    )


def _distinct(observations: Sequence[Observation], settings: int) -> dict[str, tuple[int, int]]:
  """Returns what must differ between runs -> how many there are, and how many are needed."""
  return {
    "settings": (len({one.setting for one in observations}), settings),
    "sizes of model": (len({one.parameters for one in observations}), 3),
    "numbers of tokens": (len({one.tokens for one in observations}), 3),
  }


def fit_law(observations: Sequence[Observation], *, draws: int = DRAWS, seed: int = 0) -> Fit:
  """Fits a law to finished runs.

  Args:
    observations: the runs, with at least eight pairs of parameters and tokens, three different
      numbers of each; several seeds of a pair are one setting of the bootstrap.
    draws: of the bootstrap.
    seed: of the bootstrap.

  Raises:
    ValueError: there are too few, or a loss is not a number above 0.
  """
  _check(observations)
  points, even = _Points(observations), np.ones(len(observations))
  random = np.random.default_rng(seed)
  weights = [_weights(observations, random) for _ in range(draws)]
  with threadpoolctl.threadpool_limits(1):  # L-BFGS starts threads for its five numbers
    found = [_minimize(start, points, even) for start in _starts(points, even)]
    best = min(found, key=lambda result: result.fun).x
    laws = tuple(points.law(_minimize(best, points, one).x) for one in weights)
  law = points.law(best)
  settings = _settings(observations)
  freedom = len(settings) - COEFFICIENTS
  residuals = np.array(
    [
      math.log(one.loss / law.loss(one.parameters, one.tokens, one.unique_tokens))
      for one in observations
    ]
  )
  for places in settings:
    residuals[places] += residuals[places].mean() * (math.sqrt(len(settings) / freedom) - 1)
  return Fit(law, laws, tuple(observations), residuals, freedom)


def _settings(observations: Sequence[Observation]) -> list[list[int]]:
  """Returns the places of runs, together where only their seeds differ."""
  places = collections.defaultdict(list)
  for place, one in enumerate(observations):
    places[one.setting].append(place)
  return list(places.values())


def _weights(observations: Sequence[Observation], random: np.random.Generator) -> np.ndarray:
  """Returns how often each run is drawn: settings with replacement, then seeds of each likewise.

  A draw whose settings fix no law is drawn again.
  """
  settings = _settings(observations)
  while True:
    drawn = [
      place
      for chosen in random.integers(len(settings), size=len(settings))
      for place in random.choice(settings[chosen], size=len(settings[chosen]))
    ]
    found = _distinct([observations[place] for place in drawn], COEFFICIENTS + 1)
    if all(count >= least for count, least in found.values()):
      return np.bincount(drawn, minlength=len(observations)).astype(float)


# ------------------------------ predictions ------------------------------


def predict(
  fit: Fit,
  parameters: float,
  tokens: float,
  *,
  unique_tokens: float = math.inf,
  flops: float | None = None,
) -> Prediction:
  """Predicts the loss of a run.

  Args:
    fit: of smaller runs.
    parameters: of the model.
    tokens: to train on, repeated ones included.
    unique_tokens: of the data set.
    flops: of training; None: six per parameter and token.
  """
  random = np.random.default_rng(0)
  losses = np.array([draw.loss(parameters, tokens, unique_tokens) for draw in fit.draws])[:, None]
  shape = (len(fit.draws), PER_DRAW)
  signed = random.choice(fit.residuals, shape) * random.choice([-1, 1], shape)
  # Widened as Student's distribution is: few residuals may understate their own size.
  noise = signed * np.sqrt(fit.freedom / random.chisquare(fit.freedom, shape))
  run = Observation(parameters, tokens, 1.0, flops=flops)
  return Prediction(
    parameters=parameters,
    tokens=tokens,
    effective_tokens=float(effective_tokens(tokens, unique_tokens)),
    loss=_interval(fit.law.loss(parameters, tokens, unique_tokens), losses * np.exp(noise)),
    times_largest=run.compute / fit.largest_compute,
  )


def held_out(
  observations: Sequence[Observation], *, settings: int = 1, draws: int = DRAWS, seed: int = 0
) -> tuple[HeldOut, ...]:
  """Predicts the largest runs from the others.

  Args:
    observations: all runs.
    settings: how many pairs of parameters and tokens are left out of the fit, those of most
      compute, with all their seeds.
    draws: of the bootstrap.
    seed: of the bootstrap.

  Raises:
    ValueError: the others are too few.
  """
  groups = collections.defaultdict(list)
  for one in sorted(observations, key=lambda run: -run.compute):
    groups[one.setting].append(one)
  left_out = list(groups.values())[:settings]
  rest = [run for group in list(groups.values())[settings:] for run in group]
  fit = fit_law(rest, draws=draws, seed=seed)
  return tuple(
    HeldOut(
      predict(
        fit,
        group[0].parameters,
        group[0].tokens,
        unique_tokens=group[0].unique_tokens,
        flops=group[0].flops,
      ),
      float(np.mean([run.loss for run in group])),
      len(group),
    )
    for group in left_out
  )


# ------------------------------ the best size ------------------------------


def _six_per_parameter(parameters: float) -> float:
  return TRAINING_FLOPS * parameters


def _slope(function: Callable[[float], float], at: float) -> float:
  """Returns the derivative of log |function| by the log of its argument."""
  step = 1e-4
  up, down = function(at * math.exp(step)), function(at * math.exp(-step))
  return math.log(up / down) / (2 * step)


def _best_parameters(law, flops, served_tokens, unique_tokens, flops_per_token) -> float:
  """Returns the number of parameters where no exchange of them for tokens gains anything.

  Along models of one loss, training costs f(N) D and serving f(N) S/3. At the least sum, the loss
  falls by N and by D in the ratio in which both raise the cost. That ratio falls as N grows.
  """

  def gain(log_parameters: float) -> float:
    parameters = math.exp(log_parameters)
    tokens = flops / flops_per_token(parameters)
    worth = _slope(lambda seen: float(effective_tokens(seen, unique_tokens)), tokens)
    by_parameters = law.alpha * law.A / parameters**law.alpha
    by_tokens = law.beta * law.B / effective_tokens(tokens, unique_tokens) ** law.beta * worth
    cost = _slope(flops_per_token, parameters) * (1 + served_tokens / (3 * tokens))
    return math.log(max(by_parameters, 1e-300) / max(by_tokens * cost, 1e-300))

  low, high = math.log(1.0), math.log(flops)
  if gain(low) <= 0 or gain(high) >= 0:
    return math.exp(low if gain(low) <= 0 else high)
  return math.exp(optimize.brentq(gain, low, high, xtol=1e-6))


def optimal_size(
  fit: Fit,
  flops: float,
  *,
  served_tokens: float = 0,
  unique_tokens: float = math.inf,
  flops_per_token: Callable[[float], float] = _six_per_parameter,
) -> OptimalSize:
  """Divides a budget of training between parameters and tokens.

  Args:
    fit: of smaller runs.
    flops: of training.
    served_tokens: that the trained model will read and write. 0: the compute-optimal size.
      Else, of the models that the budget trains, the one whose loss no other model reaches with
      fewer FLOPs of training and serving together (arXiv:2401.00448, equation 4).
    unique_tokens: of the data set.
    flops_per_token: of training, by the number of parameters; serving takes a third.
  """
  rest = (flops, served_tokens, unique_tokens, flops_per_token)
  sizes = [_best_parameters(law, *rest) for law in (fit.law, *fit.draws)]
  tokens = [flops / flops_per_token(size) for size in sizes]
  return OptimalSize(
    parameters=_interval(sizes[0], sizes[1:]),
    tokens=_interval(tokens[0], tokens[1:]),
    prediction=predict(fit, sizes[0], tokens[0], unique_tokens=unique_tokens, flops=flops),
    training_flops=flops,
    serving_flops=flops_per_token(sizes[0]) / 3 * served_tokens,
  )


# ------------------------------ learning rate and batch size ------------------------------


def _same_size(first: Observation, second: Observation) -> bool:
  """Returns whether runs have the same model and about as many tokens, in whole batches."""
  apart = abs(math.log(first.tokens / second.tokens))
  same = (first.parameters, first.unique_tokens) == (second.parameters, second.unique_tokens)
  return same and apart < NEAR_TOKENS


def best_values(observations: Sequence[Observation], name: str) -> list[BestValue]:
  """Returns the best of the tried values of each setting that has tried at least three.

  Args:
    observations: the runs. Those that differ in their seed alone are averaged; where the other of
      learning rate and batch size was swept too, its best is taken at each value.
    name: "learning_rate" or "batch_size".
  """
  seeds, firsts = collections.defaultdict(list), []
  for one in observations:
    if getattr(one, name) is None:
      continue
    near = [first for first in firsts if _same_size(first, one)]
    firsts += [] if near else [one]
    setting = (near or [one])[0].setting
    seeds[setting, getattr(one, name), one.learning_rate, one.batch_size].append(one.loss)
  tried = collections.defaultdict(lambda: collections.defaultdict(lambda: math.inf))
  for (setting, value, *_), losses in seeds.items():
    tried[setting][value] = min(tried[setting][value], float(np.mean(losses)))
  found = []
  for (parameters, tokens, _), losses in tried.items():
    if len(losses) < 3:
      continue
    x = np.log(sorted(losses))
    y = np.log([losses[value] for value in sorted(losses)])
    best = int(np.argmin(y))
    if at_edge := best in (0, len(x) - 1):
      log_value = x[best]
    else:
      curvature, slope, _ = np.polyfit(x[best - 1 : best + 2] - x[best], y[best - 1 : best + 2], 2)
      log_value = x[best] - (slope / (2 * curvature) if curvature > 0 else 0)
    found.append(BestValue(parameters, tokens, float(np.exp(log_value)), at_edge))
  return found


def fit_best(observations: Sequence[Observation], name: str) -> PowerLaw:
  """Fits how the best learning rate or batch size depends on parameters and tokens.

  Where tokens grow in proportion to parameters, only their joint effect can be seen: it is given
  as that of parameters, and holds for this ratio.

  Args:
    observations: runs with several values of `name` at several sizes.
    name: "learning_rate" or "batch_size".

  Raises:
    ValueError: too few sizes have a best value between those tried.
  """
  found = best_values(observations, name)
  best = [one for one in found if not one.at_edge]
  logs = {size: np.log([getattr(one, size) for one in best]) for size in ("parameters", "tokens")}
  names = [size for size, values in logs.items() if len({*values}) > 1]
  if len(names) == 2 and abs(np.corrcoef(*logs.values())[0, 1]) > 0.99:
    names = ["parameters"]
  design = np.stack([np.ones(len(best)), *(logs[size] for size in names)], axis=1)
  freedom = len(best) - len(names) - 1
  if not names or freedom < 1:
    edge = f", {len(found) - len(best)} more at the edge of what was tried" if found != best else ""
    raise ValueError(
      f"{name}: {len(best)} sizes have a best value between others{edge}; a power law needs "
      f"{max(3, len(names) + 2)}: sweep it at more sizes, and further at the edges"
    )
  values = np.log([one.value for one in best])
  fitted, *_ = np.linalg.lstsq(design, values, rcond=None)
  variance = np.sum((values - design @ fitted) ** 2) / freedom
  covariance = variance * np.linalg.inv(design.T @ design)
  left_out = tuple(one for one in found if one.at_edge)
  return PowerLaw(tuple(names), fitted, covariance, freedom, tuple(best), left_out)
