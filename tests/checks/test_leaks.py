"""`leaks`: which positions see which, in programs with masks that public reports had wrong."""

import numpy as np
import pytest

from checks import leaks
from checks.case import Case
from checks.program import Description
from tests.checks import decoder

CONTEXT = {"data": 2, "context": 2}
# Bug -> window, mesh, what is said of it, its likely cause.
MUTANTS = {
  # Packed documents attend to one another (AI-Hypercomputer/maxtext#4476, with one kernel;
  # mosaicml/llm-foundry#1464, huggingface/nanoVLM#204).
  "no_document_borders": (0, {}, "must not see", "segments are not passed"),
  # The window has one position too many (huggingface/transformers#39408, zml/zml#763).
  "window_off_by_one": (3, {}, "must not see", "the own position counts"),
  # The causal mask is dropped (keras-team/keras#23038).
  "not_causal": (0, {}, "must not see", "causal mask is missing"),
  # Padding is read (pacman100/LLM-Workshop#1, lean-dojo/ReProver#34).
  "padding_is_seen": (0, {}, "must not see", "padding is not masked"),
  # A finite number is added to the scores that are masked, and is not low enough
  # (Shujun-He/RibonanzaNet#5).
  "weak_mask": (0, {}, "must not see", "not low enough"),
  # Rows share statistics: a textbook error (in Blaizzy/mlx-vlm#1946 a row depends on its
  # neighbour's length).
  "batch_statistics": (0, {}, "a token of another row", "of the whole batch"),
  # The mask is dropped with context parallelism alone (huggingface/accelerate#4177).
  "mask_by_block": (0, CONTEXT, "must not see", "segments are not passed"),
  # The ring drops the other blocks: a textbook error.
  "own_block_alone": (0, CONTEXT, "do not change with a token", "that is dropped"),
}


@pytest.mark.parametrize("bug", MUTANTS)
def test_a_mutant_is_found(bug):
  window, sizes, what, cause = MUTANTS[bug]
  outcome = leaks.check(Case(decoder.program(sizes, bug, window=window)))
  finding = next(finding for finding in outcome.findings if what in finding.what)
  assert cause in finding.cause
  assert ("o" if bug == "own_block_alone" else "L") in "".join(outcome.findings[0].lines[2:]) or (
    bug == "batch_statistics"
  )


@pytest.mark.parametrize(("window", "sizes"), [(3, {}), (0, CONTEXT)])
def test_right_masks_give_no_finding(window, sizes):
  outcome = leaks.check(Case(decoder.program(sizes, window=window)))
  assert outcome.findings == []
  assert outcome.note == "3 rows, 12 of 12 positions changed in each"


def test_the_pattern_is_drawn():
  outcome = leaks.check(Case(decoder.program({}, window=2)))
  # Documents of 5 and 7 positions; two layers see two positions back.
  assert outcome.lines[1].endswith("# changes  L leak  o should change and does not")
  assert outcome.lines[4] == "    2  ..###.......   ..###......."
  assert outcome.lines[6] == "    4  ....#.......   ....#......."


def test_what_is_not_described_is_skipped():
  program = decoder.program({})
  bare = Case(type(program)(**{**vars(program), "describe": Description()}))
  assert leaks.check(bare).skipped == "it needs describe.outputs and describe.tokens"


def test_expected_pattern_of_losses_whose_targets_are_cut_from_the_tokens():
  program = decoder.program({})
  known = {**vars(program.describe), "looks_ahead": 1, "segments": ""}
  case = Case(type(program)(**{**vars(program), "describe": Description(**known)}))
  expected = leaks.expected_of(case, 0, np.arange(12))
  assert np.array_equal(expected, np.triu(np.ones((12, 12), bool), -1))
