"""What is refused of pipeline stages, with the sizes that work."""

import pytest

from tests.helpers.jobs import make_job

STAGES = {"mesh.stage": 4, "model.layers": 8}


@pytest.mark.parametrize(
  ("keys", "words"),
  [
    ({"training.pipeline": "gpipe"}, ["training.pipeline='gpipe'", "mesh.stage is 1"]),
    ({"training.microbatches": 4}, ["training.microbatches=4", "mesh.stage is 1"]),
    ({**STAGES, "model.layers": 6}, ["model.layers=6", "mesh.stage=4", "2, 3, 6", "4 or 8"]),
    (
      {**STAGES, "training.pipeline": "interleaved", "training.pipeline_chunks": 3},
      ["training.pipeline_chunks=3", "mesh.stage=4", "one of 2"],
    ),
    ({**STAGES, "training.pipeline": "1F1B"}, ["1f1b, interleaved, gpipe"]),
    ({**STAGES, "training.pipeline_chunks": 4}, ["training.pipeline=interleaved"]),
    ({**STAGES, "training.microbatches": 5}, ["training.microbatches=5", "is not divisible by"]),
    (
      {**STAGES, "training.pipeline": "interleaved", "training.microbatches": 2},
      ["a multiple of mesh.stage=4", "1f1b takes any number"],
    ),
    ({**STAGES, "training.microbatches": 0}, ["training.microbatches=0: at least 1"]),
    (
      {**STAGES, "training.pipeline": "interleaved", "training.pipeline_chunks": 0},
      ["training.pipeline_chunks=0: at least 2"],
    ),
    ({**STAGES, "partitioning.parameters.layers": ()}, ["partitioning.parameters.layers"]),
  ],
)
def test_is_refused_with_what_would_work(keys, words):
  with pytest.raises(ValueError, match="the config is refused") as error:
    make_job("single", "lm", **keys)
  for word in words:
    assert word in str(error.value)


def test_a_model_without_stacked_layers_has_no_stages():
  with pytest.raises(ValueError, match=r"mlp has no stacked layers to split; set mesh\.stage=1"):
    make_job("single", "mlp", **{"mesh.stage": 2})
