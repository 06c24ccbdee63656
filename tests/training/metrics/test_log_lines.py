"""Damaged lines of metrics.jsonl: moved aside byte for byte, reported, and no start fails."""

import json
import os

import pytest
from etils import epath

from training.metrics import log_lines
from training.metrics.log_lines import MetricsWriter, evaluated


def line(step, **values):
  """Returns the bytes of a line."""
  return json.dumps({"step": step, **values}).encode() + b"\n"


TIMES = {"goodput": 0.5, "seconds": {"step": 1.0}, "time": 1.0, "done": False}
SOUND = [line(0, **TIMES), line(1, loss=0.5), line(2, loss=0.25), line(2, eval_loss=0.75)]
# What it is -> (its bytes, what is said of it).
DAMAGED = {
  "empty": (b"\n", "it is empty"),
  "spaces": (b"  \t\n", "it is empty"),
  "NULs": (bytes(4096) + b"\n", "it is not JSON"),
  "binary": (b"\xff\xfe\x80\n", "it is not text"),
  "torn": (b'{"step": 2, "lo{"step": 3, "loss": 1.0}\n', "it is not JSON"),
  "no step": (b'{"loss": 1.0}\n', "step is missing"),
  "a text for a step": (b'{"step": "3"}\n', "step: a whole number of at least 0"),
  "true for a step": (b'{"step": true}\n', "step: a whole number of at least 0"),
  "a negative step": (b'{"step": -1}\n', "step: a whole number of at least 0"),
  "a list": (b"[1, 2]\n", "it is not a JSON object"),
  "a number": (b"17\n", "it is not a JSON object"),
  "nested": (b"[" * 100_000 + b"\n", "it is not JSON: it is nested deeper than 64"),
  "digits": (b'{"step": ' + b"1" * 5000 + b"}\n", "it is not JSON"),
  "goodput alone": (b'{"step": 1, "goodput": 0.5}\n', "seconds, time, done is missing"),
  "seconds of text": (
    line(1, **{**TIMES, "seconds": {"step": "1"}}),
    "seconds.step: a number is expected",
  ),
  "no time": (line(1, **{**TIMES, "time": None}), "time: a number is expected, and null"),
}


@pytest.mark.parametrize("number", range(len(DAMAGED)))
def test_a_damaged_line_is_moved_aside(number, tmp_path, capsys):
  place, (raw, why) = number % (len(SOUND) + 1), [*DAMAGED.values()][number]
  metrics, aside = tmp_path / "metrics.jsonl", tmp_path / "metrics.damaged.jsonl"
  metrics.write_bytes(b"".join([*SOUND[:place], raw, *SOUND[place:]]))
  assert evaluated(epath.Path(tmp_path), 2)  # which only reads
  assert not aside.exists()
  with MetricsWriter(epath.Path(tmp_path), step=2, tensorboard=False) as writer:
    writer.write(3, {"loss": 0.125})
  assert metrics.read_bytes() == b"".join([*SOUND, line(3, loss=0.125)])
  assert aside.read_bytes() == raw
  assert writer.times == {"step": 0, **TIMES}
  [said] = capsys.readouterr().err.splitlines()
  assert said.startswith(
    f"WARNING: {metrics}: 1 damaged line moved to metrics.damaged.jsonl, the first of them line "
    f"{place + 1}: {why}"
  )
  MetricsWriter(epath.Path(tmp_path), step=3, tensorboard=False)  # once is enough
  assert aside.read_bytes() == raw
  assert not capsys.readouterr().err


def test_all_of_several_are_kept_in_their_order_after_those_of_earlier_starts(tmp_path, capsys):
  metrics, aside = tmp_path / "metrics.jsonl", tmp_path / "metrics.damaged.jsonl"
  aside.write_bytes(b"of an earlier start\n")
  raws = [raw for raw, _ in DAMAGED.values()]
  metrics.write_bytes(b"".join([*SOUND, *raws]))
  MetricsWriter(epath.Path(tmp_path), step=9, tensorboard=False)
  assert metrics.read_bytes() == b"".join(SOUND)
  assert aside.read_bytes() == b"of an earlier start\n" + b"".join(raws)
  assert f"{len(raws)} damaged lines moved" in capsys.readouterr().err


def test_a_truncated_line_is_dropped_and_a_line_without_its_break_is_valid():
  for size in range(1, len(SOUND[-1])):
    sound, damaged = log_lines.split(b"".join(SOUND)[:-size])
    assert not damaged
    assert [one.raw for one in sound] == SOUND[: None if size == 1 else -1]


@pytest.mark.parametrize("rest", [bytes(100), b"\xff\xff", b"no line of ours", b'{"step": 3\0\0\0'])
def test_what_no_kill_leaves_at_the_end_is_damage(rest):
  sound, [found] = log_lines.split(b"".join(SOUND) + rest)
  assert len(sound) == len(SOUND)
  assert found.raw == rest + b"\n"
  assert found.number == len(SOUND) + 1


def test_damage_in_a_run_is_moved_aside_when_the_file_is_written_again(tmp_path, capsys):
  metrics = tmp_path / "metrics.jsonl"
  with MetricsWriter(epath.Path(tmp_path), step=0, tensorboard=False) as writer:
    writer.write(1, {"loss": 0.5})
    writer.write_times(1, TIMES)
    with metrics.open("ab") as file:
      file.write(b"\0\0\n")
    writer.write_times(1, {**TIMES, "goodput": 0.75})
    assert "1 damaged line moved" in capsys.readouterr().err
    with metrics.open("ab") as file:
      file.write(b"\n")
    writer.roll_back(0, 1, {"rolled_back": 2})
  assert [json.loads(raw)["step"] for raw in metrics.read_bytes().splitlines()] == [0]
  assert (tmp_path / "metrics.damaged.jsonl").read_bytes() == b"\0\0\n\n"


def test_numbers_that_are_not_finite_are_written_as_texts_that_float_reads(tmp_path):
  with MetricsWriter(epath.Path(tmp_path), step=0, tensorboard=False) as writer:
    writer.write(1, {"eval_loss": float("nan"), "eval_accuracy": float("-inf")})
  text = (tmp_path / "metrics.jsonl").read_text()
  found = json.loads(text, parse_constant=lambda word: pytest.fail(word))
  assert [str(float(found[key])) for key in ("eval_loss", "eval_accuracy")] == ["nan", "-inf"]


def test_no_link_is_followed(tmp_path):
  (tmp_path / "elsewhere").write_bytes(b"kept\n")
  os.symlink("elsewhere", tmp_path / "metrics.damaged.jsonl")
  (tmp_path / "metrics.jsonl").write_bytes(b"damaged\n")
  with pytest.raises(OSError, match="it is a symbolic link, not a plain file"):
    MetricsWriter(epath.Path(tmp_path), step=0, tensorboard=False)
  assert (tmp_path / "elsewhere").read_bytes() == b"kept\n"
  assert (tmp_path / "metrics.jsonl").read_bytes() == b"damaged\n"
