"""The verb `coordcheck`: its exit codes, its table and picture, and what it refuses."""

from xml.etree import ElementTree

import pytest

from tests.helpers.compiling import FAST

MLP = [
  "--config=configs/dp4_tp2.py:mlp",
  "--config.data.global_batch_size=32",
  f"--config.compiler_options={FAST}",
  "--steps=2",
]


@pytest.mark.long
@pytest.mark.parametrize(("base", "code"), [(32, 0), (0, 3)], ids=["muP", "without"])
def test_it_says_whether_activations_are_flat_on_a_mesh(main, tmp_path, base, code):
  file = tmp_path / "check.svg"
  more = ["--widths=32,256", f"--config.model.base_width={base}", f"--svg={file}"]
  found, out, err = main("coordcheck", *MLP, *more)
  assert found == code, (out, err)
  lines = out.splitlines()
  assert "data=4 x tensor=2" in lines
  assert "width 256: feed-forward 256" in lines
  if code:
    assert "  outputs, change after 2 steps: as width **" in out
  else:
    assert "flat: 4 activations, no slope beyond 0.3" in out
  assert ElementTree.parse(file).getroot().tag.endswith("svg")
  assert f"wrote {file}" in out
  assert [path.name for path in tmp_path.iterdir()] == ["check.svg"]


@pytest.mark.parametrize(
  ("more", "said"),
  [
    (["--widths=32"], "--widths=32: at least two widths, multiples of 1"),
    (["--widths=30,33"], "at width 33: "),  # tensor=2
    (["--widths=32,64", "--svg=nowhere/check.svg"], "--svg=nowhere/check.svg: give a file in a"),
    (["--config.optimizer.name=adafactor", "--config.optimizer.weight_decay=0"], "muP has no rule"),
  ],
)
def test_what_it_refuses(main, more, said):
  code, out, err = main("coordcheck", *MLP, "--config.model.base_width=32", *more)
  assert code == 2, (out, err)
  assert err.startswith("refused: ")
  assert said in err
