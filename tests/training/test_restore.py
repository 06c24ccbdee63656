"""How often a start reads what a checkpoint holds."""

import collections
import json

import jax
import numpy as np
import pytest
from etils import epath
from ml_collections import ConfigDict

from configs import base
from configs.schema import finalize
from partitioning.rules import named_leaves
from runtime import files, forms
from tests.interop import folders
from tests.training import runs
from training import base_parameters, restore, run_record
from training.base_parameters import ParameterReader
from training.checkpointing import integrity, reading, resume_policy


def reads(monkeypatch, folder):
  """Returns path below a folder -> how often it is read from here on."""
  counts, read_blocks = collections.Counter(), files.read_blocks

  def counting(path, **more):
    if epath.Path(path).is_relative_to(folder):
      counts[str(epath.Path(path).relative_to(folder))] += 1
    return read_blocks(path, **more)

  monkeypatch.setattr(files, "read_blocks", counting)
  # Else it reads a few bytes of each step.
  monkeypatch.setattr(integrity, "digests_begin", lambda path: True)
  return counts


def test_a_start_reads_each_small_file_of_the_newest_step_once(tmp_path, monkeypatch):
  keys = {"training.steps": 2, "checkpoint.every_steps": 1}
  runs.train(tmp_path, rows := runs.source(), prepared=runs.job(**keys))
  prepared, folder = runs.job(**{**keys, "training.steps": 3}), epath.Path(tmp_path)
  step = folder / "checkpoints" / "2"
  sizes = integrity.file_sizes(step)

  counts = reads(monkeypatch, step)
  checkpoints = restore.RunCheckpoints(prepared, folder)
  record, newest = checkpoints.check_resume(rows)
  start = checkpoints.begin(record, newest=newest)

  assert (start.step, start.known["data"]["name"]) == (2, "rows")
  small = [name for name in sizes if sizes[name] <= reading.SMALL_BYTES]
  assert {"config/metadata", "record/metadata", "commit_success.txt"} <= {*small}
  assert counts == dict.fromkeys((*small, integrity.DIGESTS), 1)


def test_stages_may_change_only_where_no_step_has_been():
  def check(old, new, done):
    keys = {"global_batch_size": 8, "sequence_length": 8}
    keys |= {"batch_size_ramp": (), "sequence_length_ramp": ()}
    before = {**keys, "stages": json.loads(json.dumps(old))}
    run_record._require_same_stages(before, ConfigDict({**keys, "stages": new}), {}, done)

  first, later = (10, {"web": 1.0}), (20, {"code": 1.0})
  check((first, later), (first, later), 30)
  check((first,), (first, later), 19)
  check((first, later), (first,), 19)
  check((), (first,), 9)
  with pytest.raises(ValueError, match=r"data\.stages: up to step 20, which is done, it was"):
    check((first, later), (first,), 20)
  with pytest.raises(ValueError, match="change stages that begin after step 12"):
    check((first,), ((10, {"web": 2.0}),), 12)


# ------------------------------ from a model folder ------------------------------


def folder_job(name="llama", **more):
  start = {"checkpoint.initialize_from": str(folders.FOLDER / name)}
  return folders.job_of(name, "dp4_tp2", "float32", **start, **more)


def test_a_folders_parameters_are_read_and_none_are_drawn(tmp_path):
  job, wanted = folder_job(), folders.read_with_numpy("llama")
  programs = [job.compile_init(*given) for given in ((), (job.placed_state.params,))]
  programs = [compiled.function.as_text() for compiled in programs]
  assert [" xor(" in text for text in programs] == [True, False]  # as random numbers are made
  ParameterReader(job).check_model_folder(tmp_path)
  state, origin, weights = restore.first_state(job)
  assert weights is None
  assert origin == f"starts with the parameters of {folders.FOLDER / 'llama'}"
  assert int(state.step) == 0
  assert jax.tree.structure(state) == jax.tree.structure(job.state)
  for name, array in wanted.items():
    np.testing.assert_array_equal(named_leaves(state.params)[name], array.astype(np.float32))
  assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(state.optimizer))


def test_what_an_optimizer_remembers_of_the_first_parameters_is_of_those_read():
  found, _, _ = restore.first_state(folder_job(**{"optimizer.ema_decays": (0.9,)}))
  table = np.asarray(found.params["embed"]["table"])
  copies = [
    np.asarray(leaf)
    for name, leaf in named_leaves(found.optimizer).items()
    if "averages" in name and name.endswith("embed/table")
  ]
  assert copies
  for copy in copies:
    np.testing.assert_array_equal(copy, table)


def test_a_folder_is_evaluated_as_step_0():
  step, params, variables = base_parameters.model_state(folder_job(), str(folders.FOLDER / "llama"))
  assert (step, variables) == (0, {})
  assert {*named_leaves(params)} == {*folders.read_with_numpy("llama")}


def resumed_config(workdir, done, before, **now):
  """Returns the finalized config of a run that began with the keys `before` and resumes."""
  began = base.get_config("lm")
  began.update_from_flattened_dict(before)
  step = workdir / "checkpoints" / str(done)
  for item in ("config", "record", "state"):
    (step / item).mkdir(parents=True, exist_ok=True)
  began = forms.plain(finalize.finalize(began, "cpu"))
  (step / "config" / "metadata").write_text(json.dumps(began))
  config = base.get_config("lm")
  config.update_from_flattened_dict({**before, **now})
  assert restore.adopt_schedule(config.optimizer, epath.Path(workdir))
  config = finalize.finalize(config, "cpu")
  record = {"old_record": {}, "new_record": {}, "done": done, "workdir": workdir}
  resume_policy.changes(began, forms.plain(config), **record)
  return config


# What a run began with, now, after which step; what warm-up, decay and changes are then.
KEPT = {
  "in the warm-up": ({"steps": 500}, {"steps": 1000}, 14, (25, 0, ())),
  "in the middle": ({"steps": 500}, {"steps": 1000}, 250, (25, 0, ((250, 500, "stretch"),))),
  "in tokens": (
    {"tokens": 500 * 32 * 128, "warmup_tokens": 10 * 32 * 128},
    {"tokens": 1000 * 32 * 128},
    14,
    (10, 0, ((14, 500, "stretch"),)),
  ),
  "in a decay": (
    {"steps": 500, "schedule": "wsd"},
    {"steps": 1000},
    450,
    (25, 100, ((450, 500, "stretch"),)),
  ),
  "restarted": (
    {"steps": 500},
    {"steps": 1000, "schedule_on_resume": "restart"},
    500,
    (25, 0, ((500, 500, "restart"),)),
  ),
}


def dotted(keys):
  return {
    f"{'training' if key in ('steps', 'tokens') else 'optimizer'}.{key}": value
    for key, value in keys.items()
  }


@pytest.mark.parametrize("name", KEPT)
def test_a_run_that_resumes_keeps_its_own_warm_up_and_decay(tmp_path, name):
  """By default both are shares of training.steps, which may change."""
  before, now, done, wanted = KEPT[name]
  config = resumed_config(tmp_path, done, dotted(before), **dotted(now))
  keys = config.optimizer
  assert (keys.warmup_steps, keys.decay_steps, keys.schedule_changes) == wanted


def test_a_new_run_has_no_schedule_to_continue(tmp_path):
  config = base.get_config("lm")
  assert not restore.adopt_schedule(config.optimizer, epath.Path(tmp_path))
  (tmp_path / "checkpoints" / "3" / "state").mkdir(parents=True)  # its config is lost
  (tmp_path / "checkpoints" / "3" / "record").mkdir()
  (tmp_path / "checkpoints" / "3" / "config").mkdir()
  assert not restore.adopt_schedule(config.optimizer, epath.Path(tmp_path))
  assert config == base.get_config("lm")
