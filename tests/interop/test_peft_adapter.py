"""Adapters as PEFT has them: the same update of each kernel, and the same logits in PEFT."""

import json
import math
import pathlib
import subprocess

import jax
import numpy as np
import pytest

from configs import single
from configs.schema import finalize
from interop import export, hf_config, name_maps, peft_adapter
from interop.export import ExportFolder, check_folder
from models import model_spec
from models.adapters import merge_adapters
from partitioning.rules import named_leaves, nested
from tests.interop import folders
from tests.interop.test_export import exported
from tests.models import families, write_families
from tests.models.families import FAMILIES, drawn, tokens, tree_of
from training.checkpointing.consensus import Together

HERE = pathlib.Path(__file__).parent
PHI_3 = {"window": 7}
# name -> (model_type, keys of model, keys of lora): plain, fused, fused in part, untransposed.
CASES = {
  "llama": ("llama", {}, {"rank": 3, "alpha": 6.0, "targets": ("query", "down")}),
  "gpt2": ("gpt2", FAMILIES["gpt2"], {"rank": 2, "alpha": 5.0}),
  "phi3": ("phi3", PHI_3, {"rank": 3, "alpha": 6.0, "targets": ("query", "value", "gate", "out")}),
  "gemma3": ("gemma3_text", FAMILIES["gemma3"], {"rank": 4, "rs": True}),
  "gpt2_down": ("gpt2", FAMILIES["gpt2"], {"rank": 2, "rs": True, "targets": ("value", "down")}),
}


def flat(case, *, adapters):
  """Returns the overrides of a small decoder, with or without adapters."""
  _, keys, of_lora = CASES[case]
  keys = {**families.SIZES, **{f"model.{key}": value for key, value in keys.items()}}
  return keys | ({f"lora.{key}": value for key, value in of_lora.items()} if adapters else {})


def config_of(case, *, adapters=True):
  config = single.get_config("lm")
  config.update_from_flattened_dict(flat(case, adapters=adapters))
  return finalize.finalize(config, "cpu")


def arrays_of(config):
  """Returns name -> float64 array of the parameters, all of them random."""
  random, found, spec = np.random.default_rng(5), {}, model_spec(config)
  for pattern, letters in spec.parameters.items():
    options = pattern.partition("(")[2].partition(")")[0].split("|") if "(" in pattern else [""]
    for one in options:
      name = pattern.replace(f"({'|'.join(options)})", one)
      found[name] = random.standard_normal(spec.sizes(letters))
  return found


def giving(arrays):
  return lambda name, layer: arrays[name] if layer is None else arrays[name][layer]


@pytest.mark.parametrize("case", CASES)
def test_b_a_is_the_update_of_each_kernel(case):
  config, plain, model_type = config_of(case), config_of(case, adapters=False), CASES[case][0]
  with jax.enable_x64(True):
    arrays = arrays_of(config)
    merged = named_leaves(
      jax.tree.map(np.asarray, merge_adapters(model_spec(config), nested(arrays)))
    )
  described = peft_adapter.adapter_config(model_spec(config), model_type, None)
  adapters, sizes = (
    peft_adapter.tensors(model_spec(config), model_type),
    name_maps.sizes_of(model_spec(config)),
  )
  found = {n: name_maps.joined(t, sizes, giving(arrays)) for n, t in adapters.items()}
  assert {name: x.shape for name, x in found.items()} == {n: t.shape for n, t in adapters.items()}
  checked = set()
  for name, tensor in name_maps.tensors(model_spec(plain), model_type).items():
    base, new = (name_maps.joined(tensor, sizes, giving(x)) for x in (arrays, merged))
    if np.array_equal(base, new):
      continue
    module = name.removesuffix(".weight")
    [target] = {t for t in described["target_modules"] if f".{module}".endswith(f".{t}")}
    rank = described["rank_pattern"].get(target, described["r"])
    alpha = described["alpha_pattern"].get(target, described["lora_alpha"])
    scale = alpha / (math.sqrt(rank) if described["use_rslora"] else rank)
    a, b = (found[f"base_model.model.{module}.lora_{part}.weight"] for part in "AB")
    assert a.shape[0] == b.shape[1] == rank
    update = scale * b @ a
    np.testing.assert_allclose(base + (update.T if described["fan_in_fan_out"] else update), new)
    checked |= {f"base_model.model.{module}.lora_{part}.weight" for part in "AB"}
  assert checked == {*found}


def test_a_target_is_named_so_that_no_other_module_has_its_name():
  def targets(case):
    return peft_adapter.adapter_config(model_spec(config_of(case)), CASES[case][0], "base")[
      "target_modules"
    ]

  assert targets("llama") == ["down_proj", "q_proj"]
  assert targets("gpt2") == ["c_attn", "c_fc", "c_proj"]
  assert targets("gpt2_down") == ["c_attn", "mlp.c_proj"]  # not attn.c_proj


# ------------------------------ reading ------------------------------


def stored(folder, config, model_type, tensors, metadata=(), **keys):
  """Writes an adapter's two files; returns what read_config reads of its config."""
  folder.mkdir()
  described = peft_adapter.adapter_config(model_spec(config), model_type, None) | keys
  (folder / "adapter_config.json").write_text(json.dumps(described))
  folders.write_tensors(folder / "adapter_model.safetensors", tensors)
  return peft_adapter.read_config(str(folder))


@pytest.mark.parametrize("case", CASES)
def test_what_was_exported_is_read_back(case, tmp_path):
  config, model_type = config_of(case), CASES[case][0]
  arrays, sizes = arrays_of(config), name_maps.sizes_of(model_spec(config))
  adapters = peft_adapter.tensors(model_spec(config), model_type)
  tensors = {n: name_maps.joined(t, sizes, giving(arrays)) for n, t in adapters.items()}
  adapter = stored(tmp_path / "a", config, model_type, tensors)
  found = peft_adapter.read(adapter, model_spec(config), model_type)
  assert {*found} == {name for name in arrays if "lora_" in name}
  for name, array in found.items():
    np.testing.assert_array_equal(array, arrays[name])


def test_one_adapter_of_a_fused_module_is_that_of_each_part(tmp_path):
  config, plain = config_of("gpt2"), config_of("gpt2", adapters=False)
  random, tensors = np.random.default_rng(1), {}
  for name, tensor in peft_adapter.tensors(model_spec(config), "gpt2").items():
    rank = config.lora.rank
    b = name.endswith("B.weight")
    tensors[name] = random.standard_normal(
      (tensor.shape[0], rank) if b else (rank, tensor.shape[1])
    )
  adapter = stored(tmp_path / "a", config, "gpt2", tensors, rank_pattern={}, alpha_pattern={})
  arrays = arrays_of(config) | peft_adapter.read(adapter, model_spec(config), "gpt2")
  with jax.enable_x64(True):
    merged = named_leaves(
      jax.tree.map(np.asarray, merge_adapters(model_spec(config), nested(arrays)))
    )
  name = "transformer.h.1.attn.c_attn"
  tensor = name_maps.tensors(model_spec(plain), "gpt2")[f"{name}.weight"]
  base, new = (
    name_maps.joined(tensor, name_maps.sizes_of(model_spec(plain)), giving(x))
    for x in (arrays, merged)
  )
  a, b = (tensors[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
  np.testing.assert_allclose(new - base, (2.5 * b @ a).T)


def test_an_adapter_fills_in_the_keys_of_lora(tmp_path):
  config, plain = config_of("llama"), config_of("llama", adapters=False)
  tensors = {
    n: np.zeros(t.shape) for n, t in peft_adapter.tensors(model_spec(config), "llama").items()
  }
  stored(tmp_path / "a", config, "llama", tensors, lora_dropout=0.1)
  with plain.unlocked():
    peft_adapter.adopt(plain.lora, str(tmp_path / "a"), "llama")
  named = {"dropout": 0.1, "targets": ("layers/attention/query", "layers/mlp/down")}
  assert plain.lora.to_dict() == {**config.lora.to_dict(), **named}
  plain.lora.alpha = 7.0
  with pytest.raises(ValueError, match=r"lora.alpha=7\.0, and 6\.0 there; leave lora.rank"):
    peft_adapter.adopt(plain.lora, str(tmp_path / "a"), "llama")


def test_adapters_of_another_base_or_kind_are_refused(tmp_path):
  config = config_of("llama")
  adapters = peft_adapter.tensors(model_spec(config), "llama")
  tensors = {n: np.zeros(t.shape) for n, t in adapters.items()}
  first, second, *_ = tensors
  wrong = {**tensors, first: np.zeros((3, 7)), "base_model.model.x": np.zeros(2)}
  del wrong[second]
  adapter = stored(tmp_path / "a", config, "llama", wrong)
  with pytest.raises(ValueError, match="it is an adapter of another base:") as caught:
    peft_adapter.read(adapter, model_spec(config), "llama")
  for said in (
    "base_model.model.x is not known",
    f"{first} is F64[3, 7]; the base and lora.rank=3 need [3, 32]",
    f"{second} is missing; the base and lora.rank=3 need [40, 3]",
  ):
    assert said in str(caught.value)
  with pytest.raises(ValueError, match=r"use_dora=True: .*\n  r: a whole number of at least 1"):
    stored(tmp_path / "b", config, "llama", tensors, use_dora=True, r=0)
  with pytest.raises(ValueError, match="it has no tensor of a 'gpt2' model"):
    peft_adapter.adopt(config_of("gpt2", adapters=False).lora, str(tmp_path / "a"), "gpt2")


# ------------------------------ PEFT ------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory):
  """Returns the folder of each case's base, merged model and adapter."""
  root = tmp_path_factory.mktemp("adapters")
  np.savez(root / "given.npz", tokens=tokens())
  for case, (model_type, _, _) in CASES.items():
    one, plain = (
      families.make_job("single", "lm", **flat(case, adapters=x)) for x in (True, False)
    )
    arrays, source = drawn(one), hf_config.write(plain.config.model, 24, model_type)
    base = {name: x for name, x in arrays.items() if "lora" not in name}
    exported(root / "base" / case, plain, base, source=source)
    base = str(root / "base" / case)
    plan = export.planned_adapter(
      model_spec(one.config), model_type, "float32", base, {"base": "digest"}
    )
    folder = ExportFolder(check_folder(str(root / "adapter" / case), None))
    export.write(
      folder, plan, export.fetcher(tree_of(one, arrays), model_spec(one.config)), Together()
    )
    exported(root / "merged" / case, one, arrays, source=source)
  return root


@pytest.mark.transformers
def test_peft_gives_the_logits_of_the_merged_model(written):
  command = [write_families.PYTHONS["5"], HERE / "their_loading.py", "float32"]
  found = []
  for kind in ("merged", "adapter"):
    paths = [written / kind / case for case in CASES]
    command = [*command[:3], written / "given.npz", written / f"{kind}.npz", *paths]
    subprocess.run(command, check=True)
    found.append(np.load(written / f"{kind}.npz"))
  for case in CASES:
    merged, adapter = (one[case] for one in found)
    assert np.abs(merged - adapter).max() <= 3e-5 * np.abs(merged).max(), case
