"""The report of one GPU, in small on a CPU: a file of each part, cuts and failures named."""

import json
import sys

import pytest

from benchmarks import gpu_report


def test_what_a_part_prints_is_kept_where_it_is_cut_and_a_refusal_is_a_row(tmp_path, capsys):
  file = tmp_path / "part.txt"
  said = "import time; print('first', flush=True); time.sleep(60)"
  assert gpu_report.measure([sys.executable, "-c", said], file, 1.5) == "cut after 2 s"
  assert file.read_text() == "first\n"
  gpu_report.shown({"kernel": "x"}, lambda: {"ms": 1 / 0})
  row = {"kernel": "x", "failed": "ZeroDivisionError: division by zero"}
  assert json.loads(capsys.readouterr().out) == row
  file.write_text(f"first\n{json.dumps(row)}\n")
  gpu_report.write(tmp_path, {"part": "cut after 2 s"})
  found = json.loads((tmp_path / "results.json").read_text())
  expected = {"exit": "cut after 2 s", "titles": [*row], "rows": [row], "text": ["first"]}
  assert found == {"part": expected}
  assert "division by zero" in (tmp_path / "index.html").read_text()


@pytest.mark.long
def test_the_parts_run_in_small_on_a_cpu(tmp_path):
  parts = ["device", "matmuls", "attention", "resume"]
  command = ["-m", "benchmarks.gpu_report", "--small", f"--out={tmp_path}"]
  command += [f"--gpu_parts={','.join(parts)}"]
  file = tmp_path / "all.txt"
  assert gpu_report.measure([sys.executable, *command], file, 300) == 0, file.read_text()
  said = {part: (tmp_path / f"{part}.txt").read_text() for part in parts}
  assert '"platform": "cpu"' in said["device"]
  assert '"same to the bit": true' in said["resume"]
  assert "tflops" in said["matmuls"]
  assert "failed" not in said["attention"] + said["matmuls"]
