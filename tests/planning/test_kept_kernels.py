"""Gathered kernels that are kept for the backward pass: their bytes, and when that is advised."""

import dataclasses

import pytest
from ml_collections import ConfigDict

from planning import memory, suggestions
from planning.interconnect import Wire
from planning.step_facts import of_job
from planning.step_time import Sent
from tests.helpers.jobs import make_job
from tests.parity.expert_cases import WITH_DENSE

# Of the small decoder, the kernels of a layer: four of attention, three of the MLP.
SIZES = {"model.layers": 3, "training.compute_dtype": "float32"}


def elements(model):
  """Returns the numbers in the kernels of all layers."""
  heads = 2 * model.heads + 2 * model.kv_heads
  layer = model.model_size * (heads * model.head_size + 3 * model.feedforward_size)
  return model.layers * layer


@pytest.mark.parametrize(
  ("config", "overrides", "itemsize", "parts"),
  [
    ("fsdp8", {}, 4, 1),
    ("fsdp8", {"training.compute_dtype": "bfloat16"}, 2, 1),
    ("fsdp8", {"training.matmul_dtype": "int8"}, 1, 1),
    ("dp2_fsdp2_tp2", {}, 4, 2),
    ("dp8", {}, 4, 0),
  ],
)
def test_the_kernels_of_all_layers(config, overrides, itemsize, parts):
  job = make_job(config, "lm", **{**SIZES, **overrides})
  wanted = itemsize * elements(job.config.model) // parts if parts else 0
  assert memory.kept_kernel_bytes(of_job(job)) == wanted


def test_a_mixtures_dense_layers_are_layers_too():
  job = make_job("fsdp8", "lm", **{**WITH_DENSE, "training.compute_dtype": "float32"})
  model = job.config.model
  sparse = {**model, "layers": 0, "feedforward_size": 0}
  attention = elements(ConfigDict({**sparse, "layers": 3}))
  dense = 3 * model.model_size * model.feedforward_size
  experts = 2 * 8 * 3 * model.model_size * 24
  router = 2 * model.model_size * 8
  assert memory.kept_kernel_bytes(of_job(job)) == 4 * (attention + dense + experts + router)


@pytest.mark.long
def test_a_compiled_step_that_keeps_them_needs_as_much_more():
  jobs = [
    make_job(
      "fsdp8",
      "lm",
      **{**SIZES, "training.rematerialization": "full", "model.layers": 8},
      **{"partitioning.reshard_after_forward": again},
    )
    for again in (True, False)
  ]
  again, kept = (job.compile_train_step().function.memory_analysis() for job in jobs)
  wanted = memory.kept_kernel_bytes(of_job(jobs[1]))
  found = kept.temp_size_in_bytes - again.temp_size_in_bytes
  assert found == pytest.approx(wanted, rel=0.2)
  formulas = [memory.by_formula(of_job(job)) for job in jobs]
  assert memory.at_once(formulas[1]) - memory.at_once(formulas[0]) == wanted


def gather(seconds, source="transpose(jvp())/while/body/all_gather", **changes):
  """Returns a collective of the layers' backward pass that is waited for."""
  one = Sent(
    "all-gather", ("fsdp",), 2**20, 3, source, Wire("ICI", 1e9, frozenset()), seconds, seconds
  )
  return dataclasses.replace(one, **changes)


@pytest.mark.parametrize(
  ("sent", "said"),
  [
    ([gather(0.02), gather(0.01)], True),
    ([gather(0.004)], False),  # hardly a wait
    ([gather(0.03, "jvp()/while/body/all_gather")], False),  # of the forward pass
    ([gather(0.03, runs=1)], False),  # of the embedding
    ([gather(0.03, kind="reduce-scatter")], False),
    ([gather(0.03, axes=("tensor",))], False),
  ],
)
def test_what_is_waited_for_in_the_backward_pass_is_advised_against(sent, said):
  job = make_job("fsdp8", "lm", **SIZES)
  needed = memory.kept_kernel_bytes(of_job(job))
  text = suggestions.gather_once_advice(of_job(job), sent, 1.0, 2 * needed)
  assert bool(text) is said
  if said:
    assert text.startswith("for 30 ms of a step the backward pass waits for kernels")
    assert text.endswith("--config.partitioning.reshard_after_forward=False")
  assert suggestions.gather_once_advice(of_job(job), sent, 1.0, needed) == ""


def test_nothing_is_advised_where_they_are_kept_or_there_are_none():
  kept = make_job("fsdp8", "lm", **{"partitioning.reshard_after_forward": False})
  for job in (kept, make_job("fsdp8", "mlp"), make_job("dp8", "lm")):
    assert suggestions.gather_once_advice(of_job(job), [gather(0.5)], 1.0, 1e12) == ""
