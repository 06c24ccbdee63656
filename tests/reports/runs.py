"""The files of a run that was killed, rolled back and resumed, as tests of its page want them."""

import json

START = {
  "event": "start",
  "processes": 1,
  "devices": 8,
  "device_kind": "TPU v5p",
  "simulated": False,
  "mesh": {"data": 4, "tensor": 2},
  "versions": {"code": "aa", "jax": "0.10.2"},
}
COMMAND = "python main.py train --config=configs/dp4_tp2.py --workdir='my runs/a' "
COMPILED = {
  "event": "compiled",
  "collectives": [
    {"axis": "tensor", "kind": "all-reduce", "runs": 17, "bytes": 2**20},
    {"axis": "data", "kind": "all-reduce", "runs": 5, "bytes": 2**21},
  ],
  "predicted": {
    "topology": "v5p:2x2x2",
    "step_seconds": [0.16, 0.2, 0.24],
    "sent": [
      {"axis": "tensor", "kind": "all-reduce", "seconds": 0.012, "exposed": 0.003},
      {"axis": "data", "kind": "all-reduce", "seconds": 0.02, "exposed": 0.02},
    ],
    "peak_bytes": 50 * 2**30,
    "limit_bytes": 95 * 2**30,
    "accuracy": "as measured",
  },
}
HISTORY = [
  {**START, "step": 0, "time": 1000.0, "command": COMMAND},
  {**COMPILED, "step": 0, "time": 1010.0},
  {"event": "saved", "step": 20, "time": 1020.0},
  {"event": "sample", "step": 20, "time": 1021.0, "prompt": "def ", "text": "<b>20</b>"},
  {"event": "saved", "step": 40, "time": 1040.0},
  {"event": "sample", "step": 40, "time": 1041.0, "prompt": "def ", "text": "undone 40"},
  {
    **{**START, "step": 20, "time": 1100.0, "versions": {"code": "bb", "jax": "0.10.2"}},
    "command": COMMAND + "--accept_changes=versions.code",
  },
  {**COMPILED, "step": 20, "time": 1110.0},
  {"event": "rolled_back", "step": 20, "time": 1120.0},
  {"event": "sample", "step": 40, "time": 1140.0, "prompt": "def ", "text": "again 40"},
  {"event": "saved", "step": 40, "time": 1141.0},
]
TIMES = {
  "goodput": 0.5,
  "seconds": {
    **{"start": 10.0, "compile": 20.0, "step": 60.0, "input_wait": 1.0, "save": 3.0},
    **{"evaluation": 6.0, "lost_to_restart": 20.0},
  },
  "time": 1150.0,
  "done": False,
}
CONFIG = {"training": {"steps": 60, "trainable": None}, "data": {"name": "<i>"}, "seed": 3}


def step(number):
  """Returns the line of a step."""
  return {
    **{"step": number, "loss": 5 - number / 20, "grad_norm": 1 / number, "learning_rate": 1e-3},
    **{"step_seconds": 0.25, "data_wait_seconds": 0.05, "tokens_per_second": 4096.0 * number},
    **{"mfu": 0.4, "peak_bytes": 60 * 2**30},
    **{f"expert_share/{expert}": (expert + 1) / 10 for expert in range(4)},
  }


def evaluation(number):
  """Returns the line of an evaluation."""
  return {"step": number, "eval_loss": 6 - number / 20, "eval_bits_per_byte": 3.0}


def sampled(number, loss=5.0):
  """Returns the line of an evaluation of a tenth of the split."""
  over = {"eval_loss_stderr": 0.125, "eval_examples": 267, "eval_share": 0.1}
  return {"step": number, "eval_loss": loss, **over}


def whole(number, loss=5.5):
  """Returns the line of an evaluation of the whole split."""
  return {"step": number, "eval_loss": loss, "eval_examples": 2670, "eval_share": 1.0}


METRICS = [
  *(step(number) for number in (10, 20, 30, 40)),
  *(evaluation(number) for number in (20, 40)),
  {"step": 20, "rolled_back": 33, "why": "loss is nan", "skipped_rows": [[64, 96]]},
  {"step": 40, **TIMES},
]


def write(folder, *, metrics=METRICS, history=HISTORY, config=CONFIG, layout=None):
  """Writes the files; None leaves one out."""
  folder.mkdir(parents=True, exist_ok=True)
  for name, lines in (("metrics.jsonl", metrics), ("history.jsonl", history)):
    if lines is not None:
      (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
  if config is not None:
    (folder / "config.json").write_text(json.dumps(config))
  if layout is not None:
    (folder / "layout.json").write_text(json.dumps(layout))
  (folder / "checkpoints" / "40").mkdir(parents=True, exist_ok=True)
  return folder
