"""What may change when a run goes on: each row of the table, and every key of every recipe."""

import functools
import json

import pytest

from configs import base
from configs.keys.row import ACCEPT, MAY_CHANGE, REFUSED
from configs.schema import finalize
from runtime import forms
from training.checkpointing.resume_policy import changes

RECORD = {
  "versions": {"code": "abc", "jax": "0.10.2"},
  "data": {"version": "1.0.0", "fingerprint": "f00"},
}


def resolved(**overrides):
  return json.loads(resolved_text(json.dumps(overrides)))


@functools.cache
def resolved_text(overrides):
  config = base.get_config("lm")
  config.update_from_flattened_dict(json.loads(overrides))
  return finalize.finalize(config, "cpu").to_json_best_effort()


def judge(overrides, *, accept=(), done=100, record=None, old_record=RECORD, workdir="runs/x"):
  return changes(
    resolved(),
    resolved(**overrides),
    old_record=old_record,
    new_record=RECORD if record is None else record,
    accept=accept,
    done=done,
    workdir=workdir,
  )


# More steps, and what `training.restore.adopt_schedule` keeps with them.
LONGER = {"training.steps": 400, "optimizer.warmup_steps": 10}

# A few rows of the table of docs/checkpoints.md (test_docs.py has all): key -> another value.
ROWS = {
  MAY_CHANGE: {
    "mesh.data": 8,
    "partitioning.max_replicated_bytes": 5,
    "training.on_bad_step": "roll_back",
    "model.context_attention": "gather",
    "partitioning.collective_matmul": True,
  },
  ACCEPT: {
    "optimizer.learning_rate": 0.5,
    "optimizer.schedule": "constant",
    "data.global_batch_size": 64,
    "training.rematerialization": "full",
    "lora.alpha": 8.0,
  },
  REFUSED: {
    "model.layers": 9,
    "training.trainable": ["layer_1/*"],
    "optimizer.name": "sgd",
    "data.sequence_length": 9,
    "seed": 1,
  },
}


@pytest.mark.parametrize("key", ROWS[MAY_CHANGE])
def test_may_change(key):
  assert judge({key: ROWS[MAY_CHANGE][key]}) == {**RECORD, "accepted_changes": []}


@pytest.mark.parametrize("key", ROWS[ACCEPT])
def test_resumes_when_accepted_and_is_recorded(key):
  overrides = {key: ROWS[ACCEPT][key]}
  with pytest.raises(ValueError, match="computed differently") as refusal:
    judge(overrides)
  assert str(refusal.value).endswith(f"accept this with --accept-changes={key}")
  [change] = judge(overrides, accept=[key])["accepted_changes"]
  old = forms.flat(resolved())[key]
  assert change == {"step": 100, "key": key, "old": old, "new": ROWS[ACCEPT][key]}


QUANTILE, GROUPS = "optimizer.clip_quantile", "optimizer.groups"


def groups(**keys):
  return [{"parameters": "embed/*", **keys}]


@pytest.mark.parametrize(
  ("key", "before", "after", "needs"),
  [
    (QUANTILE, 0.5, 0.9, ACCEPT),
    (QUANTILE, 0.0, 0.9, REFUSED),
    (QUANTILE, 0.5, 0.0, REFUSED),
    (GROUPS, groups(learning_rate=0.1), groups(learning_rate=0.2), ACCEPT),
    (GROUPS, groups(weight_decay=0.1), [{"parameters": ["embed/*"], "weight_decay": 0}], ACCEPT),
    (GROUPS, [], groups(learning_rate=0.2), REFUSED),
    (GROUPS, groups(learning_rate=0.1), groups(name="sgd"), REFUSED),
    (GROUPS, groups(name="sgd"), [{"parameters": "*", "name": "sgd"}], REFUSED),
  ],
)
def test_what_changes_the_arrays_of_the_state_is_refused(key, before, after, needs):
  keys, configs = key.split("."), []
  for value in (before, after):
    configs.append(resolved())
    configs[-1][keys[0]][keys[1]] = value
  arguments = {"old_record": RECORD, "new_record": RECORD, "done": 100, "workdir": "runs/x"}
  with pytest.raises(ValueError, match=f"  {key}: ") as refusal:
    changes(*configs, **arguments)
  assert ("--accept-changes" in str(refusal.value)) == (needs == ACCEPT)
  if needs == ACCEPT:
    changes(*configs, **arguments, accept=[key])
  else:
    with pytest.raises(ValueError, match=f"{key}: this change is refused"):
      changes(*configs, **arguments, accept=[key])


@pytest.mark.parametrize("key", ROWS[REFUSED])
def test_refused(key):
  with pytest.raises(ValueError, match="which another run has computed") as refusal:
    judge({key: ROWS[REFUSED][key]}, accept=[])
  assert f"  {key}: " in str(refusal.value)
  with pytest.raises(ValueError, match=f"{key}: this change is refused"):
    judge({key: ROWS[REFUSED][key]}, accept=[key])


def test_versions_need_acceptance_and_other_data_is_refused():
  newer = {**RECORD, "versions": {"code": "abd", "jax": "0.12"}}
  with pytest.raises(ValueError, match=r"--accept-changes=versions.code,versions.jax$") as refusal:
    judge({}, record=newer)
  assert '  versions.jax: "0.10.2" in the checkpoint, now "0.12"' in str(refusal.value)
  done = judge({}, record=newer, accept=["versions.code", "versions.jax"])
  assert [change["key"] for change in done["accepted_changes"]] == ["versions.code", "versions.jax"]
  assert done["versions"] == newer["versions"]
  other = {**RECORD, "data": {"version": "1.0.0", "fingerprint": "bad"}}
  with pytest.raises(ValueError, match=r'dataset.fingerprint: "f00" in the checkpoint, now "bad"'):
    judge({}, record=other)
  assert judge({}, record={"versions": RECORD["versions"]})  # a part that one lacks says nothing


def test_one_message_has_all_that_needs_acceptance_and_the_flag_to_copy():
  overrides = {"optimizer.learning_rate": 0.5, "model.dropout_rate": 0.1, **LONGER}
  with pytest.raises(ValueError, match="resumes") as refusal:
    judge(overrides, accept=["model.dropout_rate"])
  assert str(refusal.value) == (
    "runs/x resumes from step 100, and what follows would be computed differently:\n"
    "  optimizer.learning_rate: 0.008 in the checkpoint, now 0.5\n"
    "set them back, or accept this with "
    "--accept-changes=optimizer.learning_rate,model.dropout_rate"
  )


def test_one_message_has_all_that_is_refused_and_a_free_workdir(tmp_path):
  (tmp_path / "x_2").mkdir()
  overrides = {"seed": 1, "model.layers": 2, "optimizer.learning_rate": 0.5}
  with pytest.raises(ValueError, match="another run") as refusal:
    judge(overrides, workdir=tmp_path / "x")
  lines = str(refusal.value).splitlines()
  assert lines[1:3] == [
    "  model.layers: 3 in the checkpoint, now 2",
    "  seed: 0 in the checkpoint, now 1",
  ]
  assert f"--workdir={tmp_path / 'x_3'};" in lines[3]
  assert lines[3].endswith(f"--config.checkpoint.initialize_from={tmp_path / 'x'}")
  assert not (tmp_path / "x_3").exists()


def test_more_steps_resume_and_fewer_than_done_do_not():
  assert judge(LONGER)["accepted_changes"] == []
  done = {**LONGER, "training.steps": 100}
  assert judge(done)["accepted_changes"] == []  # there is nothing left to do
  with pytest.raises(ValueError, match=r"training.steps=99, but runs/x has done 100; .*=runs/x_2"):
    judge({"training.steps": 99})


def test_another_warm_up_needs_acceptance_even_where_it_is_over():
  """The rest of the schedule begins where it ends; by default a run keeps its own."""
  longer = {"training.steps": 600, "optimizer.warmup_steps": 30}
  for done in (29, 100):
    with pytest.raises(ValueError, match=r"--accept-changes=optimizer.warmup_steps$"):
      judge(longer, done=done)


def test_the_same_command_again_resumes_after_an_accepted_change():
  overrides, accept = {"optimizer.learning_rate": 0.5}, ["optimizer.learning_rate"]
  record = judge(overrides, accept=accept)
  again = changes(
    resolved(**overrides),
    resolved(**overrides),
    old_record=record,
    new_record=RECORD,
    accept=accept,
    done=120,
    workdir="runs/x",
  )
  assert again == record


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("optimizer.learning_rte", "no such key; did you mean 'optimizer.learning_rate'?"),
    ("optimizer.weight_decay", "it is the same in the checkpoint"),
    ("mesh.tensor", "it needs none"),
  ],
)
def test_an_acceptance_of_nothing_is_an_error(name, message):
  overrides = {"optimizer.learning_rate": 0.5, "mesh.tensor": 2}
  with pytest.raises(ValueError, match="--accept-changes") as refusal:
    judge(overrides, accept=["optimizer.learning_rate", name])
  assert str(refusal.value).splitlines()[1] == f"  {name}: {message}"


def test_a_key_of_an_older_version_of_the_code_needs_acceptance():
  old = resolved()
  old["training"]["gone"] = 3
  with pytest.raises(ValueError, match=r"training.gone: 3 in the checkpoint, now \(unset\)"):
    changes(old, resolved(), old_record={}, new_record={}, done=1, workdir="x")


def test_a_decay_that_has_not_begun_may_move():
  wsd = {"optimizer.schedule": "wsd", "training.steps": 200, "optimizer.decay_steps": 50}
  wsd["optimizer.warmup_steps"] = 10

  def resumed(done, **changed):
    return changes(
      resolved(**wsd),
      resolved(**{**wsd, **changed}),
      old_record={},
      new_record={},
      done=done,
      workdir="runs/x",
    )

  longer = {"training.steps": 1000, "optimizer.decay_steps": 200}
  assert resumed(150, **longer) == {"accepted_changes": []}
  with pytest.raises(ValueError, match=r"--accept-changes=optimizer.decay_steps$"):
    resumed(151, **longer)
  earlier = {"training.steps": 120, "optimizer.decay_steps": 20}
  assert resumed(100, **earlier) == {"accepted_changes": []}
