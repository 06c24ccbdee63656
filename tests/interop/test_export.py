"""Exported folders: tensors, config.json, tokenizers, what is refused and what a kill leaves."""

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
import tokenizers
from etils import epath

from configs import single
from configs.schema import finalize
from input_pipeline.text import tokenizer, train_tokenizer
from interop import export, hf_config, hf_folder, safetensors_file
from interop.export import ExportFolder, bytes_tokenizer, check_folder, tokenizer_files
from models import model_spec, mup
from runtime.exit_codes import ExportError
from tests.interop import folders
from tests.interop.folders import job_of, read_with_numpy
from tests.interop.test_name_maps import stored
from tests.models import families, write_families
from tests.models.families import KEPT, ROWS, tokens, tree_of
from tests.models.test_families import BOUNDS, PUBLISHED, fixture
from tests.processes.stores import groups_of, together
from training.checkpointing.consensus import Together

# ------------------------------ the files of the tokenizer ------------------------------

TEXTS = ["hello\n  wörld", "Ā\0b", "日本 <|endoftext|> ", " a", "", "a  b .", "Ġx", "𝄞\r\n\t"]


def test_bytes_become_a_tokenizer_that_encodes_alike():
  library = tokenizers.Tokenizer.from_str(bytes_tokenizer())
  for text in TEXTS:
    ids = library.encode(text).ids
    assert ids == list(text.encode())
    assert library.decode(ids, skip_special_tokens=False) == text
  assert [library.token_to_id(library.id_to_token(byte)) for byte in range(256)] == [*range(256)]


def test_they_are_read_here_as_the_same_tokens(tmp_path):
  own = tokenizer.ByteTokenizer()
  for name, content in tokenizer_files({}, end=own.end, start=None, special={}).items():
    (tmp_path / name).write_bytes(content)
  back = tokenizer.load(tmp_path)
  assert (back.size, back.end, back.has_bos) == (own.size, own.end, False)
  for text in TEXTS:
    if "\0" not in text:  # a special token, which no document can write
      assert [*back.encode([text])[0]] == [*own.encode([text])[0]]
  generation = json.loads((tmp_path / "generation_config.json").read_text())
  assert generation == {"eos_token_id": 0}


def test_a_bare_tokenizer_json_gets_its_config():
  content = train_tokenizer.train([b"ab ab abc"], 260)
  special = {train_tokenizer.END: 0, "<s>": 3}
  found = tokenizer_files({"tokenizer.json": content}, end=0, start=3, special=special)
  assert found["tokenizer.json"] == content
  assert json.loads(found["tokenizer_config.json"]) == {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
    "bos_token": "<s>",
    "eos_token": train_tokenizer.END,
  }
  assert json.loads(found["generation_config.json"]) == {"bos_token_id": 3, "eos_token_id": 0}


def test_copies_stay_as_they_are():
  copies = {
    "tokenizer.model": b"\0\1",
    "tokenizer_config.json": b'{"tokenizer_class":   "LlamaTokenizer"}',
    "generation_config.json": b'{"eos_token_id": [1, 2]}',
    "chat_template.jinja": b"{{ messages }}",
  }
  assert tokenizer_files(copies, end=2, start=1, special={}) == copies


@pytest.mark.parametrize(
  "template", ["T", [{"name": "tools", "template": "U"}, {"name": "default", "template": "T"}]]
)
def test_what_older_readers_do_not_know_is_renamed(template):
  copies = {
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b'{"tokenizer_class": "TokenizersBackend", "eos_token": "e"}',
    "chat_template.json": json.dumps({"chat_template": template}).encode(),
    "chat_template.jinja": b"of the tokenizer, which data.chat_template replaces",
  }
  found = tokenizer_files(copies, end=2, start=None, special={})
  config = json.loads(found["tokenizer_config.json"])
  assert config == {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "e"}
  assert found["chat_template.jinja"] == b"T"
  assert "chat_template.json" not in found


# ------------------------------ the folder ------------------------------


def begun(final):
  folder = ExportFolder(check_folder(str(final), None))
  folder.begin()
  return folder


def test_an_empty_folder_may_be_there_and_links_are_followed(tmp_path):
  (tmp_path / "there").mkdir()
  (tmp_path / "link").symlink_to("there")
  folder = begun(tmp_path / "link")
  folder.write("a.json", "{}")
  folder.commit()
  assert (tmp_path / "there" / "a.json").exists()
  assert (tmp_path / "link").is_symlink()


def test_two_exports_to_one_folder(tmp_path):
  folder = begun(tmp_path / "model")
  with pytest.raises(ValueError, match=r"another export is writing .*model\.exporting; wait"):
    check_folder(str(tmp_path / "model"), None)
  with pytest.raises(ValueError, match="another export is writing"):
    ExportFolder(folder.final).begin()
  folder.remove()


def test_something_appears_meanwhile(tmp_path):
  folder = begun(tmp_path / "model")
  (tmp_path / "model").mkdir()
  (tmp_path / "model" / "notes").write_text("mine")
  with pytest.raises(FileExistsError, match=r"written there meanwhile.*model"):
    folder.commit()
  folder.remove()
  assert (tmp_path / "model" / "notes").read_text() == "mine"


def test_refusals_change_nothing(tmp_path):
  (tmp_path / "file").write_text("")
  (tmp_path / "full").mkdir()
  for name in "abcdefg":
    (tmp_path / "full" / name).write_text("")
  (tmp_path / "x.exporting").mkdir()
  (tmp_path / "x.exporting" / "thesis.tex").write_text("")
  (tmp_path / "y.exporting").symlink_to("full")
  steps = tmp_path / "run" / "checkpoints"
  (steps / "4").mkdir(parents=True)
  before = sorted(map(str, tmp_path.rglob("*")))
  for name, said in {
    "file": "file is a file; give a folder that is new or empty",
    "full": r"full is not empty \(it has a, b, c, d, e and 2 more\)",
    "x": r"x\.exporting has thesis\.tex, which no export writes",
    "y": r"y\.exporting is not a folder",
    "run/checkpoints": "it is among the checkpoints of the run",
    "run/checkpoints/4/model": "it is among the checkpoints of the run",
  }.items():
    with pytest.raises(ValueError, match=said):
      check_folder(str(tmp_path / name), epath.Path(steps))
  assert check_folder(str(tmp_path / "run" / "model"), epath.Path(steps)).name == "model"
  assert sorted(map(str, tmp_path.rglob("*"))) == before


# ------------------------------ what is written ------------------------------

HERE = pathlib.Path(__file__).parent
BYTES = {"end": 0, "start": None}


def plan_of(config, dtype, source=None):
  described = described_of(config, dtype, source)
  return export.planned(
    model_spec(config), described, dtype, tokenizer_files({}, **BYTES, special={})
  )


def described_of(config, dtype="float32", source=None):
  """Returns the config.json of a config's model."""
  ours, length = mup.plain_keys(config.model), config.data.sequence_length
  return export.model_config(ours, length, dtype, **BYTES, source=source or {})


def exported(to, job, arrays, dtype="float32", source=None):
  """Writes a folder; returns its tensors and its config.json."""
  plan = plan_of(job.config, dtype, source)
  folder = ExportFolder(export.check_folder(str(to), None))
  params = tree_of(job, arrays)
  export.write(folder, plan, export.fetcher(params, model_spec(job.config)), Together())
  assert sum(path.stat().st_size for path in to.iterdir()) == plan.bytes
  found, index = {}, {}
  if (to / hf_folder.INDEX).exists():
    index = json.loads((to / hf_folder.INDEX).read_text())["weight_map"]
  for path in sorted(to.glob("*.safetensors")):
    part = folders.tensors_of(path)
    assert not index or {index.pop(tensor) for tensor in part} == {path.name}
    found |= part
  assert not index
  return found, json.loads((to / hf_folder.CONFIG).read_text())


# Of one with fused kernels; test_read_weights joins the tensors of all families.
def test_a_folder_that_was_imported_is_exported_bit_by_bit(tmp_path):
  name = "phi3"
  dtype = str(next(iter(stored(name).values())).dtype)
  source = folders.config_of(name)
  with jax.enable_x64(True):
    found, described = exported(tmp_path / "to", job_of(name), read_with_numpy(name), dtype, source)
  wanted = stored(name)
  assert found.keys() == wanted.keys()
  for tensor, array in wanted.items():
    assert (found[tensor].dtype, found[tensor].shape) == (array.dtype, array.shape)
    assert found[tensor].tobytes() == array.tobytes()
  for version in folders.VERSIONS:
    original = folders.config_of(name, version)
    assert hf_config.read(described, "new") == hf_config.read(original, "old")
  assert described["dtype"] == described["torch_dtype"] == dtype
  assert described["eos_token_id"] == source["eos_token_id"]


# Fused and untransposed kernels, a padded vocabulary; a mesh that splits every dim.
def test_tensors_of_sharded_parameters_in_several_files(tmp_path, monkeypatch):
  family, dtype = "gpt2", jnp.bfloat16
  monkeypatch.setattr(safetensors_file, "MOST_BYTES", 20_000)
  keys = {"data.global_batch_size": 8, "model.vocabulary_multiple": 8}
  job = families.job_of(family, "dp2_fsdp2_tp2", **keys)
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


@pytest.mark.parametrize("preset", ["gpt2_124m", "gemma2_9b"])
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
  found, plain = (described_of(one) for one in (config, other))
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
  monkeypatch.setattr(safetensors_file, "MOST_BYTES", 4000)
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
    paths = [root / dtype / family for family in write_families.known_to(version)]
    subprocess.run([*command, given, root / "written.npz", *paths], check=True)
    with np.load(root / "written.npz") as written:
      return dict(written)

  return load


@pytest.mark.transformers
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("version", write_families.PYTHONS)
def test_transformers_loads_it_without_a_warning_and_with_the_same_logits(version, dtype, loaded):
  found = loaded(version, dtype)
  for family in write_families.known_to(version):
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
    folder = ExportFolder(export.check_folder(str(to), None))
    try:
      export.write(folder, plan, fetch_of(arrays, []), Together())
    except Killed:
      if folder._lock is not None:
        os.close(folder._lock)  # as the kernel does
    return {path.name for path in to.iterdir()} if to.exists() else set()

  for owner, name in ((os, "write"), (os, "replace"), (os, "rename"), (os, "mkdir"), (os, "fsync")):
    killing(owner, name)
  killing(safetensors_file, "_write")
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
    assert hf_folder.CONFIG not in left or left == names(plan)
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
  described = described_of(finalize.finalize(config, "cpu"))
  assert (described["model_type"], described["logits_scaling"]) == ("granite", 4.0)
  config.model.base_width = 128
  described = described_of(finalize.finalize(config, "cpu"))
  assert described["model_type"] == "llama"


def test_a_gpt_2_without_biases_has_zeros_in_their_place(tmp_path):
  job = families.job_of("gpt2", **{"model.biases": "mlp"})
  arrays = families.drawn(job)
  found, described = exported(tmp_path / "to", job, arrays, "float32")
  assert described["model_type"] == "gpt2"
  every = families.drawn(families.job_of("gpt2"))
  absent = {name: np.zeros_like(x) for name, x in every.items() if name not in arrays}
  assert len(absent) == 4
  wanted = write_families.converted("gpt2", {**arrays, **absent})
  assert found.keys() == wanted.keys()
  for name, array in wanted.items():
    np.testing.assert_array_equal(found[name], array, err_msg=name)
