"""Values and combinations of keys that are refused, before any device is touched."""

import pytest

from configs import base
from configs.keys import table
from configs.schema import validate
from tests.configs.loading import SIZES, finalized, load

# ---- What is shipped ----


# ---- What is derived ----


# ---- Choosing model and data ----


def test_an_unknown_key_is_refused():
  config = load("dp8")
  with pytest.raises(AttributeError, match="modle"):
    config.modle = 1
  with pytest.raises(AttributeError, match="tensr"):
    config.mesh.tensr = 2
  with pytest.raises(KeyError, match='Key "hats" does not exist'):
    config.update_from_flattened_dict({"partitioning.parameters.hats": ("tensor",)})


# ---- What does not go together ----


def refusal(argument, sizes, /, **overrides):
  """Returns the message with which `check` refuses."""
  with pytest.raises(ValueError, match="the config is refused") as error:
    validate.check(finalized(argument, **overrides), {**SIZES, **sizes})
  return str(error.value)


@pytest.mark.parametrize(
  ("sizes", "overrides", "said"),
  [
    (
      {"data": 3, "fsdp": 2, "tensor": 5},
      {"data.global_batch_size": 20},
      "data.global_batch_size=20 is not divisible by the batch axes data=3 x fsdp=2 = 6; "
      "make it 18 or 24",
    ),
    (
      {"data": 8},
      {"data.global_batch_size": 5},
      "data.global_batch_size=5 is not divisible by the batch axes data=8; make it 8",
    ),
    (
      {"data": 8},
      {"data.global_batch_size": 40, "training.gradient_accumulation_steps": 4},
      "data.global_batch_size=40 / 4 accumulation steps is not divisible by the batch axes "
      "data=8; make it 32 or 64",
    ),
    (
      {"data": 2},
      {"data.global_batch_size": 28, "training.gradient_accumulation_steps": 5},
      "data.global_batch_size=28 is not divisible by training.gradient_accumulation_steps=5",
    ),
    (
      {},
      {"optimizer.schedule": "cosin"},
      "optimizer.schedule='cosin': one of cosine, linear, constant, wsd, inverse_sqrt; did you",
    ),
    ({}, {"training.rematerialization": "dot"}, "one of none, dots, full; did you mean 'dots'?"),
    (
      {"tensor": 2},
      {"training.loss_chunks": 3},
      "training.loss_chunks=3 does not divide the 128 logits that a device has of each token; make "
      "it 2 or 4",
    ),
    ({}, {"training.loss_chunks": 0}, "training.loss_chunks=0: at least 1"),
    ({}, {"training.scan_unroll": 0}, "training.scan_unroll=0: at least 1"),
    (
      {},
      {"model.layers": 6, "training.scan_unroll": 4},
      "training.scan_unroll=4 does not divide model.layers=6; make it one of 1, 2, 3, 6",
    ),
    ({}, {"training.matmul_precision": "hihg"}, "one of default, high, highest; did you mean 'hi"),
    (
      {},
      {"model.heads": 8, "model.kv_heads": 3},
      "model.heads=8 is not a multiple of model.kv_heads=3",
    ),
    ({}, {"model.head_size": 7}, "model.head_size=7 is odd; rotary positions turn pairs"),
    ({}, {"model.dropout_rate": 1.0}, "model.dropout_rate=1.0: at least 0 and below 1"),
    ({}, {"model.dropout_rate": -0.25}, "model.dropout_rate=-0.25: at least 0 and below 1"),
    (
      {},
      {"training.steps": 13, "optimizer.warmup_steps": 14},
      "optimizer.warmup_steps=14: at most 13 steps",
    ),
    ({}, {"model.layers": 0}, "model.layers=0: at least 1"),
    ({}, {"model.kv_heads": 0}, "model.kv_heads=0: at least 1"),
    ({}, {"model.heads": 0}, "model.heads=0: at least 1"),
    ({}, {"training.on_bad_step": "rollback"}, "'rollback': one of stop, roll_back; did you mean"),
    ({}, {"data.skip_batches": (3, -1)}, "data.skip_batches: -1 is not the number of a batch"),
    ({}, {"data.skip_rows": ((8, 8),)}, "data.skip_rows: (8, 8) is not a range of rows"),
    ({}, {"data.skip_rows": ((-8, 8),)}, "data.skip_rows: (-8, 8) is not a range of rows"),
    ({}, {"data.skip_rows": (8, 16)}, "data.skip_rows: 8 is not a range of rows"),
    ({}, {"data.skip_batches": ("3",)}, "data.skip_batches: '3' is not the number of a batch"),
    ({}, {"data.sequence_length": 0}, "data.sequence_length=0: at least 1"),
    ({}, {"seed": 2**32}, "seed=4,294,967,296: at most 4,294,967,295"),
    (
      {},
      {"partitioning.parameters.model": (2,)},
      "partitioning.parameters.model=(2,): names of mesh axes, such as ('fsdp',)",
    ),
    (
      {},
      {"partitioning.overrides": ("layers/mlp/up/kernel",)},
      "partitioning.overrides: 'layers/mlp/up/kernel' is not a name with the entries of a Partit",
    ),
    ({}, {"processes.slow_ratio": 0.9}, "processes.slow_ratio=0.9: above 1, or 0 to turn it off"),
    ({}, {"training.replica_check_every_steps": -1}, "replica_check_every_steps=-1: at least 0"),
    ({}, {"compiler_options": "a=1,b"}, "compiler_options: 'b' is not name=value"),
  ],
)
def test_keys_that_do_not_go_together_are_refused(sizes, overrides, said):
  assert said in refusal("lm", sizes, **overrides)


LEAST = {
  key: row.least
  for key, row, _ in table.rows(base.get_config("lm"))
  if row.least is not None and row.below is None and "experts" not in row.readers
}


@pytest.mark.parametrize(("key", "least"), LEAST.items())
def test_counts_have_a_least(key, least):
  message = refusal("lm", {}, **{key: least - 1})
  assert f"{key}={least - 1}" in message
  assert f": at least {least}" in message
  if key != "training.steps":  # of one step, none can be left to warm up
    quantile = {"optimizer.clip_quantile": 0.5, "optimizer.clip_norm": 0.0}
    others = quantile if key == "optimizer.clip_window" else {}
    validate.check(finalized("lm", **others, **{key: least}), SIZES)


@pytest.mark.parametrize(
  ("data", "overrides", "said"),
  [
    (
      "text",
      {"data.chat_template": "t.jinja"},
      "data.chat_template='t.jinja': data.name='text' has",
    ),
    ("text", {"data.long_conversations": "drop"}, "data.name='text' has no conversations; choose"),
    ("conversations", {"data.untrained_conversations": "dorp"}, "'dorp': one of refuse, drop; did"),
    ("conversations", {"data.packing": "concatenate"}, "conversations are never split; take best_"),
    (
      "conversations",
      {"data.text_feature": "chat"},
      "conversations are read from 'messages', 'con",
    ),
  ],
)
def test_keys_of_conversations(tmp_path, data, overrides, said):
  files = {"data.files": str(tmp_path), "data.tokenizer": "bytes", "data.data_dir": str(tmp_path)}
  assert said in refusal(f"model=lm,data={data}", {}, **files, **overrides)


def test_the_least_number_of_steps_is_enough():
  validate.check(finalized("lm", **{"training.steps": 1, "optimizer.warmup_steps": 1}), SIZES)


def test_all_that_is_wrong_comes_in_one_message():
  message = refusal(
    "lm",
    {"data": 3},
    **{
      "data.global_batch_size": 32,
      "training.steps": 0,
      "optimizer.schedule": "lin",
      "model.kv_heads": 5,
      "model.head_size": 9,
    },
  )
  assert len(message.splitlines()) == 6
  for part in ("training.steps=0", "'linear'", "kv_heads=5", "head_size=9", "batch axes data=3"):
    assert part in message
