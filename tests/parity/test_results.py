"""Results of the parity matrix: what is kept, and what the page says of it."""

import re

from tests.docs.pages import section
from tests.parity.matrix import MESHES, combinations
from tests.parity.results import DOCS, HEADING, PAGE, Combination, Result, load, page, save


def results(*meshes, code="aaaa", largest=1.5e-15, wrong=()):
  """Returns a result for each of these meshes."""
  made = (code, "3.11.7", "0.10.2", "0.10.2", "0.12.8", "0.2.8")
  return [
    Result(Combination("lm", mesh, "plain", "float64"), 30, largest, wrong, made) for mesh in meshes
  ]


def test_the_page_counts_what_was_compared():
  text = page(results(*MESHES), MESHES)
  assert f"{len(MESHES)} combinations, {30 * len(MESHES)} tensors compared, 0 combin" in text
  assert "- float64: at most 1.5e-15; bound 1e-12" in text
  assert "optax 0.2.8, code of digest aaaa\n" in text
  assert "have not been run" not in text


def test_the_page_says_what_is_of_which_code_and_what_has_not_been_run():
  text = page(results("data8") + results("fsdp8", "tensor8", code="bbbb"), MESHES, missing=4)
  assert "4 combinations of the matrix have not been run." in text
  newer, older = (line for line in text.splitlines() if "of digest" in line)
  assert newer.endswith("code of digest bbbb: 2 combinations")
  assert older.endswith("code of digest aaaa: 1 combinations")


def test_results_are_kept_to_the_bit(tmp_path):
  found = results("data8", largest=0.1 + 0.2, wrong=("gradient x: 1e-3",))
  found += results("fsdp8", code="bbbb")
  save(found, tmp_path / "kept.json")
  assert load(tmp_path / "kept.json") == {one.combination: one for one in found}
  assert load(tmp_path / "none.json") == {}


def test_the_page_is_of_the_kept_results_and_the_readme_says_what_it_says():
  kept = load()
  found = [kept[one] for one in combinations() if one in kept]
  assert len(found) == len(kept), "some are not in the matrix: run it with --write"
  text = section(PAGE.read_text(), HEADING)
  assert text == page(found, MESHES, missing=len(combinations()) - len(found))
  for count in re.findall(r"(\d+) combinations", (DOCS.parent / "README.md").read_text()):
    assert f"{count} combinations, " in text
