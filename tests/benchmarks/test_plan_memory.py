"""The section of the memory benchmark: --write keeps the note, and drops nothing else."""

from benchmarks import plan_memory
from tests.docs.pages import section


def test_the_page_is_what_write_writes():
  text = section(plan_memory.PAGE.read_text(), plan_memory.HEADING)
  lines = [line for line in text.splitlines() if line.startswith("| ") and " model, " not in line]
  rows = [line for line in lines if "---" not in line]
  ratios = [float(row.rpartition("|")[0].rpartition("|")[2]) for row in rows]
  close = sum(abs(ratio - 1) <= plan_memory.WITHIN for ratio in ratios)
  note = plan_memory.note_of(text)
  assert note, "the rows of v5p were compiled before a change; see the page"
  assert plan_memory.page(rows, close, note) == text


def test_a_page_without_a_note():
  assert plan_memory.note_of("# Memory\n\nText.\n") == []
  assert "note" not in plan_memory.page(["| a | 1 | 1 | 1.00 |"], 1, [])
