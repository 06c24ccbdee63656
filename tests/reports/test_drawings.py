"""Pictures: blocks where JAX really puts them, drawn in full, for every rank and mesh."""

import re
import subprocess
import sys
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from partitioning.rules import Placement, spec_entries
from reports import drawings, layout_text
from reports.drawings import blocks, cutting_axes, holdings, picture, svg, terminal
from reports.grid import color, numbers_text

MESH = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"))
WIDE = jax.make_mesh((4, 2), ("data", "tensor"))
LINE = jax.make_mesh((8,), ("data",))
# The same devices in another order: numbers must come from the map, not from the position.
BACKWARDS = jax.make_mesh((4, 2), ("data", "tensor"), devices=jax.devices()[::-1])

LAYOUTS = [
  ((24,), ("fsdp",), MESH),
  ((24,), (("tensor", "data"),), MESH),
  ((12, 10), ("data", "tensor"), WIDE),
  ((12, 10), (None, "tensor"), BACKWARDS),
  ((16, 6), (("tensor", "data"), None), WIDE),
  ((3, 12, 10), (None, "data", "tensor"), WIDE),
  ((4, 12, 10), (("data", "fsdp"), None, "tensor"), MESH),
  ((4, 6, 3, 10), ("tensor", "data", None, "fsdp"), MESH),
]
NAMES = [f"{shape}, {spec}" for shape, spec, _ in LAYOUTS]


def lies(mesh, *entries):
  return NamedSharding(mesh, PartitionSpec(*entries))


def words(drawn):
  """Returns the lines of an SVG, after parsing it as XML."""
  lines = {}
  for text in ElementTree.fromstring(svg(drawn)).iter("{http://www.w3.org/2000/svg}text"):
    before = lines.get(float(text.get("y")), "").ljust(round(float(text.get("x")) / 12))
    said = (text.text or "").replace("\N{NO-BREAK SPACE}", " ")
    lines[float(text.get("y"))] = (before + said).rstrip("\n")
  return [line.rstrip() for line in lines.values() if line.strip()]


def plain(drawn, **width):
  return drawings.plain(terminal(drawn, **width))


# ---- What is drawn ----


@pytest.mark.parametrize(("shape", "spec", "mesh"), LAYOUTS, ids=NAMES)
def test_blocks_are_where_the_array_really_is(shape, spec, mesh):
  array = jax.device_put(jnp.zeros(shape), lies(mesh, *spec))
  found = blocks(shape, array.sharding)
  held = {device: place for place, ids in found.items() for device in ids}
  assert len(held) == 8
  for piece in array.addressable_shards:
    ends = [part.indices(size)[:2] for part, size in zip(piece.index, shape, strict=True)]
    assert held[piece.device.id] == tuple(ends)
    assert tuple(stop - start for start, stop in held[piece.device.id]) == piece.data.shape
  assert len(found) == len({tuple(map(str, shard.index)) for shard in array.global_shards})
  # The spec is found again from the places.
  axes = cutting_axes(found, mesh)
  assert tuple(axes) == spec_entries(spec, len(shape))
  notes = picture(shape, array.sharding).notes
  over = notes[-1].partition("replicated over ")[2].split(" and ") if notes else []
  assert {*filter(None, over)} == {*mesh.axis_names} - {axis for some in axes for axis in some}


@pytest.mark.parametrize(("shape", "spec", "mesh"), LAYOUTS, ids=NAMES)
def test_every_block_is_drawn_with_its_devices_and_every_edge_is_named(shape, spec, mesh):
  dims = ("rows", "columns", "depth", "more")[: len(shape)]
  drawn = picture(shape, lies(mesh, *spec), title="x", dims=dims)
  texts, text = words(drawn), plain(drawn)
  for ids in blocks(shape, lies(mesh, *spec)).values():
    [numbers] = numbers_text(ids)
    assert f"│ {numbers} " in "\n".join(texts)
    assert text.count(f"│ {numbers} ") == 1
  for dim, size in zip(dims, shape, strict=True):
    assert any(f"{dim} = {size}" in said for said in texts)
    assert f"{dim} = {size}" in text
  for axis in {
    a for entry in spec if entry for a in ((entry,) if isinstance(entry, str) else entry)
  }:
    assert axis in " ".join(texts)
    assert axis in text
  assert max(map(len, text.splitlines())) <= 80


def test_a_picture_by_hand():
  drawn = picture((3, 128, 384), lies(WIDE, None, None, "tensor"), title="up/kernel", dims="LDF")
  assert blocks((3, 128, 384), lies(WIDE, None, None, "tensor")) == {
    ((0, 3), (0, 128), (0, 192)): (0, 2, 4, 6),
    ((0, 3), (0, 128), (192, 384)): (1, 3, 5, 7),
  }
  assert plain(drawn).splitlines() == [
    "up/kernel LDF [3, 128, 384]",
    "  D = 128   F = 384, over tensor (2 x 192)",
    "unsharded   0:192        192:384",
    "          ┌────────────┬────────────┐",
    "          │ 0, 2, 4, 6 │ 1, 3, 5, 7 │",
    "          └────────────┴────────────┘",
    "unsharded, not drawn: L = 3",
    "each block is on 4 devices, replicated over data",
  ]


def test_a_third_split_dim_is_a_panel_per_piece():
  drawn = picture((4, 12, 10), lies(MESH, "tensor", "fsdp", "data"), dims=("layers", "in", "out"))
  texts = words(drawn)
  assert [text for text in texts if text.startswith("layers ")] == ["layers 0:2", "layers 2:4"]
  assert "one panel per shard of layers = 4, over tensor (2 x 2)" in texts
  boxes = [box.strip() for text in texts if "│" in text for box in text.split("│")[1:3]]
  assert sorted(boxes) == [str(i) for i in range(8)]


def test_a_sharding_without_a_mesh():
  drawn = picture((4, 6), SingleDeviceSharding(jax.devices()[3]))
  assert "│ 3 " in plain(drawn)


def test_refusals():
  with pytest.raises(ValueError, match=r"dims B, D: 2 names for shape \(4, 6, 8\)"):
    picture((4, 6, 8), lies(WIDE), dims="BD")
  with pytest.raises(ValueError, match="divi"):
    picture((9,), lies(WIDE, "data"))
  with pytest.raises(ValueError, match="before: the mesh has no device 8, 12"):
    holdings("before", WIDE, {0: "a", 8: "b", 12: "c"})


def test_names_are_escaped_and_titles_too():
  drawn = picture((4, 6), lies(WIDE), title='<a> & "b"', dims=("<x>", "y&z"))
  written = words(drawn)  # parsed as XML, so that what was escaped is there again
  assert '<a> & "b" [4, 6]' in written
  for name, escaped in (("<x>", "&lt;x&gt;"), ("y&z", "y&amp;z")):
    assert any(name in text for text in written), written
    assert escaped in svg(drawn)
    assert name not in svg(drawn)


# ---- Holdings ----


def test_a_device_has_the_same_color_in_every_drawing():
  assert len({color(i) for i in range(64)}) == 64
  drawn = svg(picture((16, 24), lies(BACKWARDS, "tensor", "data")))
  fills = dict(re.findall(r"\.(\S+) { fill: (#\w+);font-weight: bold }", drawn))
  texts = ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")
  found = {int(t.text): fills[t.get("class")] for t in texts if t.text.isdigit()}
  assert found == {i: color(i) for i in range(8)}


# ---- Many devices ----


def test_numbers_in_few_words():
  assert numbers_text([3]) == ("3",)
  assert numbers_text([4, 0]) == ("0, 4",)
  assert numbers_text([0, 1, 2, 3, 8, 9, 10]) == ("0-3, 8-10",)
  assert numbers_text(range(0, 512, 16)) == ("0, 16 ... 496", "32 replicas")


MANY = """
import jax
jax.config.update("jax_num_cpu_devices", 512)
from jax.sharding import NamedSharding, PartitionSpec as P
from reports.drawings import blocks, picture, plain, svg, terminal
mesh = jax.make_mesh((32, 16), ("data", "tensor"))
for spec in (P("data", "tensor"), P(None, "tensor"), P(("data", "tensor")), P()):
  shape, sharding = (1024, 4096), NamedSharding(mesh, spec)
  drawn = picture(shape, sharding, dims="DF")
  text = plain(terminal(drawn))
  assert sum(map(len, blocks(shape, sharding).values())) == 512
  assert max(map(len, text.splitlines())) <= 80, text
  assert len(text.splitlines()) < 30, text
  assert len(svg(drawn)) < 60_000
  print(text)
"""


def test_512_devices_are_summed_up():
  result = subprocess.run([sys.executable, "-c", MANY], capture_output=True, text=True)
  assert result.returncode == 0, result.stderr
  for said in ("(13 more)", "(25 more)", "0, 16 ... 496", "32 replicas", "(505 more)", "0-511"):
    assert said in result.stdout, result.stdout


# ---- The ways of a layout ----


def placed(name, shape, letters, *entries):
  return Placement(name, shape, np.dtype("float32"), letters, "r", PartitionSpec(*entries))


def test_arrays_that_are_cut_alike_share_a_drawing():
  up = placed("up", (3, 12, 20), "LDF", None, None, "tensor")
  down = placed("down", (3, 20, 12), "LFD", None, "tensor", None)
  state = placed("optimizer/mu/up", (3, 12, 20), "LDF", None, None, "tensor")
  other = placed("optimizer/mu/down", (3, 20, 12), "LFD", None, "tensor", "data")
  scale = placed("scale", (12,), "D")
  text = layout_text.ways_text([up, down, scale, state, other], WIDE)
  assert text.count("┌") == 2
  assert "sharded alike: up, down and their optimizer state" in text
  assert "optimizer/mu/down LFD [3, 20, 12]" in text
  assert text.endswith("replicated on all 8 devices: scale")
