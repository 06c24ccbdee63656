"""The verb export: a run's checkpoint as a model folder, and what is refused."""

import dataclasses
import json
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from input_pipeline.text import tokenizer
from interop import hf_config, safetensors_file
from runtime import forms
from tests.helpers.jobs import make_job
from tests.interop import folders
from tests.training.checkpointing import plain
from training import restore
from training.checkpointing.checkpointer import Checkpointer

RUN = pathlib.Path(__file__).parent / "exported_run" / "run"
EXPECTED = json.loads((RUN.parent / "expected.json").read_text())
COMMAND = ["export", f"--config={EXPECTED['config']}", *EXPECTED["flags"]]
READ = f"--checkpoint={RUN}"


def test_a_run_is_exported(main, tmp_path):
  before, to = sorted(RUN.rglob("*")), tmp_path / "to"
  code, out, err = main(*COMMAND, READ, f"--to={to}")
  assert (code, err) == (0, ""), out
  assert re.search(rf"a llama model in float32 of \S+run, step 4, to {to} \(\d.* KiB\)", out)
  described = json.loads((to / "config.json").read_text())
  assert described["dtype"] == described["torch_dtype"] == "float32"
  assert {path.name for path in to.iterdir()} == {
    *("config.json", "generation_config.json", "model.safetensors"),
    *("tokenizer.json", "tokenizer_config.json"),
  }
  found = folders.tensors_of(to / "model.safetensors")
  stored = plain.arrays(RUN / "checkpoints" / "4")
  for layer, kernel in enumerate(stored["params.layers.mlp.up.kernel"]):
    assert np.array_equal(found[f"model.layers.{layer}.mlp.up_proj.weight"], kernel.T)
  assert np.array_equal(found["lm_head.weight"], stored["params.unembed.kernel"].T)
  assert tokenizer.load(to).size == 256
  assert sorted(RUN.rglob("*")) == before


def words():
  """Returns a tokenizer.json of 37 tokens, as many as the folders' models have."""
  vocabulary = {chr(ord("a") + id_): id_ for id_ in range(37)}
  model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "a"}
  parts = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
  return {"version": "1.0", "added_tokens": [], "model": model, **dict.fromkeys(parts)}


def test_a_folder_that_is_imported_and_exported_is_the_same(main, tmp_path):
  given = tmp_path / "given"
  shutil.copytree(folders.FOLDER / "qwen2", given)
  (given / "tokenizer.json").write_text(json.dumps(words()))
  (given / "tokenizer_config.json").write_text('{"eos_token": "c"}')
  (given / "generation_config.json").write_text('{"top_k":  7}')
  command = ["export", "--config=configs/fsdp8.py:hf", f"--config.model.folder={given}"]
  code, out, err = main(*command, "--config.data.global_batch_size=8", f"--to={tmp_path}/to")
  assert (code, err) == (0, ""), out
  assert f"exported a qwen2 model in float16 of {given} to " in out
  stored, found = (
    folders.tensors_of(tmp_path / name / "model.safetensors") for name in ("given", "to")
  )
  assert {name: (x.dtype, x.shape, x.tobytes()) for name, x in found.items()} == {
    name: (x.dtype, x.shape, x.tobytes()) for name, x in stored.items()
  }
  for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
    assert (tmp_path / "to" / name).read_bytes() == (given / name).read_bytes()
  old, new = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("given", "to"))
  assert hf_config.read(old, "old") == hf_config.read(new, "new")
  assert {key: new[key] for key in old if new[key] != old[key]} == {}


ADAPTERS = {"lora.rank": 2, "lora.alpha": 3.0, "lora.targets": ("query", "up")}
AS_FLAGS = [f"--config.{key}={value}" for key, value in ADAPTERS.items()]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
  """Returns the workdir of a run with adapters, which begins with the other run's parameters."""
  workdir = tmp_path_factory.mktemp("tuned")
  flags = [word.removeprefix("--config.").split("=") for word in EXPECTED["flags"]]
  keys = {key: int(value) for key, value in flags if value.isdecimal()}
  keys |= {"model.vocabulary_size": 256, "model.vocabulary_multiple": 128}
  job = make_job("single", "lm", **{**keys, **ADAPTERS, "checkpoint.initialize_from": str(RUN)})
  state, _, base = restore.first_state(job)
  random = np.random.default_rng(3)

  def drawn(path, leaf):
    if "lora_b" not in jax.tree_util.keystr(path):  # which begins at zero
      return leaf
    return jax.device_put(random.standard_normal(leaf.shape, np.float32), leaf.sharding)

  state = dataclasses.replace(
    state, params=jax.tree_util.tree_map_with_path(drawn, state.params), step=jnp.int32(4)
  )
  record = {"versions": {}, "data": {"name": "rows", "rows": ""}, **base.record()}
  with Checkpointer(epath.Path(workdir) / "checkpoints") as checkpoints:
    part = restore.trained_part(job.program, state)
    checkpoints.save(4, part, config=forms.plain(job.config), record=record)
  return workdir


@pytest.mark.long
def test_adapters_are_exported_alone(main, tuned, tmp_path):
  command = ["export", "--config=configs/single.py", *EXPECTED["flags"], *AS_FLAGS]
  code, out, err = main(*command, f"--checkpoint={tuned}", f"--to={tmp_path}/to")
  assert (code, err) == (0, ""), out
  assert f"exported the adapters of a llama model in float32 of {tuned}, step 4, to " in out
  assert {path.name for path in (tmp_path / "to").iterdir()} == {
    *("adapter_config.json", "adapter_model.safetensors"),
  }
  described = json.loads((tmp_path / "to" / "adapter_config.json").read_text())
  assert (described["r"], described["lora_alpha"]) == (2, 3)
  assert described["target_modules"] == ["q_proj", "up_proj"]
  found = folders.tensors_of(tmp_path / "to" / "adapter_model.safetensors")
  stored = plain.arrays(tuned / "checkpoints" / "4")
  for part in "ab":
    for layer, array in enumerate(stored[f"params.layers.mlp.up.lora_{part}"]):
      name = f"base_model.model.model.layers.{layer}.mlp.up_proj.lora_{part.upper()}.weight"
      np.testing.assert_array_equal(found[name], array.T)
      assert np.any(array)
  assert len(found) == 2 * 2 * 2  # A and B of two layers' two targets


def write_adapter(folder, random, metadata=()):
  """Writes PEFT's two files for the attention's outputs of the folder qwen2; returns A and B."""
  folder.mkdir()
  names = [
    f"base_model.model.model.layers.{n}.self_attn.o_proj.lora_{x}.weight"
    for n in range(2)
    for x in "AB"
  ]
  tensors = {
    n: random.standard_normal((3, 16) if "_A" in n else (16, 3), np.float32) for n in names
  }
  listed = tuple(safetensors_file.Tensor(n, x.shape, "float32") for n, x in tensors.items())
  file = safetensors_file.WeightFile("adapter_model.safetensors", listed, metadata)
  safetensors_file.write_file(epath.Path(folder), file, tensors.values())
  described = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": ["o_proj"]}
  (folder / "adapter_config.json").write_text(json.dumps(described))
  return tensors


@pytest.mark.long
def test_an_adapter_of_peft_is_merged_into_its_base_and_into_no_other(main, tmp_path):
  base, random = tmp_path / "base", np.random.default_rng(2)
  shutil.copytree(folders.FOLDER / "qwen2", base)
  (base / "tokenizer.json").write_text(json.dumps(words()))
  (base / "tokenizer_config.json").write_text('{"eos_token": "c"}')
  adapter = write_adapter(tmp_path / "adapter", random)
  other = (("base_digest", "ab12" * 16), ("base_dtype", "float32"))
  write_adapter(tmp_path / "other", random, other)
  command = ["export", "--config=configs/single.py:hf", f"--config.model.folder={base}", "--merge"]
  command += ["--config.data.global_batch_size=8", "--dtype=float32"]
  code, out, err = main(*command, f"--checkpoint={tmp_path}/adapter", f"--to={tmp_path}/to")
  assert (code, err) == (0, ""), out
  old, new = (folders.tensors_of(x / "model.safetensors") for x in (base, tmp_path / "to"))
  for layer in range(2):
    name = f"model.layers.{layer}.self_attn.o_proj"
    a, b = (adapter[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
    wanted = old[f"{name}.weight"].astype(np.float32) + 2 * b @ a
    np.testing.assert_allclose(new[f"{name}.weight"], wanted, rtol=1e-5, atol=1e-5)
  code, _, err = main(*command, f"--checkpoint={tmp_path}/other", f"--to={tmp_path}/new")
  assert (code, "adapter of another base than" in err, "is ab12ab12ab12," in err) == (2, True, True)
  assert not (tmp_path / "new").exists()


def test_adapters_are_not_all_that_was_trained(main, tuned, tmp_path):
  more = "--config.training.trainable=('unembed/*',)"
  command = [*COMMAND, *AS_FLAGS, more, f"--checkpoint={tuned}", f"--to={tmp_path}/new"]
  code, _, err = main(*command)
  assert code == 2
  assert "besides the adapters 1 parameters were trained (such as unembed/kernel)" in err
  assert not list(tmp_path.iterdir())


REFUSALS = {
  "nothing to merge": ([READ, "--to={new}", "--merge"], ["has no adapters (lora.rank=0)"]),
  "no folder": ([READ], ["name the folder to write with --to=FOLDER"]),
  "a folder below a file": ([READ, "--to={full}/a/b"], ["a is a file, not a folder; give anoth"]),
  "what no family has": (
    [READ, "--to={new}", "--config.model.attention_scale=0.5", "--config.model.logits_soft_cap=9"],
    ["no model_type of transformers is this model; the nearest, '", "logits_soft_cap=9.0"],
  ),
  "an unknown dtype": (
    [READ, "--to={new}", "--dtype=bfloat"],
    ["--dtype='bfloat': one of float64, float32, bfloat16, float16", "did you mean 'bfloat16'"],
  ),
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
