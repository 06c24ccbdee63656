"""The layout as text: one strategy, and two side by side."""

import dataclasses

from configs.schema.finalize import Choice
from partitioning.rules import Dim
from reports import layout_text
from tests.helpers.jobs import make_job
from tests.partitioning.placements import COUNT, HALF, SIZES, UP, WHOLE, placement


def row(text, name):
  """Returns the words of the one row with this array."""
  [found] = [line.split() for line in text.splitlines() if name in line.split()]
  return " ".join(found)


def test_the_table_has_a_row_per_array_with_its_rule_spec_shard_bytes_and_copies():
  text = layout_text.table_text({"parameters": [UP, HALF], "optimizer": [COUNT]}, SIZES)
  head = "array shape dtype dims rule spec shard bytes/device replicas"
  assert row(text, "array") == head
  assert row(text, "up/kernel") == (
    "up/kernel [3, 12, 20] float32 LDF (up|gate).* (-, fsdp, tensor) [3, 6, 5] 360 Bytes 1"
  )
  assert row(text, "out/kernel") == (
    "out/kernel [12, 7] bfloat16 - a rule (fsdp, -) [6, 7] 84 Bytes 4"
  )
  assert row(text, "count") == "count [] int32 - scalar () [] 4 Bytes 8"
  assert row(text, "parameters") == "parameters 444 Bytes"
  assert row(text, "optimizer") == "optimizer 4 Bytes"


def test_the_table_is_never_truncated_and_its_notes_are_below():
  name = "/".join(["a_name"] * 60)
  long = placement(name, (4,), notes=("kv_heads=7 is replicated: tensor=4 does not divide it",))
  text = layout_text.table_text({"parameters": [long]}, SIZES)
  assert row(text, name).startswith(name)
  assert text.endswith(f"note: {name}: kv_heads=7 is replicated: tensor=4 does not divide it")


def test_the_legend_in_words():
  legend = {"B": Dim("batch", None), "K": Dim("kv_heads", 7, may_replicate=True)}
  title, batch, heads = layout_text.legend_text(legend).splitlines()
  assert title == "legend: letter, dim, size"
  assert batch.split() == ["B", "batch", "differs"]
  assert heads.split()[:3] == ["K", "kv_heads", "7"]
  assert "may replicate where its axes do not divide it" in heads


def test_two_layouts_side_by_side_mark_what_differs_and_nothing_else():
  ours = {p.name: p for p in (UP, HALF, WHOLE)}
  other = placement("up/kernel", (3, 12, 20), None, "fsdp", None)
  theirs = {p.name: p for p in (other, HALF, WHOLE, COUNT)}
  text = layout_text.against_text(ours, theirs, (SIZES, SIZES), ("fsdp_tp", "fsdp"))
  assert row(text, "array") == "array shape fsdp_tp bytes/device fsdp bytes/device"
  assert row(text, "up/kernel") == (
    "* up/kernel [3, 12, 20] (-, fsdp, tensor) 360 Bytes (-, fsdp, -) 1.4 KiB"
  )
  assert row(text, "out/kernel") == "out/kernel [12, 7] (fsdp, -) 84 Bytes (fsdp, -) 84 Bytes"
  assert row(text, "norm/scale").startswith("norm/scale")
  assert row(text, "count") == "* count [] not there 0 Bytes () 4 Bytes"
  assert row(text, "all") == f"all 540 Bytes {(3 * 6 * 20 * 4 + 84 + 96 + 4) / 1024:.1f} KiB"


def test_named_activations_and_what_happens_to_them_are_below_the_constraints():
  changes = {"training.rematerialization": "query=save,gate=offload"}
  text = layout_text.job_text(make_job("dp4_tp2", "lm", **changes))
  rows = [" ".join(line.split()) for line in text.splitlines()]
  assert "query BTNH [16, 12, 8, 6] (data, -, tensor, -) 9.0 KiB save" in rows
  assert "gate BTF [16, 12, 56] (data, -, tensor) 10.5 KiB offload" in rows
  assert "key BTKH [16, 12, 4, 6] (data, -, tensor, -) 4.5 KiB recompute" in rows
  assert "offloaded to the host's memory 10.5 KiB" in rows
  assert "saved on the device 24.0 KiB" in rows  # with the layers' input
  assert "attention_output" not in layout_text.job_text(make_job("dp8", "mlp"))


def test_muon_s_matrices_and_how_they_move_are_below_the_activations():
  text = layout_text.job_text(make_job("dp2_fsdp2_tp2", "lm", **{"optimizer.name": "muon"}))
  _, _, said = text.partition("matrices that the optimizer brings whole to devices, and back:\n")
  assert said.splitlines()[:3] == [
    "  4 of 24 x 40, 1 per device, exchanged along tensor+fsdp: "
    "layers/attention/key/kernel, layers/attention/value/kernel",
    "  4 of 40 x 48, 1 per device, exchanged along fsdp+tensor: "
    "layers/attention/out/kernel, layers/attention/query/kernel",
    "  6 of 40 x 56, 1 per device, exchanged along fsdp+tensor, shared along data: "
    "layers/mlp/down/kernel, layers/mlp/gate/kernel, layers/mlp/up/kernel",
  ]
  assert "brings whole" not in layout_text.job_text(make_job("dp2_fsdp2_tp2", "lm"))


def test_the_stages_of_ramps_are_listed():
  ramps = {
    "data.batch_size_ramp": ((0, 8), (5, 16)),
    "data.sequence_length_ramp": ((0, 6), (7, 12)),
  }
  text = layout_text.job_text(make_job("dp8", "lm", **ramps, **{"training.steps": 9}), whole=False)
  assert "steps 1 to 5: 16 rows of 6 tokens\nsteps 6 to 7: 32 rows of 6 tokens\n" in text
  assert "steps 8 to 9: 16 rows of 12 tokens\n" in text
  assert "steps 1 to" not in layout_text.job_text(make_job("dp8", "lm"), whole=False)


def test_a_start_says_what_was_derived_and_those_choices_that_do_something():
  job = make_job("single", "lm")
  sized = Choice("optimizer.learning_rate", 8e-3 / 3, "a third", of_devices=False)
  plain = Choice("training.attention_kernel", "xla", "rows are short", plain=True)
  job = dataclasses.replace(job, choices=(sized, plain, Choice("training.loss_chunks", 4, "why")))
  short, whole = (layout_text.job_text(job, whole=whole).splitlines() for whole in (False, True))
  derived = "derived: optimizer.learning_rate=0.002667 (a third)"
  assert short[-2:] == [derived, "chosen: training.loss_chunks=4"]
  assert derived in whole
  assert "chosen: training.attention_kernel=xla (rows are short)" in whole
