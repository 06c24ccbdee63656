"""What a sweep says of its runs, held to SciPy's Tukey test, to chance and to known effects."""

import itertools
import re

import numpy as np
import pytest
from scipy import stats

from reports import sweep_report
from reports.run_files import Run
from reports.sweep_report import DONE, FAILED, Entry, Result


def run_of(name, loss):
  """Returns the files of a run that ends with this loss."""
  line = {"step": 10, "eval_loss": loss, "eval_examples": 8}
  times = {"step": 10, "goodput": 1.0, "seconds": {"step": 2.0}, "time": 1.0, "done": True}
  return Run(name, name, {}, [], [line], [], times, [], None, [], 0)


def result_of(axes, loss):
  """Returns the result of a grid; `loss` is a function of its values, None of a run that failed."""
  entries = []
  for values in itertools.product(*axes.values()):
    name, found = "_".join(map(str, values)), loss(*values)
    setting = dict(zip(axes, map(str, values), strict=True))
    state = FAILED if found is None else DONE
    entries.append(Entry(name, setting, state, None if found is None else run_of(name, found)))
  return Result("test", entries)


def test_an_effect_and_its_limit_are_those_of_tukeys_test():
  rng = np.random.default_rng(0)
  losses = {(a, s): rng.normal(a, 1.0) for a in (1, 2, 5) for s in range(4)}
  result = result_of({"a": (1, 2, 5), "seed": range(4)}, lambda a, s: losses[a, s])
  [effect] = result.effects()
  groups = [[losses[a, s] for s in range(4)] for a in (1, 2, 5)]
  assert [*effect.means] == ["1", "2", "5"]
  np.testing.assert_allclose([*effect.means.values()], [np.mean(one) for one in groups], rtol=1e-12)
  interval = stats.tukey_hsd(*groups).confidence_interval(0.95)
  half_width = (interval.high - interval.low)[0, 1] / 2
  assert effect.limit == pytest.approx(half_width, rel=1e-6)
  deviation = np.sqrt(np.mean([np.var(one, ddof=1) for one in groups]))
  assert result.spread() == (pytest.approx(deviation, rel=1e-12), 9)


@pytest.mark.parametrize(("difference", "beyond"), [(0.0, (0, 1)), (4.0, (4, 4))])
def test_known_effects_are_told_from_chance(difference, beyond):
  # Of 4 sweeps, an axis without an effect is within the spread; one of four deviations is not.
  count = 0
  for number in range(4):
    rng = np.random.default_rng(number)
    axes = {"a": (0, 1), "b": (0, 1), "seed": range(3)}
    result = result_of(axes, lambda a, b, s, rng=rng: 3.0 * b + difference * a + rng.normal())
    [effect] = [one for one in result.effects() if one.key == "a"]
    right = next(iter(effect.means)) == "0"
    count += not effect.within and (right or not difference)
  assert beyond[0] <= count <= beyond[1]


def test_sentences_name_the_best_and_what_is_chance():
  noise = {0: 0.0, 1: 0.01, 2: -0.01}
  result = result_of(
    {"seed": (0, 1, 2), "rate": (0.1, 0.2), "layers": (1, 2)},
    lambda s, rate, layers: 1.0 + 10 * rate + 0.001 * layers + noise[s] * (1 if rate < 0.2 else -1),
  )
  best, seeds, rate, layers = sweep_report.sentences(result)
  assert best == "best: rate=0.1 layers=1: evaluation loss 2.0010, the mean of 3 seeds"
  assert seeds == "seeds: a standard deviation of 0.0100 between runs that are alike"
  assert rate.startswith("rate: 0.1 is best (2.0015); 0.2 +1.0000: beyond the spread of seeds, 0.0")
  assert "the effect of layers is within the spread of seeds (0.0010; above 0.0" in layers


def test_runs_that_failed_leave_the_other_blocks(tmp_path):
  # Without (2, 2) only b=1 has both values of a.
  result = result_of({"a": (1, 2), "b": (1, 2)}, lambda a, b: None if a == b == 2 else a + 10.0 * b)
  assert [(one.key, [*one.means.values()]) for one in result.effects()] == [
    ("b", [11.0, 21.0]),
    ("a", [11.0, 12.0]),
  ]
  assert all(one.limit is None and not one.within for one in result.effects())
  assert "none are varied" in sweep_report.sentences(result)[1]
  table = sweep_report.table(result).splitlines()
  assert table[0] == "run,a,b,state,eval_loss,step,seconds,reason"
  assert table[1] == "1_1,1,1,done,11.0,10,2.0,"
  assert table[4] == "2_2,2,2,failed,,0,,"
  page = sweep_report.html(result, page=tmp_path / "sweep.html", command="sweep")
  assert re.findall(r"<title>(\d_\d): ", page) == ["1_2", "2_1", "1_1"]  # the best is drawn last
  assert "Runs without a result" not in page  # none has a reason


def test_drawn_settings_have_a_rank_correlation():
  settings = [{"rate": str(n), "name": "ab"[n % 2]} for n in range(6)]
  entries = [Entry(str(n), one, DONE, run_of(str(n), n)) for n, one in enumerate(settings)]
  lines = sweep_report.sentences(Result("test", entries))
  assert "rate: rank correlation with evaluation loss +1.00 over 6 settings" in lines[2]
  assert lines[3] == "name: no runs differ in it alone, so its effect is not known"


def test_a_sweep_without_a_result_says_so():
  text = sweep_report.text(result_of({"a": (1, 2)}, lambda a: None), 80)
  assert text.startswith("no run is done, so none is the best by its training loss\nfailed: 2 of 2")
