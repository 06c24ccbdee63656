"""`main.py plan` where there is no compiler for the topology, and what it refuses."""

import html
import json
import re

import pytest

from tests.helpers.compiling import FAST

SMALL = ["--config.training.rematerialization=full"]
KEYS = {
  *("fits", "topology", "devices", "compiled", "peak_bytes_per_device", "hbm_bytes_per_device"),
  *("memory", "collectives", "step_seconds", "tokens_per_second_per_device", "mfu", "mfu_causal"),
  *("warnings", "token_budget", "chip_hours", "cost"),
}


SPEEDS = (
  *("step_seconds", "tokens_per_second_per_device", "mfu", "mfu_causal", "chip_hours", "cost"),
)


def plan(main, *arguments):
  """Returns (exit code, standard output, standard error) of a plan that is made anew."""
  return main("plan", *arguments, "--config.planning.cache_dir=")


def test_a_machine_of_gpus_is_planned_by_formulas(main, tmp_path):
  arguments = [
    "--config=configs/dp4_tp2.py",
    "--topology=h200:8",
    f"--workdir={tmp_path}",
    *("--nodes=4", "--failures-per-node-day=0.5"),
    "--config.checkpoint.memory_every_steps=5",
  ]
  code, out, err = plan(main, *arguments)
  assert (code, err) == (0, ""), (out, err)
  assert out.startswith("fits 8 devices of h200:8: ")
  assert "plan:" not in out  # what it is doing is shown on terminals alone
  assert "all numbers are by formula" in out
  found = json.loads((tmp_path / "plan.json").read_text())
  assert found.keys() >= KEYS
  assert found["compiled"] is False
  fails = found["goodput"]
  assert (fails["nodes"], fails["per_node_day"], found["nodes"]) == (4, 0.5, 1)
  assert "\ngoodput of 4 nodes: " in out
  assert "  a failure every 12.0 h (0.5 per node and day), " in out
  assert fails["best"]["share"] == pytest.approx(1)  # 200 steps of milliseconds
  # A node has all of the state, twice; no other node has more.
  assert found["memory_copies_bytes"] == pytest.approx(2 * found["state_bytes"], rel=1e-3)
  assert "\ncheckpoints in memory: " in out
  assert "checkpoint.memory_every_steps=5 beside it: 90 % of failures resume from memory" in out
  assert fails["in_memory"]["saving"] > 0.9  # of a second, between steps of milliseconds
  assert found["peak_bytes_per_device"] == found["memory_at_once"] < sum(found["memory"].values())
  table = out.partition("memory per device")[2].partition("peak, by formula: the sum")[0]
  parts = [re.split(r"  +", line.strip())[0] for line in table.splitlines()[2:] if line.strip()]
  assert sum(found["memory"][part] for part in parts) == found["memory_at_once"]
  low, expected, high = (found["step_seconds"][key] for key in ("low", "expected", "high"))
  assert 0 < low < expected < high
  assert found["mfu_causal"] < found["mfu"] < 1
  # 200 steps of 32 rows of 128 tokens.
  assert found["token_budget"] == 200 * 32 * 128
  assert found["chip_hours"] == pytest.approx(200 * expected * 8 / 3600)
  assert found["cost"] is None
  assert "Accuracy: by formula, the peak memory is within 10 %" in out
  assert "at 80, 92, 80 % efficiency" in out  # of H200 no share is fitted
  assert re.search(r"accuracy: of \d+ published runs \(GPU, dense, by formula\) half are", out)
  page = html.unescape((tmp_path / "plan.html").read_text())
  for statement in found["accuracy"].values():
    assert statement in out
    assert statement in page
  assert found["accuracy"].keys() == {"times", "memory"}
  assert "assumed for H200: 990 TFLOP/s, 4.8 TB/s HBM, 450 GB/s NVLink, at 80, 92, 80 %" in out


def test_the_devices_at_hand_are_planned_by_their_own_compiler(main, tmp_path):
  code, out, err = plan(
    main,
    "--config=configs/dp4_tp2.py",
    f"--workdir={tmp_path}",
    f"--config.compiler_options={FAST}",
  )
  assert (code, err) == (0, ""), (out, err)
  assert out.startswith("fits 8 devices of cpu:8: ")
  assert "by the compiler" in out
  found = json.loads((tmp_path / "plan.json").read_text())
  assert found["compiled"]
  sent = {(one["axis"], one["kind"], one["network"]) for one in found["collectives"]}
  assert {("data", "all-reduce", "memory"), ("tensor", "all-reduce", "memory")} <= sent
  forward, backward = found["timeline"]["layers"]
  assert forward["line"].startswith("models/layer_stack.py:")
  assert forward["line"] == backward["line"]
  assert (forward["runs"], backward["runs"]) == (3, 3)
  # Collectives are synchronous on CPUs: all of the time of each is a gap.
  assert [bar["begin"] for bar in forward["waits"]] == [
    bar["begin"] for bar in forward["transfers"]["tensor over memory"]
  ]
  assert "most expensive gap: " in out
  parts = found["step_parts"]
  assert sum(parts.values()) == pytest.approx(found["step_seconds"]["expected"])
  exposed = sum(one["exposed_seconds"] for one in found["collectives"])
  assert parts["waiting for collectives"] == pytest.approx(exposed)


def test_what_does_not_fit_is_reported_and_ends_with_3(main, tmp_path):
  code, out, err = plan(
    main,
    "--config=configs/fsdp8.py:model=llama3_70b",
    "--topology=a100:8",
    f"--workdir={tmp_path}",
    "--config.data.global_batch_size=8",
    *SMALL,
  )
  assert (code, err) == (3, ""), (out, err)
  assert out.startswith("does not fit 8 devices of a100:8: ")
  found = json.loads((tmp_path / "plan.json").read_text())
  assert not found["fits"]
  # What cannot run has no speed.
  assert {found[key] for key in SPEEDS} == {None}
  for text in ("MFU", "tokens/s", "step:", "chip-hours", "roofline"):
    assert text not in out
  assert "so no speed is given" in out.splitlines()[0]
  assert "Not computed: it does not fit" in (tmp_path / "plan.html").read_text()
  # 70.6e9 parameters, their gradients and Adam's two numbers in float32, over 8 devices.
  state = sum(found["memory"][part] for part in ("parameters", "gradients", "optimizer state"))
  assert state == pytest.approx(70.6e9 * 16 / 8, rel=0.01)


@pytest.mark.parametrize(
  ("arguments", "messages"),
  [
    (
      ["--config=configs/dp8.py", "--topology=v5p-100"],
      ["--topology=v5p-100: there is no slice of 100 TensorCores", "v5p-64 (2x4x4) and v5p-128"],
    ),
    (
      ["--config=configs/dp8.py", "--topology=h100:8", "--nodes=0"],
      ["--nodes=0 --failures-per-node-day=0.0037887: both must be above zero"],
    ),
  ],
)
def test_refusals(main, arguments, messages, tmp_path):
  code, out, err = plan(main, *arguments, f"--workdir={tmp_path / 'run'}")
  assert (code, out) == (2, ""), (out, err)
  assert err.startswith("refused: ")
  assert "Traceback" not in err
  for message in messages:
    assert message in err
  assert not (tmp_path / "run").exists()
