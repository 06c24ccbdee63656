"""What the compiler says of a program that has no room, and the topologies that it knows."""

import itertools
import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from configs import dp8
from partitioning.constraints import activation_layout
from partitioning.mesh import make_mesh
from partitioning.mesh_sizes import AXES
from partitioning.parallel import collectives as manual
from planning import aot
from planning.buffers import Assignment, Buffer
from planning.plan import Plan
from planning.topology import EXAMPLES, parse, with_slices
from runtime import hlo
from runtime.chips import CHIPS, Rates
from runtime.collectives import collectives
from training import compiler_options

GIB = 2**30
CLOUD = {
  "v4": ["v4-8", "v4-64", "v4-1536"],
  "v5e": ["v5e-1", "v5litepod-8", "v5e-128"],
  "v5p": ["v5p-8", "v5p-32", "v5p-640", "v5p-12288"],
  "v6e": ["v6e-1", "v6e-4", "v6e-32", "v6e-256"],
  "tpu7x": ["tpu7x-2", "tpu7x-64", "tpu7x-128"],
}
# Programs for devices that are only described are kept, but cannot be read back.
COMPILED = pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache entry")
# As libtpu 0.0.42 and 0.0.50 write them.
WHOLE = (
  "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
  "Used 22.50G of 15.75G hbm. Exceeded hbm capacity by 6.75G."
)
TOTAL = (
  "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
  "(17.70G) exceeds available HBM (15.75G)."
)
TEMPORARIES = (
  "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Total size of HLO temporaries (17.50G) "
  "exceeds available HBM (15.75G)"
)


@pytest.mark.parametrize(
  ("message", "needed"),
  [
    (WHOLE, 22.5 * GIB),
    (WHOLE.replace("22.50G", "800.00M"), 800 * 2**20),
    (TOTAL, int(17.7 * GIB)),
    (TEMPORARIES, 3 * GIB + 17.5 * GIB),
    ("INTERNAL: something else", None),
  ],
)
def test_what_a_refused_program_needs(message, needed):
  assert aot.needed(message, 3 * GIB) == needed


# As libtpu 0.0.42 tells of programs that it accepts for v5e, with 15.75 GiB (docs/memory.md).
@pytest.mark.parametrize(
  ("temporaries", "on_the_host", "peak"),
  [
    (17.261, 0.0, 12.793),  # activations saved
    (16.674, 7.5, 15.249),  # offloaded
  ],
)
def test_a_program_is_judged_by_its_peak_and_not_by_what_it_allocates(
  temporaries, on_the_host, peak
):
  sizes = {"argument": 0.337, "output": 0.336, "alias": 0.336, "host_argument": 0.0}
  sizes |= {"temp": temporaries, "host_temp": on_the_host}
  stats = {f"{name}_size_in_bytes": int(size * GIB) for name, size in sizes.items()}
  told = types.SimpleNamespace(peak_memory_in_bytes=int(peak * GIB), **stats)
  function = types.SimpleNamespace(memory_analysis=lambda: told, as_text=lambda: "HloModule m")
  ready = types.SimpleNamespace(
    compile_train_step=lambda: types.SimpleNamespace(function=function),
    devices=types.SimpleNamespace(platform="tpu"),
  )
  found, _ = aot.compile_to_run(ready)
  assert (found.fits, found.peak_bytes) == (True, int(peak * GIB))
  assert found.host_bytes == int(on_the_host * GIB)


@pytest.mark.parametrize(
  ("accepted", "peak", "fits"), [(True, 31.2, True), (True, 33.2, False), (False, 31.2, False)]
)
def test_the_verdict_is_that_of_the_compiler_and_of_the_peak(accepted, peak, fits):
  """On v6e libtpu has 31.25 GiB for a program."""
  program = aot.Program("", int(peak * GIB), accepted)
  found = Plan("", None, parse("v6e:2x4"), Rates(), program, {}, None, ())
  assert found.fits == fits


def test_a_device_must_have_the_gaps_between_buffers_too():
  at_peak = Assignment((), (), int(29.0 * GIB), int(2.5 * GIB))
  program = aot.Program("", int(29.0 * GIB), True, at_peak=at_peak)
  found = Plan("", None, parse("v6e:2x4"), Rates(), program, {}, None, ())
  assert (found.peak_bytes, found.allocated_bytes) == (29.0 * GIB, 31.5 * GIB)
  assert not found.fits


def test_a_compiled_program_is_kept_under_what_it_is_lowered_to(tmp_path, monkeypatch):
  """Steps and the learning rate are numbers in it; sizes, rows and compiler options are more."""
  compilations = []

  def compile_with(*arguments):
    compilations.append(arguments)
    return types.SimpleNamespace(as_text=lambda: f"HloModule m{len(compilations)}")

  monkeypatch.setattr(aot.compiler_options, "compile_with", compile_with)
  monkeypatch.setattr(aot, "memory_of", lambda *_: (1000, 10))

  def text(recipe="mlp", topology="v5e:4x2", **changes):
    config = dp8.get_config(recipe)
    given = {"training.steps": 100, "optimizer.warmup_steps": 10, **changes}
    config.update_from_flattened_dict(given)
    ready = aot.prepare(config, parse("cpu:8"), ())
    return aot.compile_step(ready, kept=str(tmp_path / topology)).text

  alike = {"training.steps": 321, "optimizer.warmup_steps": 17, "optimizer.learning_rate": 0.02}
  alike |= {"optimizer.weight_decay": 0.02, "seed": 5, "evaluation.every_steps": 3}
  first, decoder = text(), text("lm")
  assert (text("lm", **alike), text(**alike)) == (decoder, first)
  others = [{"model.model_size": 96}, {"data.global_batch_size": 48}]
  others += [{"training.gradient_accumulation_steps": count} for count in (2, 4)]
  others += [{"compiler_options": "xla_cpu_enable_fast_math=true"}, {"topology": "v6e:4x2"}]
  texts = {first, decoder, *(text(**more) for more in others)}
  assert len(texts) == len(compilations) == 2 + len(others)


def test_a_kept_program_is_read_as_it_was():
  at = Buffer("fusion.1", "f32[8]", "", 32, "activations", "a.py:1", "b.py:2", 0, 1)
  program = aot.Program("HloModule m", 32, True, 8, Assignment((at,), (0, 32), 32, 4, 8))
  assert aot.Program.unpacked(program.packed()) == program


def sliced(topology, **over):
  """Returns mesh_dcn of a config for a topology."""
  config = dp8.get_config("lm")
  config.mesh_dcn.update(over)
  given = dict(config.mesh_dcn)
  found = dict(with_slices(config, parse(topology)).mesh_dcn)
  assert dict(config.mesh_dcn) == given, "the config that was given stays as it is"
  return {axis: size for axis, size in found.items() if size != 1}


def test_the_slices_of_a_name_are_those_of_the_config():
  assert sliced("v5p-128") == {}
  assert sliced("2xv5p-128") == {"data": 2}
  assert sliced("4xv5p-128", data=2, fsdp=2) == {"data": 2, "fsdp": 2}
  assert sliced("v5p-128", data=2) == {"data": 2}  # as before there were such names
  message = r"2xv5p:4x4x4 has 2 slices, and the product of mesh_dcn.\* is 4; make it 2, such as"
  with pytest.raises(ValueError, match=message):
    sliced("2xv5p-128", data=4)


@pytest.mark.plan
def test_a_mesh_whose_axes_split_axes_of_the_torus():
  devices = aot.start(parse("v6e:16x16"), 1, ())
  mesh = make_mesh({**dict.fromkeys(AXES, 1), "fsdp": 64, "tensor": 4}, devices)
  assert mesh.shape["fsdp"] == 64
  groups = mesh.devices.reshape(64, 4)
  far = [
    abs(a.coords[0] - b.coords[0]) + abs(a.coords[1] - b.coords[1])
    for group in groups
    for a, b in itertools.pairwise(group)
  ]
  assert max(far) == 1, "the devices of a tensor group are neighbours"


@pytest.mark.plan
@pytest.mark.parametrize(
  ("name", "wrap"),
  [
    ("v5p:4x4x4", (True, True, True)),
    ("v5p:2x4x4", (False, False, False)),
    ("v6e:16x16", (True, True, False)),
    ("v6e:8x16", (False, True, False)),
  ],
)
def test_the_compiler_gets_the_axes_with_wraparound_links(name, wrap, monkeypatch):
  asked = []
  describe = aot.described.get_topology_desc
  monkeypatch.setattr(
    aot.described, "get_topology_desc", lambda **ask: asked.append(ask) or describe(**ask)
  )
  assert len(aot.start(parse(name), 1, ())) == parse(name).devices
  assert asked == [{"platform": "tpu", "topology_name": name, "wrap": wrap}]


@COMPILED
@pytest.mark.plan
def test_with_wraparound_links_an_all_gather_does_not_become_an_all_reduce():
  # Without `wrap` the compiler wrote an all-reduce of twice the cost (libtpu 0.0.42.1, 0.0.48.1).
  mesh = make_mesh({**dict.fromkeys(AXES, 1), "fsdp": 64}, aot.start(parse("v5p:4x4x4"), 1, ()))
  split, whole = (jax.sharding.NamedSharding(mesh, P(axis)) for axis in ("fsdp", None))
  array = jax.ShapeDtypeStruct((8192, 8192), "bfloat16", sharding=split)
  text = jax.jit(lambda x: x, out_shardings=whole).lower(array).compile().as_text()
  assert {one.kind for one in collectives(text, mesh)} == {"all-gather"}


@COMPILED
@pytest.mark.plan
@pytest.mark.parametrize(
  ("rows", "padded", "kind"),
  [
    (126 * 128, False, "reduce-scatter"),  # 2 x 3 x 3 x 7 tiles
    (23 * 128, False, "reduce-scatter"),
    (29 * 128, False, "all-reduce"),
    (127 * 128, False, "all-reduce"),
    (29 * 128, True, "reduce-scatter"),
    (127 * 128, True, "reduce-scatter"),
  ],
)
def test_sparse_cores_scatter_what_they_can_cut(rows, padded, kind):
  mesh = make_mesh({**dict.fromkeys(AXES, 1), "fsdp": 64}, aot.start(parse("v5p:4x4x4"), 1, ()))

  def gradient(x, y):
    whole = jnp.einsum("tf,td->fd", x, y)
    if padded:
      return manual.reduce_scatter(whole, ("fsdp",), 1)
    return jax.lax.psum_scatter(whole, "fsdp", scatter_dimension=1, tiled=True)

  split = jax.sharding.NamedSharding(mesh, P("fsdp"))
  x, y = (
    jax.ShapeDtypeStruct((64 * 1024, size), "bfloat16", sharding=split) for size in (rows, 4096)
  )
  region = jax.shard_map(
    gradient, mesh=mesh, in_specs=P("fsdp"), out_specs=P(None, "fsdp"), check_vma=False
  )
  options = compiler_options.of_device(mesh.devices.flat[0])
  text = jax.jit(region).lower(x, y).compile(compiler_options=options).as_text()
  assert {one.kind for one in collectives(text, mesh)} == {kind}


@COMPILED
@pytest.mark.plan
@pytest.mark.parametrize(
  ("slices", "width", "hidden"),
  [(1, 8192, 28_672), (2, 16_384, 53_248)],  # MLPs of Llama 3 70B and 405B
)
def test_gradients_of_wide_mlps_are_scattered_within_the_slices_of_v6e(slices, width, hidden):
  devices = aot.start(parse("v6e:16x16"), slices, ())
  over = {"fsdp": slices} if slices > 1 else {}
  mesh = make_mesh({**dict.fromkeys(AXES, 1), "fsdp": len(devices)}, devices, over)

  def gradient(x, y):
    return manual.reduce_scatter(jnp.einsum("td,tf->df", x, y), ("fsdp",), 0)

  split = jax.sharding.NamedSharding(mesh, P("fsdp"))
  x, y = (
    jax.ShapeDtypeStruct((len(devices) * 2048, size), "bfloat16", sharding=split)
    for size in (width, hidden)
  )
  region = jax.shard_map(
    gradient, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"), check_vma=False
  )
  with activation_layout({}, {}, slices=over):
    lowered = jax.jit(region).lower(x, y)
  compiled = lowered.compile(compiler_options=compiler_options.of_device(devices[0]))
  kinds = {one.kind for one in collectives(compiled.as_text(), mesh)}
  assert "reduce-scatter" in kinds
  assert "all-reduce" not in kinds


@pytest.mark.plan
@pytest.mark.parametrize(
  "chip", [chip for chip in CHIPS.values() if chip.torus], ids=lambda c: c.name
)
def test_the_compiler_knows_every_kind_and_counts_its_devices_alike(chip):
  for name in CLOUD.get(chip.name, ()):
    assert len(aot.start(parse(name), 1, ())) == parse(name).devices
  for shape in ["2x2x1", *EXAMPLES[3].split(", ")[:2]] if chip.torus == 3 else ["2x2", "4x4"]:
    topology = parse(f"{chip.name}:{shape}")
    found = aot.start(topology, 1, ())
    assert len(found) == topology.devices
    assert {device.platform for device in found} == {"tpu"}


@COMPILED
@pytest.mark.plan
def test_padded_bytes_of_the_arguments_are_what_the_compiler_says():
  mesh = make_mesh({**dict.fromkeys(AXES, 1), "data": 4}, aot.start(parse("v5e:2x2"), 1, ()))
  everywhere = jax.sharding.NamedSharding(mesh, P())
  sizes = {"a": (4096, 16), "b": (16, 4096), "c": (3, 200, 192), "d": (5,), "e": (128, 128)}
  state = {
    name: jax.ShapeDtypeStruct(size, dtype, sharding=everywhere)
    for (name, size), dtype in zip(sizes.items(), ["float32", "bfloat16"] * 3, strict=False)
  }
  done = jax.jit(lambda state: jax.tree.map(jnp.sin, state)).lower(state).compile()
  found = hlo.entry_parameters(hlo.parse(done.as_text()))
  assert set(found) == {f"state/{name}" for name in sizes}
  padded = {name: hlo.tiled_bytes(shape) for name, shape in found.items()}
  # The compiler rounds each argument up to 512 bytes.
  assert sum(-(-size // 512) * 512 for size in padded.values()) == (
    done.memory_analysis().argument_size_in_bytes
  )
  # The long dim is made the minor one, so that 16 columns are not padded to 128.
  assert padded["state/a"] == hlo.shape_bytes(found["state/a"])
  assert padded["state/c"] > hlo.shape_bytes(found["state/c"])


def test_an_axis_over_slices_crosses_them_whatever_its_place_in_the_mesh():
  sizes = {**dict.fromkeys(AXES, 1), "fsdp": 2, "stage": 4}
  mesh = make_mesh(sizes, jax.devices()[:8], {"stage": 2})
  where = aot.places(mesh, parse("h100:4"))

  def network(*places):
    return where.wire(places).network

  # Places in mesh.devices.flat: fsdp * 4 + stage.
  assert network(0, 4) == network(3, 7) == "NVLink"
  assert network(0, 1) == network(2, 3) == "NVLink"
  assert network(1, 2) == network(5, 6) == "DCN"
