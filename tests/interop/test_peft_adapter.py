"""Adapters as PEFT has them: the same update of each kernel, and the same logits in PEFT."""

import math
import pathlib
import subprocess

import jax
import numpy as np
import pytest

from checkpointing.consensus import Together
from checkpointing.naming import nested
from configs import single
from configs.schema import finalize
from interop import export, hf_config, name_maps, peft_adapter
from interop.export_folder import ExportFolder, check
from models import lora, transformer_dims
from partitioning.rules import named_leaves
from tests.interop.test_export import exported
from tests.models import families, write_families
from tests.models.families import FAMILIES, drawn, tokens, tree_of

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
  random, found = np.random.default_rng(5), {}
  for pattern, letters in transformer_dims.parameters(config).items():
    options = pattern.partition("(")[2].partition(")")[0].split("|") if "(" in pattern else [""]
    for one in options:
      name = pattern.replace(f"({'|'.join(options)})", one)
      found[name] = random.standard_normal(transformer_dims.sizes(config, letters))
  return found


def giving(arrays):
  return lambda name, layer: arrays[name] if layer is None else arrays[name][layer]


@pytest.mark.parametrize("case", CASES)
def test_b_a_is_the_update_of_each_kernel(case):
  config, plain, model_type = config_of(case), config_of(case, adapters=False), CASES[case][0]
  with jax.enable_x64(True):
    arrays = arrays_of(config)
    merged = named_leaves(jax.tree.map(np.asarray, lora.merge(config, nested(arrays))))
  described = peft_adapter.adapter_config(config, model_type, None)
  adapters, sizes = peft_adapter.tensors(config, model_type), name_maps.sizes_of(config)
  found = {n: peft_adapter.joined(t, sizes, giving(arrays)) for n, t in adapters.items()}
  assert {name: x.shape for name, x in found.items()} == {n: t.shape for n, t in adapters.items()}
  checked = set()
  for name, tensor in name_maps.tensors(plain, model_type).items():
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
    return peft_adapter.adapter_config(config_of(case), CASES[case][0], "base")["target_modules"]

  assert targets("llama") == ["down_proj", "q_proj"]
  assert targets("gpt2") == ["c_attn", "c_fc", "c_proj"]
  assert targets("gpt2_down") == ["c_attn", "mlp.c_proj"]  # not attn.c_proj


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
    plan = export.planned_adapter(one.config, model_type, "float32", base, {"base": "digest"})
    folder = ExportFolder(check(str(root / "adapter" / case), None))
    export.write(folder, plan, export.Fetcher(tree_of(one, arrays), one.config), Together())
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
