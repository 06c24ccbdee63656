"""Which experts two computations choose, and how far their choices are from others.

Sums in another order differ by rounding. Where the last chosen score and the first that is not are
closer than that, two correct programs may choose differently, and then nothing that follows is
equal: a comparison of them is inconclusive, not failed.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np

from models import activations, experts, model_spec
from models.experts import route, smallest_margin
from tests.helpers.jobs import host_batch, place
from training.setup import Job

# In units of the scores, which are between 0 and 1. Rounding of logits is a thousandth of it.
SMALLEST = {"float32": 1e-5, "float64": 1e-11}


class InconclusiveError(AssertionError):
  """A choice of experts was so close that rounding may change it."""


@contextlib.contextmanager
def margins() -> Iterator[list[float]]:
  """Yields a list of the smallest margin of each choice that programs make.

  Only of those that are compiled in the block: one number for each layer, step, and device.
  """
  found: list[float] = []

  def observed(logits, router, bias_E=None):
    margin = smallest_margin(logits, router, bias_E)
    jax.debug.callback(lambda x: found.append(float(x)), margin)
    return route(logits, router, bias_E)

  with mock.patch.object(experts, "route", observed):
    yield found
  jax.effects_barrier()


def assert_conclusive(found: list[float], dtype: str) -> None:
  """Raises InconclusiveError if a choice was closer than rounding allows."""
  assert found, "no choice of experts was observed"
  smallest, bound = min(found), SMALLEST[dtype]
  if not smallest >= bound:
    raise InconclusiveError(
      f"inconclusive: the smallest margin of {len(found)} choices of experts is {smallest:.1e}, "
      f"below {bound:.0e} for {dtype}; compare with another seed"
    )


def first_choices(job: Job, params: Any) -> tuple[np.ndarray, np.ndarray]:
  """Returns the experts [L, B, T, k] of the batch of a first step, and each layer's margin."""
  choice = experts.router_of(model_spec(job.config))

  def forward(params, batch):
    with activations.recording() as found:
      job.program.sums(params, batch)
    logits = found[f"{activations.STACKED}router"]
    bias = params["layers"]["experts"]["router"].get("correction")
    biases = [None] * len(logits) if bias is None else bias
    pairs = [*zip(logits, biases, strict=True)]
    return (
      [route(*(x, choice, b)).experts for x, b in pairs],
      [smallest_margin(x, choice, b) for x, b in pairs],
    )

  batch = place(job, host_batch(job))
  with job.tracing():
    return tuple(map(np.stack, jax.device_get(jax.jit(forward)(params, batch))))
