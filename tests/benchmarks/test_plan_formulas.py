"""The section of the memory benchmark: --write keeps the note, and drops nothing else."""

from benchmarks import plan_formulas
from tests.docs.pages import section


def test_the_page_is_what_write_writes():
  text = section(plan_formulas.PAGE.read_text(), plan_formulas.HEADING)
  lines = [line for line in text.splitlines() if line.startswith("| ") and " model, " not in line]
  rows = [line for line in lines if "---" not in line]
  ratios = [float(row.rpartition("|")[0].rpartition("|")[2]) for row in rows]
  close = sum(abs(ratio - 1) <= plan_formulas.WITHIN for ratio in ratios)
  note = plan_formulas.note_of(text)
  assert note, "the rows of v5p were compiled before a change; see the page"
  assert plan_formulas.memory_page(rows, close, note) == text


def test_a_page_without_a_note():
  assert plan_formulas.note_of("# Memory\n\nText.\n") == ""
  assert "note" not in plan_formulas.memory_page(["| a | 1 | 1 | 1.00 |"], 1, "")


def test_each_row_of_the_page_about_traffic_is_a_case():
  text = plan_formulas.PAGE.read_text()
  heading = plan_formulas.traffic_page([]).partition("\n")[0]
  rows = [line for line in section(text, heading).splitlines() if line.startswith("| ")][2:]
  names = [row.split(" | ")[0].removeprefix("| ") for row in rows]
  assert set(names) <= {case.name for case in plan_formulas.TRAFFIC}  # not all were compiled
  assert plan_formulas.traffic_page(rows) == section(text, heading)
