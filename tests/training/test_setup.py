"""The verdict over a whole job, and what a prepared job knows."""

import contextlib
import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from configs.schema import finalize
from partitioning.constraints import activation_layout, constrain
from partitioning.rules import LayoutError, named_leaves
from reports import layout_text
from runtime.devices import Devices
from tests.helpers.jobs import first_state, make_job
from training import setup as jobs


def refusal(recipe, /, **overrides):
  """Returns the message with which the layout of a small job is refused."""
  with pytest.raises(LayoutError) as error:
    make_job("single", recipe, **overrides)
  return str(error.value)


# ---- Layouts that are refused ----


def test_everything_that_is_wrong_comes_in_one_message():
  message = refusal(
    "lm",
    **{
      "mesh.tensor": 4,
      "mesh.context": 2,
      "model.heads": 6,
      "model.kv_heads": 3,
      "model.feedforward_size": 54,
      "data.sequence_length": 11,
      "partitioning.overrides": (("layers/mlp/upp/kernel", (None, "fsdp")),),
    },
  )
  for part in (
    "query/kernel: dim N (heads) = 6",
    "up/kernel: dim F (feedforward) = 54",
    "batch/tokens: dim T (sequence) = 11",
    "partitioning.overrides: 'layers/mlp/upp/kernel' is neither a parameter",
  ):
    assert part in message


# ---- Memory ----


def test_a_state_larger_than_the_limit_names_both_sizes():
  limit = 3 / 2**20  # 3 KiB
  for strategy in ("dp8", "fsdp8"):
    with pytest.raises(ValueError, match="parameters and optimizer state need") as error:
      make_job(strategy, "mlp_tutorial", memory_limit_gib=limit)
    # Simulated devices share one memory: 8 copies, or one in pieces and what is whole.
    whole = 56 + 10 + 1  # elements of the two biases off fsdp, and the count
    split = 13 * 40 + 40 + 40 * 56 + 56 * 40 + 40 + 40 * 10
    needed = 4 * (8 * whole + split * (8 if strategy == "dp8" else 1))
    message = str(error.value)
    assert f"need {needed / 1024:.1f} KiB on all simulated devices together" in message
    assert "memory_limit_gib=2.86102e-06 allows 3.0 KiB" in message
    assert "make the model smaller, or split it over more devices (mesh.fsdp, mesh." in message


def test_a_state_larger_than_the_machine_names_the_machine(monkeypatch):
  monkeypatch.setattr(jobs, "memory_bytes", lambda devices: 2048)
  with pytest.raises(ValueError, match=r"need 21\.\d KiB on all .* and this machine has 2\.0 KiB"):
    make_job("single", "mlp_tutorial")


def test_a_real_device_holds_its_own_part_only():
  config = finalize.finalize(make_job("fsdp8", "mlp_tutorial").config, "gpu")
  devices = Devices("gpu", False, {**config.mesh})
  part = 4 * (56 + 10 + 1 + (13 * 40 + 40 + 40 * 56 + 56 * 40 + 40 + 40 * 10) // 8)
  for limit, fits in ((part, True), (part - 1, False)):
    with config.unlocked():
      config.memory_limit_gib = limit / 2**30
    if fits:
      assert jobs.prepare(config, devices).devices is devices
    else:
      with pytest.raises(ValueError, match=r"need 2\.9 KiB per device, and memory_limit_gib="):
        jobs.prepare(config, devices)


# ---- The activations of the verdict are those of the compiled program ----


@pytest.mark.parametrize(
  ("strategy", "given"),
  [
    ("dp2_fsdp2_tp2", {"partitioning.sequence_parallel": True}),
    ("single", {"mesh.context": 2, "mesh.tensor": 2, "model.context_attention": "ring"}),
    (
      "dp2_fsdp2_tp2",
      {"training.gradient_accumulation_steps": 2, "model.separate_documents": True},
    ),
  ],
)
def test_the_verdict_lists_what_the_train_step_is_compiled_with(strategy, given, monkeypatch):
  layouts = []

  @contextlib.contextmanager
  def kept(*arguments, **more):
    with activation_layout(*arguments, **more) as layout:
      layouts.append(layout)
      yield layout

  monkeypatch.setattr(jobs, "activation_layout", kept)
  # What comes after the trace has no say.
  nothing = types.SimpleNamespace(compile=lambda **_: None)
  monkeypatch.setattr(jax.stages.Traced, "lower", lambda *_, **__: nothing)
  job = make_job(strategy, "lm", **given)
  judged = job.activations.seen
  job.compile_train_step()
  [compiled] = [one for one in layouts if one.seen]
  assert not compiled.checking
  assert compiled.seen == judged


def test_a_function_is_compiled_under_the_activation_table_that_is_given():
  job = make_job("dp4_tp2", "mlp")
  x_BF = jax.ShapeDtypeStruct((16, 56), jnp.float32)

  def forward(x_BF):
    return constrain(x_BF, "BF")

  whole = {**job.config.partitioning.activations, "feedforward": ()}
  tables = (None, whole, None)
  compiled = [job.compile(forward, x_BF, activations=table).function for table in tables]
  shards = [one.output_shardings.shard_shape(x_BF.shape) for one in compiled]
  assert shards == [(4, 28), (4, 56), (4, 28)]


# ---- What a job knows ----


def test_key_value_heads_are_replicated_where_tensor_does_not_divide_them():
  job = make_job("tp8", "lm")
  kernel = job.placements["parameters"]["layers/attention/key/kernel"]
  assert tuple(kernel.spec) == (None, None, None, None)
  assert kernel.notes == ("kv_heads=4 is replicated: tensor=8 does not divide it",)
  moment = job.placements["optimizer"]["optimizer/0/mu/layers/attention/key/kernel"]
  assert moment.spec == kernel.spec
  specs = {c.letters: tuple(c.spec) for c in job.activations.seen}
  assert specs["BSKH"] == (None, None, None, None)
  assert specs["BSNH"] == (None, None, "tensor", None)  # repeated, they split
  assert "note: layers/attention/key/kernel: kv_heads=4 is replicated" in layout_text.job_text(job)
  fits = make_job("dp4_tp2", "lm").placements["parameters"]["layers/attention/key/kernel"]
  assert (tuple(fits.spec), fits.notes) == ((None, None, "tensor", None), ())


def test_an_override_reaches_the_arrays():
  overrides = (("layer_1/kernel", (None, "tensor")), ("optimizer/0/mu/layer_1/kernel", ()))
  job = make_job("dp4_tp2", "mlp", **{"partitioning.overrides": overrides})
  state = job.initial_state()
  assert state.params["layer_1"]["kernel"].addressable_shards[0].data.shape == (13, 20)
  moments = named_leaves(state.optimizer)
  assert moments["0/mu/layer_1/kernel"].addressable_shards[0].data.shape == (13, 40)


def test_every_leaf_of_the_state_is_compared_with_its_spec():
  job = make_job("dp2_fsdp2_tp2", "mlp")
  state = first_state(job)
  job.check_placed(state)
  moved = NamedSharding(job.mesh, PartitionSpec("tensor"))
  params = {**state.params, "layer_1": dict(state.params["layer_1"])}
  params["layer_1"]["bias"] = jax.device_put(jnp.zeros(40), moved)
  with pytest.raises(
    LayoutError, match=r"layer_1/bias: is sharded as .*tensor.*, its spec says .*fsdp"
  ):
    job.check_placed(dataclasses.replace(state, params=params))
  moments = jax.tree.map(lambda x: np.asarray(x), state.optimizer)
  moments = jax.device_put(moments, NamedSharding(job.mesh, PartitionSpec()))
  with pytest.raises(LayoutError, match="optimizer/0/nu/layer_2/kernel: is sharded as"):
    job.check_placed(dataclasses.replace(state, optimizer=moments))
