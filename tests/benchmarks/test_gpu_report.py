"""The report of one GPU, in small on a CPU: files after every part, cuts and failures named."""

import json
import sys

import pytest

from benchmarks import gpu_report


def test_what_a_part_prints_is_kept_and_a_part_that_takes_too_long_is_cut(tmp_path):
  good = gpu_report.measure([sys.executable, "-c", "print('so'); print('{\"ms\": 1.5}')"], 60)
  assert (good["exit"], good["result"], good["text"]) == (0, {"ms": 1.5}, ["so"])
  said = "import time; print('{\\\"first\\\":', flush=True); time.sleep(60)"
  slow = gpu_report.measure([sys.executable, "-c", said], 1.5)
  assert (slow["exit"], slow["result"], slow["text"]) == ("cut after 2 s", None, ['{"first":'])
  assert slow["seconds"] < 30
  rows = {**good, "result": [{"kernel": "<b>", "ms": 1.23456}, {"kernel": "x", "failed": "no"}]}
  gpu_report.write(tmp_path, {"good": good, "slow": slow, "rows": rows})
  assert json.loads((tmp_path / "results.json").read_text())["good"]["result"] == {"ms": 1.5}
  page = (tmp_path / "index.html").read_text()
  assert all(text in page for text in ("cut after 2 s", "&lt;b&gt;", "<td>1.235</td>", "failed"))


@pytest.mark.long
def test_the_parts_run_in_small_on_a_cpu(tmp_path):
  parts = ["device", "matmuls", "attention", "resume"]
  command = ["-m", "benchmarks.gpu_report", "--small", f"--out={tmp_path}"]
  found = gpu_report.measure([sys.executable, *command, f"--gpu_parts={','.join(parts)}"], 300)
  assert found["exit"] == 0, found["text"]
  results = json.loads((tmp_path / "results.json").read_text())
  assert [*results] == parts
  assert results["device"]["result"]["platform"] == "cpu"
  assert results["resume"]["result"]["same to the bit"] is True
  assert not any("failed" in row for row in results["attention"]["result"])
