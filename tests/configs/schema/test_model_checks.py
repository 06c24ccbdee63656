"""Keys of a model that do not go together are refused; what follows from the others."""

import pytest

from configs.schema import finalize, model_checks, validate
from tests.configs.loading import SIZES, checked, finalized, load, settings

# ------------------------------ attention kernels ------------------------------

LLAMA = {"data.global_batch_size": 8, "model.separate_documents": False}
CUDNN = {**LLAMA, "training.attention_kernel": "cudnn"}


def finalized_attention(platform="gpu", capability=9.0, /, **overrides):
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
    ("gpu", 9.0, {"mesh.context": 2}, "cudnn"),  # of complete rows of half of the heads
    ("gpu", 9.0, {"mesh.context": 2, "model.context_attention": "ring"}, "blockwise"),
    ("gpu", 9.0, {"data.sequence_length": 512}, "xla"),
    ("tpu", 0.0, {}, "splash"),
  ],
)
def test_the_default_is_the_kernel_that_can(platform, capability, changes, kernel):
  config = finalized_attention(platform, capability, **{**LLAMA, **changes})
  assert config.training.attention_kernel == kernel


@pytest.mark.parametrize(
  ("keys", "said"),
  [
    ("mesh.context=2 model.context_attention=ring", "mesh.context=2 splits the rows, with"),
    ("mesh.context=3", "mesh.context=3 splits the rows, and model.heads=32 is not a multiple of"),
    ("training.compute_dtype=float32", "training.compute_dtype=float32, and it takes bfloat16"),
    ("model.head_size=260", "model.head_size=260, and it takes multiples of 8 up to 256"),
    ("model.head_size=124", "model.head_size=124, and it takes multiples of 8 up to 256"),
    ("model.value_head_size=64", "model.value_head_size=64, and it takes model.head_size's"),
    ("model.separate_documents=True", "separate_documents=True, and it masks no documents"),
    ("model.attention_soft_cap=5.0", "model.attention_soft_cap=5.0, and it has no soft cap"),
    ("model.attention_sinks=True", "model.attention_sinks=True, and its softmax has no sinks"),
  ],
)
def test_what_cudnn_cannot_do_is_refused_by_name(keys, said):
  config = finalized_attention(**{**CUDNN, **settings(keys)})
  with pytest.raises(ValueError, match=f"attention_kernel=cudnn: .*{said}.*; set it to blockwise"):
    validate.check(config, {**SIZES, "context": config.mesh.context})


@pytest.mark.parametrize(
  ("changes", "said"),
  [
    ({"training.compute_dtype": "float64"}, "it computes in float32"),
    ({"data.sequence_length": 1280}, "data.sequence_length=1280 is not a multiple of 1024, two"),
    ({"data.sequence_length_ramp": ((0, 512), (9, 2048))}, "data.sequence_length_ramp has rows of"),
    ({"data.sequence_length_ramp": ((0, 1024), (9, 2048))}, ""),
    ({"data.sequence_length": 1280, "model.context_attention": "gather"}, ""),
    ({}, ""),
  ],
)
def test_splash_takes_a_ring_of_pieces_of_whole_blocks(changes, said):
  split = {"mesh.context": 4, "data.sequence_length": 2048, "model.context_attention": "ring"}
  config = finalized_attention("cpu", 0.0, **{**LLAMA, **split, **changes})
  why = model_checks.no_splash(config.model, config.training, config.data, config.mesh.context)
  assert why.startswith(said)
  assert bool(why) is bool(said)


def test_what_cudnn_can_do_is_not_refused():
  validate.check(finalized_attention(**CUDNN, **{"model.window": 4096}), SIZES)


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
  config = finalized_attention(**CUDNN)
  with pytest.raises(ValueError, match=f"cudnn: {said}; set it to blockwise"):
    model_checks.check_attention_device(config.training, platform, capability)
  model_checks.check_attention_device(config.training, "gpu", 9.0)
  model_checks.check_attention_device(
    finalized_attention("cpu", 0.0, **LLAMA).training, platform, capability
  )


# ------------------------------ low-rank adapters ------------------------------


def test_adapters_are_trained():
  config = checked("lora.rank=4 lora.targets=('o*','layers/attention/key')")
  assert config.training.trainable == ("*/lora_*",)
  again = finalize.finalize(config, "cpu")
  assert again.to_json_best_effort() == config.to_json_best_effort()
  more = checked("lora.rank=4 training.trainable=('final_norm/*',)")
  assert more.training.trainable == ("*/lora_*", "final_norm/*")
  off = checked()
  assert off.training.trainable == ("*",)
  assert (off.lora.targets, off.training.frozen_dtype) == (("*",), "float32")


# ------------------------------ muP ------------------------------


def test_the_folder_of_a_model_is_refused():
  config = finalized("lm", **{"model.base_width": 64})
  with config.unlocked():
    config.model.folder = "Qwen3-0.6B"
  with pytest.raises(ValueError, match=r"the parameters of Qwen3-0\.6B are a trained model's"):
    validate.check(config, SIZES)


@pytest.mark.parametrize("width", [0, 32, 128])
def test_the_base_model_has_the_same_heads_and_the_scale_is_as_without(width):
  config = checked(f"model.base_width={width}")
  assert (config.model.head_size, config.model.base_head_size) == (16, 16)
  assert config.model.attention_scale == 16**-0.5


def test_scores_of_larger_heads_fall_as_their_size():
  assert checked("model.base_width=64 model.base_head_size=4").model.attention_scale == 4**0.5 / 16
  assert checked("model.base_width=64 model.attention_scale=0.3").model.attention_scale == 0.3


# ------------------------------ vision transformers ------------------------------


def test_sizes_follow_from_the_data_set():
  model = finalized("vit").model
  assert (model.input_size, model.image_size, model.output_size) == (64, 8, 10)
  coloured = finalized("vit", **settings("model.input_size=3072 model.channels=3"))
  assert coloured.model.image_size == 32
