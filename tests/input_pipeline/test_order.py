"""The order of rows, of a source and of several."""

import numpy as np
import pytest

from input_pipeline.mixture import PERIOD, Interleaving, MixtureOrder, rounded, row_shares
from input_pipeline.order import EpochOrder
from input_pipeline.position import Position
from input_pipeline.source import Part

# ------------------------------ mixtures ------------------------------


def shares_of(random, count):
  """Returns random shares, some of them tiny."""
  drawn = random.dirichlet(np.full(count, random.choice([0.1, 0.5, 3.0])))
  return (np.maximum(drawn, 1e-9) / np.maximum(drawn, 1e-9).sum()).tolist()


def counted(sources, count):
  """Returns how many of the first 1, 2, ... rows come from each source, [rows, k]."""
  return np.cumsum(sources[:, None] == np.arange(count), axis=0)


@pytest.mark.parametrize("seed", range(5))
def test_each_source_has_its_share_to_within_one_row_at_every_row(seed):
  random = np.random.default_rng(seed)
  count = int(random.integers(1, 12))
  shares = np.array(shares_of(random, count))
  order = Interleaving(shares.tolist())
  counts_NK = counted(order.sources(0, 10_000), count)
  exact_NK = np.arange(1, 10_001)[:, None] * shares
  assert np.abs(counts_NK - exact_NK).max() < 1
  # Tijdeman's bound, of the shares as they are rounded.
  exact_NK = np.arange(1, 10_001)[:, None] * (np.array(order.quotas) / PERIOD)
  assert np.abs(counts_NK - exact_NK).max() <= 1 - 1 / max(2, 2 * count - 2) + 1e-9
  for index in (0, 1, 4095, 4096, 4097, 9999):
    assert order.counts(index).tolist() == ([0] * count, counts_NK[index - 1].tolist())[index > 0]


def test_the_order_begins_again_after_a_period(monkeypatch):
  monkeypatch.setattr("input_pipeline.mixture.PERIOD", 8192)
  order = Interleaving([0.7, 0.2, 0.1])
  assert order.counts(8192).tolist() == list(order.quotas)
  assert (
    order.counts(3 * 8192 + 5).tolist() == (3 * np.array(order.quotas) + order.counts(5)).tolist()
  )
  around = order.sources(8190, 8196)
  assert around.tolist() == [*order.sources(8190, 8192), *order.sources(0, 4)]


def test_a_share_above_0_is_sampled_and_one_of_0_never():
  assert rounded([1 - 1e-12, 1e-12, 0.0]) == (PERIOD - 1, 1, 0)
  assert sum(rounded([1 / 3] * 3)) == PERIOD
  sources = Interleaving([0.999, 0.001, 0.0]).sources(0, 4096)
  assert set(sources.tolist()) == {0, 1}


def test_weights_count_tokens_and_not_rows():
  parts = [Part("full", 100, 100 * 512), Part("short", 50, 50 * 128)]
  shares = row_shares(parts, {"full": 1.0, "short": 3.0})
  tokens = [512 * shares[0], 128 * shares[1]]
  assert tokens[1] / tokens[0] == pytest.approx(3.0)
  assert row_shares(parts, {"full": 2.0}) == [1.0, 0.0]


def test_stages_change_the_weights_at_a_row_and_no_row_is_skipped_or_repeated():
  parts = [Part("a", 1000, 1000), Part("b", 1000, 1000), Part("c", 1000, 1000)]
  stages = [(0, {"a": 1.0}), (100, {"a": 1.0, "b": 3.0}), (500, {"c": 1.0, "b": 1.0})]
  order, position = MixtureOrder(parts, stages, 0, shuffle=False), Position.start(1)
  ids = order.ids(0, 900, position)
  sources, numbers = np.divmod(ids, 1000)
  assert np.bincount(sources[:100], minlength=3).tolist() == [100, 0, 0]
  assert np.bincount(sources[100:500], minlength=3).tolist() == [100, 300, 0]
  assert np.bincount(sources[500:], minlength=3).tolist() == [0, 200, 200]
  for source in range(3):
    mine = numbers[sources == source]
    assert mine.tolist() == list(range(len(mine)))
  for first, stop in ((0, 1), (99, 101), (450, 620), (899, 900)):
    assert order.ids(first, stop, position).tolist() == ids[first:stop].tolist()
  assert order.counts(500, position) == {"a": 200, "b": 300, "c": 0}


# ------------------------------ epochs ------------------------------

PARTS = (Part("web", 30, 30 * 8), Part("code", 12, 12 * 8), Part("books", 7, 7 * 8))
EVEN = ((0, {"web": 0.5, "code": 0.3, "books": 0.2}),)
OFFSETS = {"web": 0, "code": 30, "books": 42}
START = Position.start(4)


def of(name, ids):
  """Returns the rows of one source, numbered within it."""
  rows = dict(zip(("web", "code", "books"), (30, 12, 7), strict=True))[name]
  first = OFFSETS[name]
  return [int(i) - first for i in ids if first <= i < first + rows]


def test_an_epoch_takes_each_row_once_in_an_order_of_its_own():
  order = EpochOrder(20, 3)
  first, second = order.ids(0, 20), order.ids(20, 40)
  assert sorted(first) == sorted(second) == list(range(20))
  assert first.tolist() != second.tolist() != list(range(20))
  assert order.ids(15, 25).tolist() == [*first[15:], *second[:5]]
  assert EpochOrder(20, 3, shuffle=False).ids(18, 23).tolist() == [18, 19, 0, 1, 2]
  assert order.ids(5, 5).tolist() == []


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_source_of_a_mixture_goes_through_its_own_epochs(shuffle):
  order = MixtureOrder(PARTS, EVEN, 0, shuffle=shuffle)
  ids = order.ids(0, 200, START)
  assert order.counts(200, START) == {"web": 100, "code": 60, "books": 40}
  for name, rows in (("web", 30), ("code", 12), ("books", 7)):
    mine = of(name, ids)
    for epoch in range(len(mine) // rows):
      assert sorted(mine[epoch * rows : (epoch + 1) * rows]) == list(range(rows))
    assert (mine[:rows] == list(range(rows))) == (not shuffle)
  parts = [order.ids(first, first + 4, START) for first in range(0, 200, 4)]
  assert np.concatenate(parts).tolist() == ids.tolist()


def test_another_source_beside_it_does_not_change_the_order_of_a_source():
  ids = MixtureOrder(PARTS, EVEN, 0).ids(0, 100, START)
  alone = MixtureOrder(PARTS[:1], ((0, {"web": 1.0}),), 0).ids(0, 30, START)
  assert of("web", ids)[:30] == alone.tolist()
  other_seed = MixtureOrder(PARTS, EVEN, 1).ids(0, 100, START)
  assert of("web", other_seed)[:30] != alone.tolist()


def test_a_stage_begins_with_its_step_whatever_the_batch_size_was():
  stages = ((0, {"web": 1.0}), (5, {"code": 1.0}))
  order = MixtureOrder(PARTS, stages, 0)
  assert order.counts(40, START) == {"web": 20, "code": 20, "books": 0}
  # From step 3 on, batches of 10: step 5 begins with row 12 + 2 * 10.
  resumed = START.resumed(3, 10)
  assert order.counts(40, resumed) == {"web": 32, "code": 8, "books": 0}
  # What was taken before stays what it was.
  assert order.ids(0, 12, resumed).tolist() == order.ids(0, 12, START).tolist()
  # Rows that are skipped belong to the stage in which they would have been taken.
  skipping = START.skipping([(4, 8)])
  assert order.counts(40, skipping) == {"web": 24, "code": 16, "books": 0}
