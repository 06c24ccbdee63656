"""Which attention kernel a config gets on which device, and the refusals of the others."""

import pytest

from configs.keys import table
from configs.schema import attention_checks, finalize, validate
from tests.configs.loading import load

LLAMA = {"data.global_batch_size": 8, "model.separate_documents": False}
CUDNN = {**LLAMA, "training.attention_kernel": "cudnn"}


def finalized(platform="gpu", capability=9.0, /, **overrides):
  config = load("single", "model=llama3_8b", **overrides)
  return finalize.finalize(config, platform, None, capability)


@pytest.mark.parametrize(
  ("platform", "capability", "changes", "kernel"),
  [
    ("gpu", 9.0, {}, "cudnn"),
    ("gpu", 10.0, {"model.window": 4096, "model.global_every": 2}, "cudnn"),
    ("gpu", 8.9, {}, "blockwise"),
    ("gpu", 0.0, {}, "blockwise"),  # AMD's, or none that is known
    ("gpu", 9.0, {"model.separate_documents": True}, "blockwise"),
    ("gpu", 9.0, {"model.attention_sinks": True}, "blockwise"),
    ("gpu", 9.0, {"mesh.context": 2}, "blockwise"),
    ("gpu", 9.0, {"data.sequence_length": 512}, "xla"),
    ("tpu", 0.0, {}, "splash"),
  ],
)
def test_the_default_is_the_kernel_that_can(platform, capability, changes, kernel):
  config = finalized(platform, capability, **{**LLAMA, **changes})
  assert config.training.attention_kernel == kernel


@pytest.mark.parametrize(
  ("changes", "said"),
  [
    ({"mesh.context": 2}, "mesh.context=2 splits the rows"),
    ({"training.compute_dtype": "float32"}, "training.compute_dtype=float32, and it takes bfloat1"),
    ({"model.head_size": 260}, "model.head_size=260, and it takes multiples of 8 up to 256"),
    ({"model.value_head_size": 64}, "model.value_head_size=64, and it takes model.head_size's"),
    ({"model.head_size": 124}, "model.head_size=124, and it takes multiples of 8 up to 256"),
    (
      {"model.separate_documents": True},
      "model.separate_documents=True, and it masks no documents",
    ),
    ({"model.attention_soft_cap": 5.0}, "model.attention_soft_cap=5.0, and it has no soft cap"),
    ({"model.attention_sinks": True}, "model.attention_sinks=True, and its softmax has no sinks"),
  ],
)
def test_what_cudnn_cannot_do_is_refused_by_name(changes, said):
  config = finalized(**{**CUDNN, **changes})
  with pytest.raises(ValueError, match=f"attention_kernel=cudnn: {said}.*; set it to blockwise"):
    validate.check(config, {**table.section("mesh"), "context": config.mesh.context})


@pytest.mark.parametrize(
  ("changes", "said"),
  [
    ({"training.compute_dtype": "float64"}, "it computes in float32"),
    ({"data.sequence_length": 1280}, "data.sequence_length=1280 is not a multiple of 1024, two"),
    (
      {"data.sequence_length_ramp": ((0, 512), (9, 2048))},
      "data.sequence_length_ramp has rows of 512 tokens, no multiple of 1024, two pieces",
    ),
    ({"data.sequence_length_ramp": ((0, 1024), (9, 2048))}, ""),
    ({"data.sequence_length": 1280, "model.context_attention": "gather"}, ""),
    ({}, ""),
  ],
)
def test_splash_takes_a_ring_of_pieces_of_whole_blocks(changes, said):
  split = {"mesh.context": 4, "data.sequence_length": 2048, "model.context_attention": "ring"}
  config = finalized("cpu", 0.0, **{**LLAMA, **split, **changes})
  assert attention_checks.no_splash(config).startswith(said)
  assert bool(attention_checks.no_splash(config)) is bool(said)


def test_what_cudnn_can_do_is_not_refused():
  validate.check(finalized(**CUDNN, **{"model.window": 4096}), table.section("mesh"))


@pytest.mark.parametrize(
  ("platform", "capability", "said"),
  [
    ("cpu", 0.0, "it is for GPUs, and these are cpus"),
    ("tpu", 0.0, "it is for GPUs, and these are tpus"),
    ("gpu", 8.0, "the GPU's compute capability is 8.0, and it needs 9.0 or more"),
    ("gpu", 0.0, "the GPU's compute capability is unknown, and it needs 9.0 or more"),
  ],
)
def test_cudnn_is_refused_on_devices_without_it(platform, capability, said):
  config = finalized(**CUDNN)
  with pytest.raises(ValueError, match=f"cudnn: {said}; set it to blockwise"):
    attention_checks.check_device(config, platform, capability)
  attention_checks.check_device(config, "gpu", 9.0)
  attention_checks.check_device(finalized("cpu", 0.0, **LLAMA), platform, capability)
