"""Exported folders: tensors, config.json, and processes that fail."""

import json
import os
import pathlib
import shutil
import subprocess
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from checkpointing.consensus import Together
from configs import single
from configs.schema import finalize
from interop import export, export_folder, hf_config, safetensors_writer
from interop.export_folder import CONFIG_FILE, ExportFolder
from interop.tokenizer_export import tokenizer_files
from runtime.exit_codes import ExportError
from tests.interop import folders
from tests.interop.test_name_maps import job_of, read_with_numpy, stored
from tests.models import families, write_families
from tests.models.families import KEPT, ROWS, tokens, tree_of
from tests.models.test_families import BOUNDS, PUBLISHED, fixture
from tests.processes.stores import groups_of, together

HERE = pathlib.Path(__file__).parent
BYTES = {"end": 0, "start": None}


def plan_of(config, dtype, source=None):
  described = export.model_config(config, dtype, **BYTES, source=source or {})
  return export.planned(config, described, dtype, tokenizer_files({}, **BYTES, special={}))


def exported(to, job, arrays, dtype="float32", source=None):
  """Writes a folder; returns its tensors and its config.json."""
  plan = plan_of(job.config, dtype, source)
  folder = ExportFolder(export_folder.check(str(to), None))
  params = tree_of(job, arrays)
  export.write(folder, plan, export.Fetcher(params, job.config), Together())
  assert sum(path.stat().st_size for path in to.iterdir()) == plan.bytes
  found, index = {}, {}
  if (to / safetensors_writer.INDEX_FILE).exists():
    index = json.loads((to / safetensors_writer.INDEX_FILE).read_text())["weight_map"]
  for path in sorted(to.glob("*.safetensors")):
    part = folders.tensors_of(path)
    assert not index or {index.pop(tensor) for tensor in part} == {path.name}
    found |= part
  assert not index
  return found, json.loads((to / CONFIG_FILE).read_text())


# Of one with fused kernels; the others are much the same.
@pytest.mark.parametrize(
  "name",
  [n if n == "phi3" else pytest.param(n, marks=pytest.mark.transformers) for n in folders.NAMES],
)
def test_a_folder_that_was_imported_is_exported_bit_by_bit(name, tmp_path):
  dtype = str(next(iter(stored(name).values())).dtype)
  source = folders.config_of(name)
  with jax.enable_x64(True):
    found, described = exported(tmp_path / "to", job_of(name), read_with_numpy(name), dtype, source)
  assert found.keys() == stored(name).keys()
  for tensor, array in stored(name).items():
    assert (found[tensor].dtype, found[tensor].shape) == (array.dtype, array.shape)
    assert found[tensor].tobytes() == array.tobytes()
  for version in folders.VERSIONS:
    original = folders.config_of(name, version)
    assert hf_config.read(described, "new") == hf_config.read(original, "old")
  assert described["dtype"] == described["torch_dtype"] == dtype
  assert described["eos_token_id"] == source["eos_token_id"]


# Fused and untransposed kernels, grouped heads, a padded vocabulary; meshes that split every dim.
@pytest.mark.parametrize(
  ("family", "strategy", "dtype"),
  [("gpt2", "fsdp8", jnp.bfloat16), ("gemma3", "dp2_fsdp2_tp2", jnp.float32)],
)
def test_tensors_of_sharded_parameters_in_several_files(
  family, strategy, dtype, tmp_path, monkeypatch
):
  monkeypatch.setattr(safetensors_writer, "MOST_BYTES", 20_000)
  keys = {"data.global_batch_size": 8, "model.vocabulary_multiple": 8}
  job = families.job_of(family, strategy, **keys)
  arrays = families.drawn(job)
  found, _ = exported(tmp_path / "to", job, arrays, jnp.dtype(dtype).name)
  real = arrays["embed/table"][: job.config.model.vocabulary_size]
  wanted = write_families.converted(family, arrays | {"embed/table": real})
  assert found.keys() == wanted.keys()
  for name, array in wanted.items():
    assert found[name].dtype == dtype
    np.testing.assert_array_equal(found[name], array.astype(dtype), err_msg=name)
  sizes = [path.stat().st_size for path in (tmp_path / "to").glob("*.safetensors")]
  assert len(sizes) > 2


@pytest.mark.parametrize("preset", ["gpt2_124m", "llama3_405b", "qwen3_8b", "gemma2_9b"])
def test_a_preset_has_the_parameters_that_were_published(preset):
  config = finalize.finalize(single.get_config(f"model={preset}"), "cpu")
  plan = plan_of(config, "bfloat16")
  assert sum(file.bytes for file in plan.files) == 2 * PUBLISHED[preset]
  assert all(file.bytes <= 5e9 for file in plan.files)


def test_what_training_alone_uses_has_no_part_in_it():
  keys = {"dropout_rate": 0.1, "context_attention": "gather", "separate_documents": True}
  config, other = (finalize.finalize(single.get_config("gpt2_124m"), "cpu") for _ in range(2))
  with config.unlocked():
    config.model.update(keys)
  found, plain = (
    export.model_config(one, "float32", **BYTES, source={}) for one in (config, other)
  )
  assert {key for key in found if found[key] != plain[key]} == {"resid_pdrop"}


# ------------------------------ several processes ------------------------------

COUNT = 3


def on_processes(to, plan, fetches):
  """Exports on some processes, which are threads here; returns what each returned or raised."""
  members = [Together(group, timeout_seconds=20) for group in groups_of(COUNT)]

  def act(member, fetch):
    return lambda: export.write(ExportFolder(epath.Path(to)), plan, fetch, member)

  return together(*(act(*pair) for pair in zip(members, fetches, strict=True)))


def fetch_of(arrays, asked):
  """Returns a function that gives parameters, and notes which it was asked for."""

  def fetch(name, place, dtype, here):
    asked.append((name, place))
    return arrays[name][place] if here else None

  return fetch


@pytest.fixture
def small(monkeypatch):
  """Returns arrays and the plan of a model with seven files of weights."""
  monkeypatch.setattr(safetensors_writer, "MOST_BYTES", 4000)
  config, arrays = job_of("llama").config, read_with_numpy("llama")
  plan = plan_of(config, "float64")
  assert len(plan.files) % COUNT
  return arrays, plan


def test_each_process_writes_files_and_all_take_part_in_each_collective(small, tmp_path):
  arrays, plan = small
  asked = [[] for _ in range(COUNT)]
  assert on_processes(tmp_path / "to", plan, [fetch_of(arrays, a) for a in asked]) == [None] * COUNT
  assert asked[0] == asked[1] == asked[2]
  assert len({*asked[0]}) == len(asked[0])
  found = {}
  for file in plan.files:
    found |= folders.tensors_of(tmp_path / "to" / file.name)
  for name, array in stored("llama").items():
    np.testing.assert_array_equal(found[name], array.astype(np.float64))


def test_where_one_cannot_write_all_say_why_and_nothing_is_left(small, tmp_path):
  arrays, plan = small
  asked = [[] for _ in range(COUNT)]
  taken = plan.files[COUNT + 1].name  # of process 1, in the second round

  def fetch(name, layer, dtype, here):
    if len(asked[1]) == 2:
      (tmp_path / "to.exporting" / taken).write_text("")
    return fetch_of(arrays, asked[1])(name, layer, dtype, here)

  raised = on_processes(
    tmp_path / "to", plan, [fetch_of(arrays, asked[0]), fetch, fetch_of(arrays, asked[2])]
  )
  [said] = {str(error) for error in raised}
  assert all(isinstance(error, ExportError) for error in raised)
  assert "to failed, and nothing of it is left: process 1: " in said
  assert taken in said
  assert asked[0] == asked[1] == asked[2]
  assert list(tmp_path.iterdir()) == []


# ------------------------------ transformers ------------------------------


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
  """Returns a function that has a version of transformers load a folder of each family."""
  root = tmp_path_factory.mktemp("folders")
  given = root / "given.npz"
  np.savez(given, tokens=tokens())
  for family in families.FAMILIES:
    for dtype in BOUNDS:
      job = families.job_of(family)
      exported(root / dtype / family, job, families.drawn(job), dtype)

  def load(version, dtype):
    command = [write_families.PYTHONS[version], HERE / "their_loading.py", dtype]
    paths = [root / dtype / family for family in families.FAMILIES]
    subprocess.run([*command, given, root / "written.npz", *paths], check=True)
    with np.load(root / "written.npz") as written:
      return dict(written)

  return load


@pytest.mark.transformers
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("version", write_families.PYTHONS)
def test_transformers_loads_it_without_a_warning_and_with_the_same_logits(version, dtype, loaded):
  found = loaded(version, dtype)
  for family in families.FAMILIES:
    assert found[f"{family}/ids"].tolist() == list("def f(x):\n  return 'ä'".encode())
    wanted = fixture(family)
    error = np.abs(found[family][:ROWS, KEPT] - wanted).max()
    assert error <= BOUNDS[dtype] * np.abs(wanted).max(), (family, error)


# ------------------------------ kills ------------------------------


class Killed(BaseException):
  """Ends an export as a kill does: nothing of it runs any more."""


def test_a_kill_leaves_nothing_that_loads(small, tmp_path, monkeypatch):
  arrays, plan = small
  calls, until = [], [0]

  def killing(owner, name):
    does = getattr(owner, name)

    def call(*arguments, **keys):
      calls.append(name)
      if len(calls) == until[0]:
        raise Killed
      return does(*arguments, **keys)

    monkeypatch.setattr(owner, name, call)

  def killed(to, moment):
    """Exports, and kills it before one of its calls; returns the names of what is there."""
    calls.clear()
    until[0] = moment
    folder = ExportFolder(export_folder.check(str(to), None))
    try:
      export.write(folder, plan, fetch_of(arrays, []), Together())
    except Killed:
      if folder._lock is not None:
        os.close(folder._lock)  # as the kernel does
    return {path.name for path in to.iterdir()} if to.exists() else set()

  for owner, name in ((os, "write"), (os, "replace"), (os, "rename"), (os, "mkdir"), (os, "fsync")):
    killing(owner, name)
  killing(safetensors_writer.Writer, "_write")
  monkeypatch.setattr(ThreadPoolExecutor, "submit", at_once)
  assert killed(tmp_path / "whole", 0) == names(plan)
  count = len(calls)
  assert count > 50
  for moment in {*range(1, count, 5), *range(count - 15, count + 1)}:
    there = killed(tmp_path / "to", moment)
    assert there in (set(), names(plan))
    if there:  # killed after it had its name
      shutil.rmtree(tmp_path / "to")
      continue
    partial = tmp_path / "to.exporting"
    left = {path.name for path in partial.iterdir()} if partial.exists() else set()
    assert CONFIG_FILE not in left or left == names(plan)
  assert killed(tmp_path / "to", 0) == names(plan)
  assert not (tmp_path / "to.exporting").exists()


def names(plan):
  return {*plan.small, *(file.name for file in plan.files)}


def at_once(executor, does, *arguments):
  """Runs what a thread would, so that a kill ends it at the same place each time."""
  done = Future()
  done.set_result(does(*arguments))
  return done


def test_a_model_with_mup_is_one_that_divides_its_logits():
  config = single.get_config("lm")
  config.model.base_width = 32
  described = export.model_config(finalize.finalize(config, "cpu"), "float32", **BYTES, source={})
  assert (described["model_type"], described["logits_scaling"]) == ("granite", 4.0)
  config.model.base_width = 128
  described = export.model_config(finalize.finalize(config, "cpu"), "float32", **BYTES, source={})
  assert described["model_type"] == "llama"
