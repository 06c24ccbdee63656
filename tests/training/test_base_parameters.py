"""Frozen parameters are read where the run found them; its checkpoints have what it trains."""

import dataclasses
import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from partitioning.rules import named_leaves
from runtime import forms
from tests.helpers.jobs import first_state, make_job
from tests.training import runs
from training import base_parameters, restore
from training.base_parameters import ParameterReader
from training.checkpointing import integrity, reading
from training.checkpointing.checkpointer import Checkpointer

TRAINED = {"layer_1/bias", "layer_4/kernel", "layer_4/bias"}
KEYS = {
  **runs.KEYS,
  "training.steps": 6,
  "checkpoint.every_steps": 2,
  "evaluation.every_steps": 0,
  "optimizer.warmup_steps": 0,
  "optimizer.schedule": "constant",
}


FROZEN = {"training.trainable": ("layer_4/*", "layer_1/bias")}


class QuickJob(runs.QuickJob):
  """A job that compiles nothing which another one of these has compiled."""

  _compiled = {}  # noqa: RUF012 (of all jobs)


@functools.cache
def job(base="", strategy="single", **more):
  """Returns a classifier of which a part is trained, from a base or from scratch."""
  frozen = FROZEN if base else {}
  keys = {**KEYS, **frozen, "checkpoint.initialize_from": base, **more}
  made = make_job(strategy, "mlp", **keys)
  return QuickJob(**{field.name: getattr(made, field.name) for field in dataclasses.fields(made)})


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
  """Returns the workdirs of two runs that save all parameters, of different seeds."""
  folder = tmp_path_factory.mktemp("bases")
  for seed in (1, 2):
    save(folder / str(seed), first_state(job(seed=seed)), job())
  return folder / "1", folder / "2"


def save(workdir, state, prepared, base=None):
  """Writes a checkpoint of step 4."""
  state = dataclasses.replace(state, step=jnp.int32(4))
  record = {"versions": {}, "data": {"name": "rows", "rows": ""}}
  tree = vars(state)
  if base is not None:
    record |= base.record()
    tree = restore.trained_part(prepared.program, state)
  with Checkpointer(epath.Path(workdir) / integrity.FOLDER) as checkpoints:
    checkpoints.save(4, tree, config=forms.plain(prepared.config), record=record)


def params_of(workdir, step, prepared):
  """Returns name -> array of the parameters that `evaluate` reads."""
  found, params, _ = base_parameters.model_state(prepared, f"{workdir}/{step}")
  assert found == step
  return {name: np.asarray(x) for name, x in named_leaves(params).items()}


@pytest.fixture(scope="module")
def whole(bases, tmp_path_factory):
  """Returns the workdir of a run from the first base that was not interrupted."""
  folder = tmp_path_factory.mktemp("whole")
  runs.train(folder, runs.source(), prepared=job(str(bases[0])))
  return folder


def test_checkpoints_have_only_what_is_trained(bases, whole):
  stored = reading.stored_arrays(epath.Path(whole) / integrity.FOLDER / "6")
  assert {n.removeprefix("params/") for n in stored if n.startswith("params/")} == TRAINED
  ours, base = params_of(whole, 6, job(str(bases[0]))), params_of(bases[0], 4, job())
  assert {n for n in ours if ours[n].tobytes() != base[n].tobytes()} == TRAINED
  # The config need not name the base: the record does.
  alone = job("", **FROZEN)
  found = params_of(whole, 6, alone)
  assert all(found[name].tobytes() == ours[name].tobytes() for name in ours)


def test_resumes_to_the_bit_without_naming_the_base_again(bases, whole, tmp_path):
  rows = runs.source()
  short = {"training.steps": 3}
  runs.train(tmp_path, rows, prepared=job(str(bases[0]), **short))
  again = job("", **FROZEN)
  runs.train(tmp_path, rows, prepared=again)
  ours, wanted = (params_of(folder, 6, again) for folder in (tmp_path, whole))
  assert all(ours[name].tobytes() == wanted[name].tobytes() for name in wanted)
  ours, wanted = ([x for x in runs.lines(f) if "loss" in x] for f in (tmp_path, whole))
  assert ours == wanted
  assert len(wanted) == 6
  stored = reading.stored_arrays(epath.Path(tmp_path) / integrity.FOLDER / "6")
  assert "params/layer_2/kernel" not in stored


def test_another_mesh_reads_it_and_has_the_same_digest(bases, whole):
  digests = set()
  for strategy in ("single", "dp2_fsdp2_tp2"):
    prepared = job(str(bases[0]), strategy)
    state, _, base = restore.first_state(prepared)
    digests.add(base.digest)
    assert base.step == 4
    _, frozen = prepared.program.split(state.params)
    altered = {n: x if n != "layer_2/bias" else -x for n, x in named_leaves(frozen).items()}
    assert ParameterReader(prepared).digest(altered) not in digests
  assert len(digests) == 1
  other = params_of(whole, 6, job(str(bases[0]), "dp2_fsdp2_tp2"))
  for name, x in params_of(whole, 6, job(str(bases[0]))).items():
    assert other[name].tobytes() == x.tobytes()


def test_another_base_and_a_missing_one_are_refused_in_one_message(bases, whole, tmp_path):
  with pytest.raises(ValueError, match="was trained with other frozen parameters than those of"):
    params_of(whole, 6, job(str(bases[1])))
  shutil.copytree(whole, tmp_path / "run")
  folder = epath.Path(tmp_path / "run")
  record, newest = restore.RunCheckpoints(job(str(bases[1])), folder).check_resume(runs.source())
  with pytest.raises(ValueError, match=r"its record has [0-9a-f]{12}, of .*/4; give those, --conf"):
    restore.RunCheckpoints(job(str(bases[1])), folder).begin(record, newest=newest)
  with pytest.raises(ValueError, match=r"(?s)cannot be read from .*gone.*if they have moved, give"):
    params_of(whole, 6, job(str(tmp_path / "gone")))
  # A copy elsewhere is the same base.
  shutil.copytree(bases[0], tmp_path / "copy")
  assert params_of(whole, 6, job(str(tmp_path / "copy")))


def test_a_run_that_has_saved_all_continues_to(bases, tmp_path):
  named, alone = job(str(bases[0])), job("", **FROZEN)
  state = first_state(alone)
  kernel = np.asarray(state.params["layer_2"]["kernel"])
  save(tmp_path, state, alone)
  start = restore.RunCheckpoints(named, epath.Path(tmp_path)).begin({})
  assert start.base is None
  assert start.saved_part(start.state) == vars(start.state)
  np.testing.assert_array_equal(start.state.params["layer_2"]["kernel"], kernel)
  start.checkpointer.close()


def test_a_rollback_keeps_the_frozen_parameters(bases, whole, tmp_path):
  roll_back = {"training.on_bad_step": "roll_back"}
  runs.train(tmp_path, runs.source({4: np.inf}), prepared=job(str(bases[0]), **roll_back))
  [made] = runs.rollbacks(tmp_path)
  assert made["rolled_back"] == 5
  ours, wanted = (params_of(folder, 6, job(str(bases[0]))) for folder in (tmp_path, whole))
  same = {name for name in wanted if ours[name].tobytes() == wanted[name].tobytes()}
  assert same == {*wanted} - TRAINED


# ---- Adapters ----


@functools.cache
def decoder(**keys):
  small = {"model.layers": 1, "data.sequence_length": 6, "data.global_batch_size": 2}
  return make_job("single", "lm", **small, **keys)


@pytest.fixture(scope="module")
def base_decoder(tmp_path_factory):
  """Returns the workdir of a decoder without adapters, and its parameters by name."""
  folder = tmp_path_factory.mktemp("decoder")
  state = first_state(decoder())
  save(folder, state, decoder())
  return folder, {name: np.asarray(x) for name, x in named_leaves(state.params).items()}


RANK = {"lora.rank": 2, "lora.targets": ("query",)}


@pytest.mark.long
def test_adapters_are_drawn_where_the_base_has_none(base_decoder):
  folder, wanted = base_decoder
  bfloat16 = {"training.frozen_dtype": "bfloat16"}
  prepared = decoder(**RANK, **bfloat16, **{"checkpoint.initialize_from": str(folder)})
  state, origin, base = restore.first_state(prepared)
  assert "starts with the parameters of" in origin
  assert base.dtype == "bfloat16"
  found = {name: np.asarray(x) for name, x in named_leaves(state.params).items()}
  for name, x in wanted.items():
    assert found[name].tobytes() == x.astype(jnp.bfloat16).tobytes(), name
  drawn = {name: found[name] for name in found.keys() - wanted.keys()}
  assert {*drawn} == {f"layers/attention/query/lora_{x}" for x in "ab"}
  assert all(x.dtype == np.float32 for x in drawn.values())
  fresh = named_leaves(jax.device_get(prepared.initial_state().params))
  for name, x in drawn.items():
    np.testing.assert_array_equal(x, fresh[name])
  assert drawn["layers/attention/query/lora_a"].std() > 0.05
  assert not drawn["layers/attention/query/lora_b"].any()


@pytest.mark.long
def test_a_run_starts_from_one_with_adapters_and_has_its_base(base_decoder, tmp_path):
  folder, wanted = base_decoder
  first = decoder(**RANK, **{"checkpoint.initialize_from": str(folder)})
  _, _, base = restore.first_state(first)
  state = first_state(first)  # trained adapters, beside other frozen parameters than the base's
  save(tmp_path / "first", state, first, base)
  more = {**RANK, "lora.targets": ("query", "up")}
  second = decoder(**more, **{"checkpoint.initialize_from": str(tmp_path / "first")})
  found, _, new = restore.first_state(second)
  found = {name: np.asarray(x) for name, x in named_leaves(found.params).items()}
  assert all(found[name].tobytes() == x.tobytes() for name, x in wanted.items())
  adapter = state.params["layers"]["attention"]["query"]
  for name in ("lora_a", "lora_b"):
    np.testing.assert_array_equal(found[f"layers/attention/query/{name}"], adapter[name])
  assert not found["layers/mlp/up/lora_b"].any()
  assert new.digest == base.digest
  first_run = {"checkpoint.initialize_from": str(tmp_path / "first")}
  for keys, said in (
    ({**RANK, "lora.rank": 3}, r"query/lora_a: float32\[1, 40, 2\] in the checkpoint, fl"),
    ({**more, "lora.alpha": 9.0}, r"/4 has other adapters: lora\.alpha=9\.0 here, and 16\.0 th"),
    ({}, r"query/lora_a: .* in the checkpoint, absent here"),
  ):
    with pytest.raises(ValueError, match=said):
      restore.first_state(decoder(**keys, **first_run))
  for other, said in (
    (decoder(), r"/4 has other adapters: lora\.rank=0 here, and 2 there; lora\.targets="),
    (decoder(**more), r"lora\.targets=\['query', 'up'\] here, and \['query'\] there"),
  ):
    with pytest.raises(ValueError, match=said):
      base_parameters.model_state(other, str(tmp_path / "first"))
