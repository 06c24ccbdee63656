"""The drawings that a run stores: read back they are the same, and of the largest parameters."""

import json

import pytest

from reports import drawings, grid, layout_page, pipeline_picture, run_files, run_page
from reports.layout_page import Side
from tests.helpers.jobs import make_job
from tests.reports import runs

PIPELINE = {
  "mesh.fsdp": 1,
  "mesh.stage": 2,
  "training.microbatches": 4,
  "training.pipeline": "1f1b",
}


@pytest.mark.parametrize("strategy", ["dp2_fsdp2_tp2", "single"])
def test_stored_drawings_read_back(strategy):
  job = make_job(strategy, "lm")
  stored = json.loads(json.dumps(layout_page.stored_layout(job)))
  side = Side("", job)
  assert grid.from_json(stored["mesh"]) == side.mesh
  assert stored["caption"] == side.caption
  parameters = job.placements["parameters"]
  assert len(stored["drawings"]) == layout_page.MOST_DRAWINGS
  for one in stored["drawings"]:
    assert grid.from_json(one["sheet"]) == side.drawing(parameters[one["names"][0]])
  [first, *_] = stored["drawings"]
  assert first["names"] == ["layers/mlp/gate/kernel", "layers/mlp/up/kernel"]


def test_a_pipeline_is_stored_and_drawn(tmp_path):
  job = make_job("dp2_fsdp2_tp2", "lm", **PIPELINE)
  runs.write(tmp_path, layout=layout_page.stored_layout(job))
  run = run_files.read(tmp_path)
  assert run.layout["pipeline"] == {
    **{"kind": "1f1b", "stages": 2, "microbatches": 4, "chunks": 1, "layers": 2}
  }
  assert run_page.pipeline(run) == pipeline_picture.for_page(job.program.pipeline, 2)
  html = run_page.html(run)
  assert "stage 1, tick 2: forward pass of microbatch 1, layers 1" in html


def test_a_large_mesh_is_not_drawn(monkeypatch):
  monkeypatch.setattr(layout_page, "MOST_DEVICES", 7)
  monkeypatch.setattr(drawings, "picture", None)
  stored = layout_page.stored_layout(make_job("dp8", "mlp"))
  assert (stored["mesh"], stored["drawings"]) == (None, [])
  assert "8 simulated CPU devices" in stored["caption"]
