"""The layout's page: every array with its numbers, the costs of each axis, nothing from outside."""

import dataclasses
import html.parser
import re

import pytest
from jax.sharding import NamedSharding

from partitioning import rules
from reports import layout_page
from reports.layout_text import job_text
from runtime import collectives
from tests.helpers.jobs import make_job

VOID = {"meta", "br", "wbr"}


class Reader(html.parser.HTMLParser):
  """Reads a page: its rows, its drawings, its ids and links; refuses tags that do not close.

  A drawing is a list of its rows; `styles` has device -> the styles of its number in all drawings.
  """

  def __init__(self, text):
    super().__init__()
    self.open, self.rows, self.ids, self.links, self.said = [], [], [], [], []
    self.tables, self.drawings, self.styles = [], [], {}
    self.feed(text)
    self.close()
    assert self.open == []

  def handle_starttag(self, tag, attrs):
    attrs = dict(attrs)
    self.ids += [attrs["id"]] if "id" in attrs else []
    self.links += [value for name, value in attrs.items() if name in ("href", "src")]
    if "data-device" in attrs:
      self.styles.setdefault(attrs["data-device"], set()).add(attrs["style"])
    if tag == "table":
      self.tables.append(self.rows if attrs.get("class") != "grid" else [])
      self.drawings += [self.tables[-1]] if attrs.get("class") == "grid" else []
    elif tag == "tr":
      self.tables[-1].append([])
    elif tag in ("td", "th"):
      self.tables[-1][-1].append("")
    elif tag == "br" and {"td", "th"} & {*self.open}:
      self.tables[-1][-1][-1] += "\n"
    if tag not in VOID:
      self.open.append(tag)

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    self.said.append(data)
    if {"td", "th"} & {*self.open}:
      self.tables[-1][-1][-1] += data

  def row(self, name):
    """Returns the cells of the row of one array."""
    [found] = [row for row in self.rows if row[0].removeprefix("≠ ") == name]
    return found


@pytest.fixture(scope="module")
def job():
  return make_job("dp2_fsdp2_tp2", "lm")


@pytest.fixture(scope="module")
def text(job):
  return layout_page.html(job, titles=("a_strategy", ""))


@pytest.fixture(scope="module")
def two():
  return layout_page.html(
    make_job("dp8", "mlp"), make_job("dp4_tp2", "mlp"), titles=("dp8", "dp4_tp2")
  )


def test_every_array_has_a_row_with_its_numbers_and_its_rule(job, text):
  read = Reader(text)
  sizes = job.devices.sizes
  for placements in job.placements.values():
    for name, p in placements.items():
      cells = read.row(name)
      assert cells[1:9] == [
        p.letters or "-",
        rules.shape_text(p.shape),
        str(p.dtype),
        rules.spec_text(p.spec, len(p.shape)),
        rules.shape_text(rules.shard_shape(p.shape, p.spec, sizes)),
        rules.size_text(rules.bytes_per_device(p, sizes)),
        str(rules.copies(p, sizes)),
        cells[8],
      ]
      assert cells[9].splitlines() == [p.rule, *(f"note: {note}" for note in p.notes)]


def test_every_array_links_to_a_drawing_that_is_there_and_alike_arrays_share_it(job, text):
  read = Reader(text)
  drawings = {link for link in read.links if link.startswith("#drawing-")}
  assert {f"#{name}" for name in read.ids if name.startswith("drawing-")} == drawings
  everything = [p for placements in job.placements.values() for p in placements.values()]
  ways = {(p.shape, p.letters, str(p.spec)) for p in everything}
  assert len(drawings) == len(ways)
  number = read.row("layers/mlp/up/kernel")[8]
  assert read.row("layers/mlp/gate/kernel")[8] == number
  assert read.row("optimizer/0/mu/layers/mlp/up/kernel")[8] == number
  assert read.row("layers/mlp/down/kernel")[8] != number


def test_the_drawings_are_those_of_the_shardings(job, text):
  read = Reader(text)
  drawings = len({link for link in read.links if link.startswith("#drawing-")})
  pages = [cells for drawn in read.drawings for cells in drawn]
  assert text.count('<div class="drawing">') == 1 + drawings + len(job.activations.seen)  # the mesh
  [number] = {read.row("layers/mlp/up/kernel")[8]}
  [at] = re.findall(f'<figure id="drawing-{number}">.*?</figure>', text, re.DOTALL)
  [drawn] = Reader(at).drawings
  up = job.placements["parameters"]["layers/mlp/up/kernel"]
  found = {}  # of the drawing: (row, column) -> devices
  for i, row in enumerate(row for row in drawn if row[0].count(":") == 1):
    for k, cell in enumerate(row[1:]):
      found[i, k] = {int(word) for word in cell.split()}
  indices = NamedSharding(job.mesh, up.spec).devices_indices_map(up.shape)
  expected = {}
  for device, index in indices.items():
    starts = tuple(part.indices(n)[0] for part, n in zip(index[1:], up.shape[1:], strict=True))
    expected.setdefault(starts, set()).add(device.id)
  assert [found[place] for place in sorted(found)] == [expected[s] for s in sorted(expected)]
  assert "over fsdp (2 x" in "".join(Reader(at).said)
  assert at.count('class="hatch1"') == len(expected)  # each block is on both devices of `data`
  assert pages
  assert sorted(read.styles, key=int) == [str(i) for i in range(8)]
  assert len({*map(str, read.styles.values())}) == 8
  assert all(len(styles) == 1 for styles in read.styles.values())  # the same color everywhere


def test_the_sums_are_those_of_the_printed_layout(job, text):
  between = " parameters; with optimizer "
  [line] = [line for line in job_text(job).splitlines() if between in line]
  count, _, after = line.partition(between)
  [cells] = [row for row in Reader(text).rows if row[0] == "a_strategy"]
  assert cells[1] == count
  assert f"state {cells[5]} per device, of which {cells[6]} are replicated" in after


def test_the_costs_are_the_collectives_of_the_compiled_step(job, text):
  program = job.compile_train_step().function.as_text()
  rows = collectives.summarize(collectives.collectives(program, job.mesh))
  table = [row for row in Reader(text).rows if len(row) == 6]
  for axes in {row.axes for row in rows}:
    name = " + ".join(f"{axis}=2" for axis in axes)
    [at] = [i for i, cells in enumerate(table) if cells[0] == name]
    ours = [row for row in rows if row.axes == axes]
    assert table[at][4] == rules.size_text(sum(row.bytes for row in ours))
    for row, cells in zip(ours, table[at + 1 :], strict=False):
      sizes = [rules.size_text(size) for size in (row.bytes / row.count, row.bytes)]
      assert cells[1:5] == [row.kind, str(row.count), *sizes]


def test_the_page_needs_nothing_from_outside_and_is_small(text, two):
  for one in (text, two):
    assert "http" not in one
    assert all(link.startswith("#") for link in Reader(one).links)
    assert not re.search(r"@import|url\((?!#)", one)
    assert len(one.encode()) < 1_000_000


def test_names_are_escaped(job, monkeypatch):
  monkeypatch.setattr(layout_page, "_costs", lambda job: [])
  [(_, first), *rest] = job.placements["parameters"].items()
  odd = dataclasses.replace(first, name="a<b>/c&d", rule="(?P<x>a|&b)", notes=("<i>",))
  parameters = {odd.name: odd, **dict(rest)}
  changed = dataclasses.replace(job, placements={**job.placements, "parameters": parameters})
  text = layout_page.html(changed, titles=('<script>"x"</script>', ""), command="<script>y()")
  read = Reader(text)
  assert 'Layout: <script>"x"</script>' in "".join(read.said)
  assert read.row("a<b>/c&d")[9] == "(?P<x>a|&b)\nnote: <i>"
  assert '<script>"' not in text
  assert "<script>y" not in text
  assert "<script>y()" in "".join(read.said)
  assert "a<b>" not in text


def test_an_axis_along_which_nothing_is_sent_is_named(job, monkeypatch):
  rows = [collectives.Row("all-gather", ("fsdp",), 1, 4096, False)]
  monkeypatch.setattr(layout_page, "_costs", lambda job: rows)
  text = layout_page.html(job)
  assert "Nothing is sent along data=2, tensor=2." in text
  [cells] = [row for row in Reader(text).rows if row[1:2] == ["all-gather"]]
  assert cells[2:5] == ["1+", "4.0 KiB", "4.0 KiB"]


# ---- Two layouts ----


def test_two_layouts_beside_each_other_mark_what_differs(two):
  read = Reader(two)
  arrays = {row[0].removeprefix("≠ "): row for row in read.rows if len(row) == 11}
  split = next(row for row in arrays.values() if "tensor" in row[5])
  assert split[0].startswith("≠ ")
  assert split[4].splitlines() == ["dp8", "dp4_tp2"]
  assert split[5].splitlines()[0] != split[5].splitlines()[1]
  same = [row for row in arrays.values() if not row[0].startswith("≠ ")]
  assert same
  for row in same:
    if row[0] == "array":
      continue
    for cell in row[5:9]:
      first, second = cell.split("\n")
      assert first == second, row
  ours, theirs = (row for row in read.rows if row[0] in ("dp8", "dp4_tp2"))
  assert "≠" not in "".join(ours)
  assert theirs[1] == ours[1]  # as many parameters
  assert theirs[2].startswith("≠ ")  # of which a device holds fewer bytes
  assert theirs[2] != f"≠ {ours[2]}"
  assert two.count("<h4>dp8</h4>") == two.count("<h4>dp4_tp2</h4>") > 0


def test_an_array_that_one_layout_does_not_have(monkeypatch):
  monkeypatch.setattr(layout_page, "_costs", lambda job: [])
  whole = make_job("dp8", "mlp")
  [gone, *rest] = whole.placements["parameters"]
  parameters = {name: whole.placements["parameters"][name] for name in rest}
  part = dataclasses.replace(whole, placements={**whole.placements, "parameters": parameters})
  for jobs, line in (((whole, part), 1), ((part, whole), 0)):
    read = Reader(layout_page.html(*jobs))
    row = read.row(gone)
    assert row[0] == f"≠ {gone}"
    assert row[5].split("\n")[line] == "not there"
    assert row[5].split("\n")[1 - line] != "not there"
    assert [cells[0] for cells in read.rows if cells[0].startswith("≠")] == [row[0]]
