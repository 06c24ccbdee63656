"""Which setting is compiled next, the Pareto front, and prices."""

import dataclasses

import pytest

from planning.search_results import (
  Estimate,
  Tried,
  best,
  divided_otherwise,
  finalists,
  pareto_front,
  prices,
  upcoming,
)


def estimate(seconds, *, mesh=8, table="none", size=1, **more):
  setting = {"mesh.fsdp": mesh, "table": table, **more}
  inner = {"fsdp": mesh} if mesh == 8 else {"fsdp": mesh, "tensor": 8 // mesh}
  return Estimate(
    setting, mesh=inner, bytes=size, seconds=seconds, tokens=10, rematerialization=table
  )


def test_the_fastest_that_fits_comes_first():
  slow, fast, large = estimate(2.0), estimate(1.0, table="dots"), estimate(0.5, mesh=4, size=11)
  assert upcoming([slow, fast, large], [], 10, trusted=True) is fast


def test_of_equal_ones_the_one_with_fewer_overrides():
  plain, more = estimate(1.0), estimate(0.9995, chunks=4)
  assert upcoming([more, plain], [], 10, trusted=True) is plain


def test_formulas_are_corrected_by_what_was_compiled():
  first, other, table = estimate(1.0), estimate(1.2, mesh=4), estimate(1.3, table="dots")
  # The mesh takes twice as long as its formula says: so do its other tables. Of the other mesh
  # the same is assumed, since no smaller ratio is known.
  tried = [Tried(first, 1, 2.0)]
  assert upcoming([first, table, other], tried, 10, trusted=False) is other
  # The other one's formula was right: its tables come next.
  tried.append(Tried(other, 1, 1.2))
  again = estimate(1.25, mesh=4, table="dots")
  assert upcoming([first, table, other, again], tried, 10, trusted=False) is again


def test_a_mesh_is_corrected_like_one_that_divides_the_rows_otherwise():
  tried = [Tried(estimate(1.0), 1, 0.8), Tried(estimate(1.1, mesh=4), 1, 1.1)]
  alike = Estimate(
    {"mesh.data": 2}, mesh={"data": 2, "fsdp": 2, "tensor": 2}, seconds=0.95, tokens=10
  )
  context = dataclasses.replace(alike, setting={"c": 2}, mesh={"fsdp": 4, "context": 2})
  # tensor=2 takes as long as its formula says: 0.95 times 0.95 is more than 0.8.
  assert upcoming([alike], tried, 10, trusted=True) is None
  assert upcoming([context], tried, 10, trusted=True) is context  # of context nothing is known


def test_a_setting_that_is_not_expected_to_be_faster_is_not_compiled():
  first, slower, near = estimate(1.0), estimate(1.1, table="full"), estimate(1.03, table="dots")
  tried = [Tried(first, 1, 1.0)]
  assert upcoming([first, slower], tried, 10, trusted=True) is None
  # 1.03 seconds by a formula may be 5 % less.
  assert upcoming([first, slower, near], tried, 10, trusted=True) is near
  # A variant of the same mesh and table takes about as long, by the formula that was right.
  variant = estimate(0.995, chunks=4)
  assert upcoming([first, variant], tried, 10, trusted=True) is None
  assert upcoming([first, variant], tried, 10, trusted=False) is variant


def test_memory_is_corrected_too():
  first, other = estimate(1.0, size=9), estimate(1.1, table="dots", size=8)
  tried = [Tried(first, 12, None)]  # it needs a third more than by formula, and does not fit
  assert upcoming([first, other], tried, 10, trusted=True) is None
  assert upcoming([first, other], tried, 11, trusted=True) is other


def divided(data, seconds, table="none", **more):
  mesh = {"data": data, "fsdp": 8 // data}
  setting = {"mesh.data": data, "table": table, **more}
  return Estimate(
    setting, mesh=mesh, bytes=data, seconds=seconds, tokens=10, rematerialization=table
  )


def test_the_best_table_is_tried_with_the_other_divisions_of_the_rows():
  ran = [Tried(divided(1, 1.0), 1, 3.0), Tried(divided(1, 1.1, "dots"), 1, 2.0)]
  two, four, eight = divided(2, 1.15, "dots"), divided(4, 1.2, "dots"), divided(8, 1.3, "dots")
  others = [
    divided(2, 0.9),
    estimate(0.8, mesh=4, table="dots"),
    divided(2, 1.14, "dots", chunks=2),
  ]
  every = [*others[:2], two, four, eight]
  assert divided_otherwise(every, ran, 10) is two
  assert divided_otherwise([*every, others[2]], ran, 10) is others[2]  # faster by formula
  ran.append(Tried(two, 2, 2.5))
  assert divided_otherwise([*every, others[2]], ran, 10) is four  # no variant of what was tried
  assert divided_otherwise(every, ran, 3) is None  # it would not fit
  ran.append(Tried(four, 4, 2.5))
  assert divided_otherwise(every, ran, 10) is None  # the last one is slower by formula, too
  assert divided_otherwise(every, [], 10) is None


def test_what_single_runs_do_not_tell_apart_is_run_again():
  def tried(*seconds):
    return [Tried(divided(8, 1.0, str(n)), 1, one) for n, one in enumerate(seconds)]

  def again(*seconds):
    return [one.seconds for one in finalists(tried(*seconds))]

  assert again(2.0, 1.0, 3.0, None, 4.0) == [1.0, 2.0, 3.0]  # at least three
  assert again(1.0, 1.05, 1.09, 1.11, 1.02) == [1.0, 1.02, 1.05, 1.09]
  assert len(again(*[1.0] * 9)) == 6
  assert again(None) == []


def test_the_best_are_compared_per_token():
  one, double = estimate(1.0), Estimate({"b": 20}, seconds=1.5, tokens=20)
  failed = Tried(estimate(0.1, table="dots"), 0, None, "failed")
  assert best([Tried(one, 1, 1.0), failed, Tried(double, 1, 1.5)]) == [
    Tried(double, 1, 1.5),
    Tried(one, 1, 1.0),
  ]


def test_the_front_has_no_point_that_another_is_below_in_both():
  points = [(5.0, 1.0), (3.0, 2.0), (4.0, 2.5), (1.0, 9.0), (1.0, 8.0), (6.0, 1.0)]
  assert [points[i] for i in pareto_front(points)] == [(1.0, 8.0), (3.0, 2.0), (5.0, 1.0)]


def test_prices():
  assert prices(["v5p=4.2", "v6e=2.7"], 0.0, ["v5p", "v6e"]) == {"v5p": 4.2, "v6e": 2.7}
  assert prices(["2"], 0.0, ["v5p", "v6e"]) == {"v5p": 2.0, "v6e": 2.0}
  assert prices(["v5p=4.2"], 1.5, ["v5p", "v6e"]) == {"v5p": 4.2, "v6e": 1.5}
  assert prices([], 0.0, ["v5p"]) == {}


@pytest.mark.parametrize("text", ["v5p=", "v5p=-1", "0", "v5p=nan", "x", "v5p=inf"])
def test_what_is_no_price_is_refused(text):
  with pytest.raises(ValueError, match=r"--price=.*above 0, such as v5p=4\.2"):
    prices([text], 0.0, ["v5p"])


def test_a_price_of_another_chip_is_refused():
  with pytest.raises(ValueError, match="no topology has 'v4'; searched are v5p"):
    prices(["v4=3"], 0.0, ["v5p"])
