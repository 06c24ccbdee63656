"""Short runs: the time of real steps, and what is not run."""

import types

import jax
import numpy as np
import pytest

from planning import aot, search
from tests.helpers.jobs import make_job


@pytest.fixture(scope="module")
def job():
  return make_job("dp8", "mlp")


def test_a_step_takes_as_long_as_it_takes(job, monkeypatch):
  """Of steps of which one took no time to speak of the fastest counts; the first one does not."""
  real, taken = aot.compile_to_run, []
  clock = types.SimpleNamespace(now=0.0)
  clock.perf_counter = lambda: clock.now
  monkeypatch.setattr(search, "time", clock)

  def slow(one):
    program, step = real(one)

    def run(*arguments):
      taken.append(arguments)
      clock.now += 0 if len(taken) == 1 else 0.05 if len(taken) == 4 else 0.2
      return step(*arguments)

    return program, run

  monkeypatch.setattr(aot, "compile_to_run", slow)
  said = []
  [run] = search.measure([job], 1e9, progress=said.append)
  assert run.seconds == pytest.approx(0.05)
  assert len(taken) >= 1 + search.STEPS
  assert run.bytes == real(job)[0].peak_bytes > 0
  assert (run.failed, said) == ("", [0])


def test_what_needs_more_than_the_limit_is_not_run(job, monkeypatch):
  monkeypatch.setattr(search, "stepper", lambda *_: pytest.fail("run"))
  [run] = search.measure([job], 1.0, rounds=2)
  assert run.bytes > 1
  assert (run.seconds, run.failed) == (None, "")


def test_a_step_that_fails_is_reported_and_the_others_go_on(job, monkeypatch):
  jobs, seconds = [job, make_job("fsdp8", "mlp")], iter([3.0, 2.0])

  def fastest(one):
    if one is job:
      raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore")
    return next(seconds)

  monkeypatch.setattr(search, "stepper", lambda one, step: one)
  monkeypatch.setattr(search, "_fastest", fastest)
  first, second = search.measure(jobs, 1e9, rounds=2)
  assert first.failed == "RESOURCE_EXHAUSTED: out of memory"
  assert first.seconds is None
  assert second.seconds == 2.0  # of both rounds the faster one


def test_only_what_may_be_the_fastest_is_run_again(job, monkeypatch):
  """After two rounds, and until one is left."""
  jobs = [make_job("dp8", "mlp"), make_job("fsdp8", "mlp"), make_job("dp4_tp2", "mlp")]
  times = {id(jobs[0]): [9.0, 2.0, 2.0], id(jobs[1]): [2.5, 2.05, 1.5], id(jobs[2]): [2.2, 2.2]}
  monkeypatch.setattr(search.aot, "compile_to_run", lambda _: (_Program(), lambda: None))
  monkeypatch.setattr(search, "stepper", lambda one, step: one)
  monkeypatch.setattr(search, "_fastest", lambda one: times[id(one)].pop(0))
  said = []
  runs = search.measure(jobs, 1e9, rounds=9, progress=said.append)
  assert said == [0, 1, 2, 0, 1, 2, 0, 1]
  assert [run.seconds for run in runs] == [2.0, 1.5, 2.2]


class _Program:
  peak_bytes = 1


def test_batches_are_valid():
  tokens, classes = (
    search.example(job.batch, job.config.model)
    for job in (make_job("dp8", "lm"), make_job("dp8", "mlp"))
  )
  assert tokens["tokens"].max() < 61  # the vocabulary
  assert (tokens["weights"] == 1).all()
  assert (tokens["segments"] == 0).all()
  assert classes["targets"].max() < 10
  assert np.abs(classes["inputs"]).max() > 0.1
