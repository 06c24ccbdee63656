"""The verb export: a run's checkpoint as a model folder, and what is refused."""

import json
import re

import numpy as np
import pytest

from input_pipeline.text import tokenizer
from tests.checkpointing import plain
from tests.checkpointing.test_older_run import EXPECTED, FIXTURE
from tests.interop import folders

RUN = FIXTURE / "run"
COMMAND = ["export", f"--config={EXPECTED['config']}", *EXPECTED["flags"]]
READ = f"--checkpoint={RUN}"


def test_a_run_is_exported_from_any_mesh(main, tmp_path):
  before = sorted(RUN.rglob("*"))
  for strategy, dtype in (("dp2_fsdp2_tp2", "float32"), ("single", "bfloat16")):
    to = tmp_path / strategy
    flags = [f"--dtype={dtype}"] if dtype != "float32" else []
    command = ["export", f"--config=configs/{strategy}.py", *EXPECTED["flags"], READ]
    code, out, err = main(*command, f"--to={to}", *flags)
    assert (code, err) == (0, ""), out
    assert re.search(rf"exported step 4 of \S+run to {to} \(llama, {dtype}, \d.* KiB\)", out)
    described = json.loads((to / "config.json").read_text())
    assert described["dtype"] == dtype
    assert {path.name for path in to.iterdir()} == {
      *("config.json", "generation_config.json", "model.safetensors"),
      *("tokenizer.json", "tokenizer_config.json"),
    }
  wide, narrow = (
    folders.tensors_of(tmp_path / name / "model.safetensors")
    for name in ("dp2_fsdp2_tp2", "single")
  )
  stored = plain.arrays(RUN / "checkpoints" / "4")
  for layer, kernel in enumerate(stored["params.layers.mlp.up.kernel"]):
    assert np.array_equal(wide[f"model.layers.{layer}.mlp.up_proj.weight"], kernel.T)
  assert np.array_equal(wide["lm_head.weight"], stored["params.unembed.kernel"].T)
  assert wide.keys() == narrow.keys()
  for name, array in wide.items():
    assert narrow[name].tobytes() == array.astype(narrow[name].dtype).tobytes()
  assert tokenizer.load(tmp_path / "single").size == 256
  assert sorted(RUN.rglob("*")) == before


REFUSALS = {
  "no folder": ([READ], ["name the folder to write with --to=FOLDER"]),
  "an empty name": ([READ, "--to="], ["--to= is empty"]),
  "a folder with something": ([READ, "--to={full}"], ["full is not empty (it has a)"]),
  "a folder below a file": ([READ, "--to={full}/a/b"], ["a is a file, not a folder; give anoth"]),
  "among the checkpoints": (
    [f"--checkpoint={RUN}/4", f"--to={RUN}/checkpoints/4/hf"],
    ["it is among the checkpoints of the run"],
  ),
  "no run": (["--checkpoint={full}", "--to={new}"], ["full has no checkpoints"]),
  "another model": (
    [READ, "--to={new}", "--config.model.feedforward_size=32"],
    ["does not fit (3 arrays differ)", "layers/mlp/up/kernel: float32[2, 16, 24]"],
  ),
  "what no family has": (
    [READ, "--to={new}", "--config.model.attention_scale=0.5", "--config.model.logits_soft_cap=9"],
    ["no model_type of transformers is this model; the nearest, 'llama'", "logits_soft_cap=9.0"],
  ),
  "an unknown dtype": (
    [READ, "--to={new}", "--dtype=bfloat"],
    ["--dtype='bfloat': one of float64, float32, bfloat16, float16", "did you mean 'bfloat16'"],
  ),
  "the flag of another verb": ([READ, "--to={new}", "--top_k=3"], ["belongs to the verb sample"]),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_refusals_write_nothing(what, main, tmp_path):
  flags, parts = REFUSALS[what]
  names = {"full": tmp_path / "full", "new": tmp_path / "new"}
  names["full"].mkdir()
  (names["full"] / "a").write_text("")
  code, out, err = main(*COMMAND, *(flag.format(**names) for flag in flags))
  assert code == 2, (out, err)
  assert err.startswith("refused: "), err
  for part in parts:
    assert part in err
  assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "full"]


def test_a_classifier_is_refused(main, tmp_path):
  code, _, err = main("export", "--config=configs/single.py:mlp", READ, f"--to={tmp_path}/new")
  assert (code, "model.name='mlp': other programs have no such model" in err) == (2, True), err
