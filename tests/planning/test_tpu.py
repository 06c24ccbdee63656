"""Plans by the real compiler for TPUs, for slices that are not here; `make test-plan` runs them."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from configs import fsdp8
from partitioning.mesh import make_mesh
from partitioning.mesh_sizes import AXES
from partitioning.parallel.collective_matmul import through
from planning import aot, interconnect, step_time
from planning.topology import parse
from runtime import hlo
from runtime.chips import Rates
from runtime.collectives import collectives
from training import compiler_options

pytestmark = pytest.mark.plan
FRESH = "--config.planning.cache_dir="


def plan(main, workdir, *arguments):
  """Returns (exit code, the report, plan.json)."""
  code, out, err = main("plan", *arguments, FRESH, f"--workdir={workdir}")
  assert err == "", err
  return code, out, json.loads((workdir / "plan.json").read_text())


def adds_up(found):
  """The arrays at the peak are the peak, to the byte."""
  buffers = found["buffers"]["at_the_peak"]
  assert sum(one["bytes"] for one in buffers) == found["peak_bytes_per_device"]
  padded = sum(b["bytes"] for b in buffers if b["part"] in ("parameters", "optimizer state"))
  exact = found["memory"]["parameters"] + found["memory"]["optimizer state"]
  assert exact <= padded < 1.02 * exact


def test_a_small_decoder_on_eight_chips(main, tmp_path):
  code, out, found = plan(main, tmp_path, "--config=configs/dp4_tp2.py", "--topology=v5e:4x2")
  assert code == 0, out
  assert out.startswith("fits 8 devices of v5e:4x2: ")
  assert "by the compiler" in out
  assert found["compiled"]
  # Most of so small a program's activations fit into on-chip memory, which is not counted.
  held = found["memory"]["parameters"] + found["memory"]["optimizer state"]
  assert held < found["peak_bytes_per_device"] < 2 * found["memory_at_once"]
  sent = {(one["axis"], one["kind"]) for one in found["collectives"]}
  assert {("data", "all-reduce"), ("tensor", "all-reduce")} <= sent
  # Three layers reduce their activations over tensor, forward and backward: twice each.
  layers = [one for one in found["collectives"] if one["axis"] == "tensor" and one["count"] == 3]
  assert sum(one["count"] for one in layers) >= 12
  assert all(one["network"] == "ICI" for one in found["collectives"])
  assert any("models/" in one["source"] or "partitioning/" in one["source"] for one in layers)
  for one in found["collectives"]:
    assert 0 <= one["exposed_seconds"] <= one["seconds"] * 1.001
  # The program's tables of stack frames give the loops over layers, and the lines behind waits.
  for layer in found["timeline"]["layers"]:
    assert layer["line"].startswith("models/layer_stack.py:")
    assert layer["runs"] * layer["layers"] + layer["outside"] == 3
    assert "tensor over ICI" in layer["transfers"]
  assert {layer["title"] for layer in found["timeline"]["layers"]} == {"forward", "backward"}
  assert all(gap["line"] for gap in found["timeline"]["gaps"] if gap["what"].startswith("all-"))
  assert sum(found["step_parts"].values()) == pytest.approx(found["step_seconds"]["expected"])


def test_a_program_that_is_left_without_machine_code_is_the_compiler_s(tmp_path):
  """Its peak is the compiler's own, to the byte; its collectives and its clock's time, too."""
  config = fsdp8.get_config("model=gpt2_124m")
  config.data.global_batch_size = 8
  config.compiler_options = f"xla_dump_to={tmp_path},xla_dump_hlo_as_text=true"
  topology = parse("v5e:4x2")
  job = aot.prepare(config, topology, ())
  early = aot.compile_step(job, tmp_path)
  whole = aot.compile_step(job)
  assert early.at_peak is not None
  assert whole.at_peak is None
  assert whole.peak_bytes == early.peak_bytes
  assert whole.host_bytes == early.host_bytes == 0
  where = aot.places(job.mesh, topology)
  whole, early = (
    step_time.times(
      hlo.parse(one.text), collectives(one.text, job.mesh), where, topology.chip, Rates()
    )
    for one in (whole, early)
  )
  assert (early.sent, early.parts) == (whole.sent, whole.parts)


def test_sequence_parallel_regions_have_true_reduce_scatters(main, tmp_path):
  arguments = ["--config=configs/dp4_tp2.py", "--topology=v5e:4x2"]
  code, out, found = plan(
    main,
    tmp_path,
    *arguments,
    "--config.partitioning.sequence_parallel=true",
    "--config.partitioning.collective_matmul=false",
  )
  assert code == 0, out
  count = {"reduce-scatter": 0, "all-gather": 0}
  for one in found["collectives"]:
    if one["axis"] == "tensor" and one["kind"] in count:
      count[one["kind"]] += one["count"]
  # docs/budgets.md: 4 and 6 of each of the three layers, and 2 of the embedding and the logits.
  assert count == {"reduce-scatter": 4 * 3 + 2, "all-gather": 6 * 3 + 2}


def test_collective_matmuls_are_permutes_of_parts_of_the_sequence(main, tmp_path):
  code, out, found = plan(main, tmp_path, "--config=configs/dp4_tp2.py", "--topology=v5e:4x2")
  assert code == 0, out
  assert found["chosen"]["partitioning.collective_matmul"] is True
  sent = [one for one in found["collectives"] if one["axis"] == "tensor"]
  count = {}
  for one in sent:
    count[one["kind"]] = count.get(one["kind"], 0) + one["count"]
  # docs/budgets.md: 10 of each of the three layers and 2 of the logits; the embedding's two.
  assert count["collective-permute"] == 10 * 3 + 2
  assert (count["reduce-scatter"], count["all-gather"]) == (1, 1)


def test_the_compilers_refusal_for_want_of_memory_is_a_verdict(main, tmp_path):
  code, out, found = plan(
    main,
    tmp_path,
    "--config=configs/fsdp8.py:model=llama3_8b",
    "--topology=v5e:2x4",
    "--config.data.global_batch_size=8",
    "--config.data.sequence_length=2048",
    "--config.training.rematerialization=full",
  )
  assert code == 3, out
  assert out.startswith("does not fit 8 devices of v5e:2x4: ")
  assert found["compiled"]
  assert found["peak_bytes_per_device"] > found["hbm_bytes_per_device"]
  # What was too large is named: the compiler's message counts what it would allocate.
  at_the_peak = found["buffers"]["peak_bytes"] + found["buffers"]["gap_bytes"]
  assert at_the_peak == pytest.approx(found["peak_bytes_per_device"], rel=0.01)
  assert found["collectives"] == []


def test_two_slices_speak_over_the_slow_network(main, tmp_path):
  code, out, found = plan(
    main,
    tmp_path,
    "--config=configs/fsdp8.py",
    "--topology=v5e:2x2",
    "--config.mesh.fsdp=4",
    "--config.mesh_dcn.data=2",
  )
  assert code == 0, out
  assert found["devices"] == 8
  over = {(one["axis"], one["network"]) for one in found["collectives"]}
  assert ("data", "DCN") in over
  assert ("fsdp", "ICI") in over


NAMES = ("query", "key", "value", "gate", "up", "layer_input")


def of_layers(main, workdir, choice, *more):
  """Returns plan.json of a decoder whose layers save or offload some activations."""
  text = ",".join(f"{name}={choice}" for name in NAMES)
  code, out, found = plan(
    main,
    workdir / choice,
    *("--config=configs/dp4_tp2.py", "--topology=v5e:4x2", "--config.model.layers=12"),
    *("--config.data.global_batch_size=1024", f"--config.training.rematerialization={text}"),
    *more,
  )
  assert code == 0, out
  return found


def test_offloading_lowers_the_peak_and_is_asynchronous(main, tmp_path):
  saving, offloading = (of_layers(main, tmp_path, choice) for choice in ("save", "offload"))
  held = offloading["host_memory"]["activations"]
  moved = {one["direction"]: one for one in offloading["host_traffic"]}
  assert {direction: one["bytes"] for direction, one in moved.items()} == {
    "to host": held,
    "from host": held,
  }
  assert all(one["exposed_seconds"] < one["seconds"] for one in moved.values())
  assert saving["host_traffic"] == []
  assert saving["host_memory"] == {}
  fallen = saving["peak_bytes_per_device"] - offloading["peak_bytes_per_device"]
  assert fallen > 0.5 * held  # a layer or two are on the device while they are moved


def test_optimizer_state_on_the_host_leaves_the_device(main, tmp_path):
  host = of_layers(main, tmp_path, "save", "--config.optimizer.state_memory=host")
  held = host["host_memory"]["optimizer state"]
  # Rows of less than a tile are padded.
  assert all(held <= one["bytes"] < 1.1 * held for one in host["host_traffic"])
  assert len(host["host_traffic"]) == 2
  device = of_layers(main, tmp_path / "device", "save")
  fallen = device["peak_bytes_per_device"] - host["peak_bytes_per_device"]
  assert fallen > 0.5 * held


def test_a_shape_that_the_compiler_does_not_know_is_refused(main, tmp_path):
  code, _, err = main(
    "plan", "--config=configs/dp8.py", "--topology=v5e:3x5", f"--workdir={tmp_path}"
  )
  assert code == 2
  assert err.startswith("refused: --topology=v5e:3x5: the compiler knows no such slice")


def test_microbatches_are_added_up_before_they_are_reduced_over_data(main, tmp_path):
  arguments = ["--config=configs/single.py", "--topology=v5e:2x2", "--config.mesh.data=2"]
  arguments += ["--config.mesh.fsdp=2", "--config.training.gradient_accumulation_steps=4"]
  code, out, found = plan(main, tmp_path, *arguments)
  assert code == 0, out
  assert "gradients of 4 microbatches: reduced once per step over data" in out
  sent = sum(
    one["count"] * one["bytes"]
    for one in found["collectives"]
    if (one["axis"], one["kind"]) == ("data", "all-reduce")
  )
  # The shards of all gradients, in float32: a half of the parameters, which are as large.
  assert sent == pytest.approx(found["memory"]["parameters"], rel=0.01)


# ---- Defaults: presets alone, docs/performance.md ----

LLAMA = "--config=configs/fsdp8.py:model=llama3_8b"


def kinds(found):
  """Returns kind -> GB of all collectives of a step."""
  sent = {}
  for one in found["collectives"]:
    sent[one["kind"]] = sent.get(one["kind"], 0) + one["bytes"] / 1e9
  return sent


def test_llama_3_8b_on_64_chips_of_v5p_needs_no_expert(main, tmp_path):
  code, out, found = plan(
    main,
    tmp_path,
    *(LLAMA, "--topology=v5p:4x4x4", "--config.mesh.fsdp=64", "--config.data.global_batch_size=64"),
  )
  assert code == 0, out
  assert found["chosen"]["training.loss_chunks"] == 8
  assert found["chosen"]["training.attention_kernel"] == "splash"
  assert "chosen: training.loss_chunks=8 (250.5 MiB of logits per device" in out
  assert "chosen: compiler_options=xla_enable_async_all_gather=true," in out
  assert "left out" not in out
  assert found["peak_bytes_per_device"] < 6.5e9
  adds_up(found)
  at_the_peak = found["buffers"]["at_the_peak"]
  [saved] = [one for one in at_the_peak if one["array"] == "bf16[32,1,8192,4096]"]
  assert saved["part"] == "saved for the backward pass"
  assert saved["bytes"] == 32 * 8192 * 4096 * 2
  assert saved["made"].startswith("models/layer_stack.py:")
  # On the SparseCores: true gathers and scatters, beside the matmuls.
  assert kinds(found)["reduce-scatter"] > 15
  assert kinds(found)["all-reduce"] < 0.01
  exposed = sum(one["exposed_seconds"] for one in found["collectives"])
  assert exposed < 0.02 * found["step_seconds"]["expected"]


@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache entry")
def test_the_ring_of_an_mlp_waits_for_hardly_any_permute():
  # The MLP of Llama 3 8B, rows of 8192 tokens. With the permutes in the order that XLA chooses by
  # itself, 16 % of the time were exposed.
  topology = parse("v6e:4x4")
  devices = aot.start(topology, 1, ())
  mesh = make_mesh({**dict.fromkeys(AXES, 1), "fsdp": 4, "tensor": 4}, devices)

  def mlp(x, gate, up, down):
    gates, values = (jnp.einsum("btd,fd->btf", x, kernel) for kernel in (gate, up))
    return jnp.einsum("btf,fd->btd", jax.nn.silu(gates) * values, down)

  rows, kernel = PartitionSpec("fsdp", "tensor"), PartitionSpec("tensor")
  ring = jax.shard_map(
    lambda *given: through(mlp, ("tensor",), *given),
    mesh=mesh,
    in_specs=(rows, kernel, kernel, kernel),
    out_specs=rows,
    check_vma=False,
  )
  given = [
    jax.ShapeDtypeStruct(shape, "bfloat16", sharding=jax.sharding.NamedSharding(mesh, spec))
    for shape, spec in [((16, 8192, 4096), rows), *[((14336, 4096), kernel)] * 3]
  ]
  options = compiler_options.of_device(devices[0])
  text = jax.jit(ring).lower(*given).compile(compiler_options=options).as_text()
  places = interconnect.Places(
    topology,
    np.array([device.coords[:2] for device in mesh.devices.flat]),
    np.zeros(mesh.size, int),
  )
  found = step_time.times(hlo.parse(text), collectives(text, mesh), places, topology.chip, Rates())
  # Twelve halves of a device's tokens: six of them there, six of their sums back.
  assert sum(one.runs for one in found.sent) == 12
  assert found.communication > 0.5 * found.step
  assert found.exposed < 0.05 * found.step


@pytest.mark.long
def test_llama_3_8b_with_tensor_parallelism_on_v6e_needs_no_expert(main, tmp_path):
  code, out, found = plan(
    main,
    tmp_path,
    *(LLAMA, "--topology=v6e:16x16", "--config.mesh.fsdp=64", "--config.mesh.tensor=4"),
    "--config.data.global_batch_size=256",
  )
  assert code == 0, out
  assert found["chosen"]["training.loss_chunks"] == 8
  assert found["chosen"]["partitioning.sequence_parallel"] is True
  assert found["chosen"]["partitioning.collective_matmul"] is True
  assert found["peak_bytes_per_device"] < 5.6e9
  adds_up(found)
  assert kinds(found)["all-reduce"] < 0.1
  # Of MaxText's program: 50.74 GB of gathers, 30.32 of all-reduces, which send twice that, and
  # 35.20 of permutes.
  sent = kinds(found)
  assert sum(sent.values()) < 50.74 + 2 * 30.32 + 35.20
  exposed = sum(one["exposed_seconds"] for one in found["collectives"])
  assert found["step_seconds"]["expected"] < 1.27
  assert exposed < 0.15 * found["step_seconds"]["expected"]


@pytest.mark.long
def test_llama_3_8b_on_v5e_scatters_the_gradients_of_all_kernels(main, tmp_path):
  arguments = (LLAMA, "--topology=v5e:16x16", "--config.mesh.fsdp=256")
  code, out, found = plan(main, tmp_path, *arguments, "--config.data.global_batch_size=256")
  assert code == 0, out
  # 16 of 128 numbers of a row are a chip's: 10.7 GB of all-reduces where arrays lie by rows.
  assert kinds(found)["all-reduce"] < 0.1
  assert kinds(found)["reduce-scatter"] < 18
  adds_up(found)
  assert found["step_seconds"]["expected"] < 3.42
