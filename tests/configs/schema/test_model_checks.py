"""Keys of a model that do not go together are refused; what follows from the others."""

import pytest

from configs import base
from configs.keys import table
from configs.schema import finalize, model_checks, validate
from partitioning.mesh_sizes import resolve_sizes
from tests.configs.loading import finalized, load
from tests.helpers.jobs import SMALL
from tests.parity.latents import LATENTS

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
    ("gpu", 9.0, {"mesh.context": 2}, "blockwise"),
    ("gpu", 9.0, {"data.sequence_length": 512}, "xla"),
    ("tpu", 0.0, {}, "splash"),
  ],
)
def test_the_default_is_the_kernel_that_can(platform, capability, changes, kernel):
  config = finalized_attention(platform, capability, **{**LLAMA, **changes})
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
  config = finalized_attention(**{**CUDNN, **changes})
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
  config = finalized_attention("cpu", 0.0, **{**LLAMA, **split, **changes})
  assert model_checks.no_splash(config).startswith(said)
  assert bool(model_checks.no_splash(config)) is bool(said)


def test_what_cudnn_can_do_is_not_refused():
  validate.check(finalized_attention(**CUDNN, **{"model.window": 4096}), table.section("mesh"))


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
    model_checks.check_attention_device(config, platform, capability)
  model_checks.check_attention_device(config, "gpu", 9.0)
  model_checks.check_attention_device(
    finalized_attention("cpu", 0.0, **LLAMA), platform, capability
  )


# ------------------------------ latent attention ------------------------------


def lines(overrides):
  return list(model_checks.latent_errors(finalized("lm", **overrides)))


@pytest.mark.parametrize(
  ("overrides", "said"),
  [
    ({"model.latent_size": 0}, "model.latent_size=0: model.attention=latent computes keys and"),
    ({"model.query_latent_size": -1}, "model.query_latent_size=-1: at least 1, or 0 for none"),
    ({"model.kv_heads": 4}, "values of its own; set it to model.heads=8"),
    ({"model.rotary_size": 0}, "make it even, above 0 and below 10, such as 2"),
    ({"model.rotary_size": 10}, "model.rotary_size=10: with model.attention=latent a part of the"),
    ({"model.positions": "learned"}, "model.positions='learned': model.attention=latent has a"),
    ({"model.query_key_norm": True}, "normalizes latent vectors, not heads; set it to False"),
    ({"model.attention_sinks": True}, "model.attention=latent has none; set it to False"),
    ({"model.attention_scale_by_inverse_layer": True}, "=latent has none; set it to False"),
    ({"model.clip_qkv": 2.0}, "model.clip_qkv=2.0: model.attention=latent has none; set it to 0.0"),
    ({"model.biases": "query,up"}, "model.biases='query,up': of model.attention=latent the"),
    ({"model.biases": "all"}, "all or none; set it to none, mlp, attention or attention,mlp"),
    ({"model.base_width": 20}, "muP has no rule for the sizes of latent vectors; set it to 0"),
    ({"lora.rank": 2}, "lora.rank=2: the projections of model.attention=latent have no adapters"),
  ],
)
def test_what_latent_attention_cannot_have_is_refused(overrides, said):
  [line] = lines({**LATENTS, **overrides})
  assert said in line


@pytest.mark.parametrize(
  ("overrides", "said"),
  [
    ({"model.latent_size": 8}, "model.latent_size=8 is about model.attention=latent; set that, or"),
    ({"model.query_latent_size": 8}, "model.query_latent_size=8 is about"),
    ({"model.latent_norm_epsilon": 1e-5}, "model.latent_norm_epsilon=1e-05 is about"),
    ({"model.value_head_size": 7}, "model.value_head_size=7 is about model.attention=latent; set"),
    (
      {"model.positions": "learned", "model.rotary_pairs": "adjacent"},
      "model.rotary_pairs='adjacent': model.positions='learned' turns nothing",
    ),
  ],
)
def test_its_keys_are_refused_without_it(overrides, said):
  [line] = lines(overrides)
  assert said in line


def test_what_goes_together_is_accepted():
  assert lines({}) == []
  assert lines({"model.rotary_pairs": "adjacent"}) == []
  assert lines({**LATENTS, "model.biases": "mlp", "model.window": 5}) == []
  assert lines({**LATENTS, "model.biases": "attention,mlp"}) == []
  assert lines({**LATENTS, "training.matmul_dtype": "int8"}) == []


# ------------------------------ mixtures of experts ------------------------------


def message(mesh=None, **overrides):
  config = base.get_config("lm")
  config.update_from_flattened_dict({**SMALL["lm"], **overrides})
  config = finalize.finalize(config, "cpu")
  with pytest.raises(ValueError, match="the config is refused") as refusal:
    validate.check(config, resolve_sizes(mesh or {}, None))
  return str(refusal.value)


EXPERTS = {"model.experts": 6}


@pytest.mark.parametrize(
  ("overrides", "said"),
  [
    ({"model.router_scale": 2.0}, "no layer has experts; leave it at 1.0, or set model.experts"),
    ({"training.balance_loss": 0.1}, "training.balance_loss=0.1: no layer has experts"),
    ({**EXPERTS, "model.experts_per_token": 7}, "model.experts_per_token=7: from 1 to"),
    ({**EXPERTS, "model.experts_per_token": 0}, "model.experts_per_token=0"),
    (
      {**EXPERTS, "model.router_groups": 4},
      "model.router_groups=4 groups; set model.router_groups to one of 1, 2, 3, 6",
    ),
    (
      {**EXPERTS, "model.router_groups": 3, "model.router_top_groups": 4},
      "model.router_top_groups=4: from 1 to model.router_groups=3",
    ),
    (
      {**EXPERTS, "model.router_groups": 6, "model.router_group_score": "top2"},
      "model.router_group_score=top2: groups of model.experts / model.router_groups = 1",
    ),
    (
      {**EXPERTS, "model.router_groups": 3, "model.experts_per_token": 4},
      "model.experts_per_token=4 is more than the 2 experts of model.router_top_groups=1 groups",
    ),
    ({**EXPERTS, "model.expert_capacity": 0.0}, "model.expert_capacity=0.0: above 0; 1.25 has"),
    ({**EXPERTS, "model.expert_exchange": "round"}, "one of rounds, gathered; did you mean"),
    ({**EXPERTS, "model.router_scores": "sigmod"}, "did you mean 'sigmoid'"),
    ({**EXPERTS, "training.grouped_matmul": "dense"}, "one of tiles, ragged"),
    ({**EXPERTS, "model.dense_layers": 2}, "model.dense_layers=2: from 0 to 1, one less than"),
    ({**EXPERTS, "model.sparse_every": 3}, "model.mlp_only_layers=(): no layer has experts"),
    ({**EXPERTS, "model.mlp_only_layers": (0, 1)}, "=(0, 1): no layer has experts; set model.exp"),
    ({**EXPERTS, "model.mlp_only_layers": (2,)}, "=(2,): 2 is no number of a layer, from 0 to 1"),
    ({"model.experts": -1}, "model.experts=-1: at least 0, with which no layer has experts"),
    ({**EXPERTS, "model.sparse_every": 0}, "model.sparse_every=0: at least 1"),
    ({**EXPERTS, "training.router_bias_rate": 0.1}, "moves the bias of model.router_correction"),
    ({**EXPERTS, "model.gated": False}, "the MLPs of experts are gated"),
    ({**EXPERTS, "lora.rank": 2}, "lora.rank=2: adapters are for dense models"),
    ({**EXPERTS, "training.matmul_dtype": "int8"}, "experts are not multiplied in 8 bits"),
    ({**EXPERTS, "training.balance_loss": -1.0}, "training.balance_loss=-1.0: at least 0"),
  ],
)
def test_what_does_not_go_together(overrides, said):
  assert said in message(**overrides)


def test_the_experts_of_a_device_are_as_many_on_each():
  said = message({"expert": 4}, **EXPERTS)
  assert (
    "model.experts=6 is not divisible by mesh.expert=4; set mesh.expert to one of 2, 3, 6" in said
  )


def test_the_axis_of_experts_is_refused_without_experts():
  said = message({"data": 2, "expert": 4})
  assert "mesh.expert=4: no layer has experts" in said
  assert "set mesh.data=8 and mesh.expert=1" in said


# ------------------------------ low-rank adapters ------------------------------


def finalized_lora(recipe="lm", **overrides):
  config = base.get_config(recipe)
  config.update_from_flattened_dict(overrides)
  config = finalize.finalize(config, "cpu")
  validate.check(config, resolve_sizes({}, None))
  return config


@pytest.mark.parametrize(
  ("overrides", "said"),
  [
    ({"lora.rank": -2}, r"lora\.rank=-2: at least 1, or 0 for no adapters"),
    ({"lora.alpha": 32.0}, r"lora\.alpha=32\.0: lora\.rank=0 means no adapters; set lora\.rank"),
    ({"lora.targets": ("query",)}, r"lora\.targets=\('query',\): lora\.rank=0 means no adapters"),
    ({"lora.rank": 4, "lora.alpha": 0.0}, r"lora\.alpha=0\.0: above 0"),
    ({"lora.rank": 4, "lora.dropout": 1.0}, r"lora\.dropout=1\.0: at least 0 and below 1"),
    (
      {"lora.rank": 4, "lora.targets": ("query", "q_proj")},
      r"lora\.targets: 'q_proj' matches no linear layer; .* The layers are query, key, value, out, "
      r"gate, up, down; embeddings",
    ),
    ({"lora.rank": 4, "lora.targets": ()}, r"lora\.targets: \(\) names no layer"),
    (
      {"lora.rank": 4, "model.gated": False, "lora.targets": ("gate",)},
      r"'gate' matches no linear layer",
    ),
    ({"training.frozen_dtype": "float16"}, r"training\.frozen_dtype='float16': one of bfloat16, f"),
  ],
)
def test_refused_with_the_key(overrides, said):
  with pytest.raises(ValueError, match=said):
    finalized_lora(**overrides)


def test_a_model_without_adapters_is_refused():
  with pytest.raises(ValueError, match=r"lora\.rank=4: the model mlp has no adapters"):
    finalized_lora("mlp", **{"lora.rank": 4})


def test_targets_become_names_and_the_adapters_are_trained():
  config = finalized_lora(**{"lora.rank": 4, "lora.targets": ("o*", "layers/attention/key")})
  assert config.lora.targets == ("layers/attention/key", "layers/attention/out")
  assert config.training.trainable == ("*/lora_*",)
  again = finalize.finalize(config, "cpu")
  assert again.to_json_best_effort() == config.to_json_best_effort()
  assert finalized_lora(
    **{"lora.rank": 4, "training.trainable": ("final_norm/*",)}
  ).training.trainable == ("*/lora_*", "final_norm/*")
  off = finalized_lora()
  assert off.training.trainable == ("*",)
  assert (off.lora.targets, off.training.frozen_dtype) == (("*",), "float32")


def test_off_is_the_default():
  assert base.get_config("lm").lora.to_dict() == model_checks.LORA_OFF


# ------------------------------ muP ------------------------------

SIZES = resolve_sizes({}, None)


def finalized_mup(recipe="lm", **overrides):
  config = base.get_config(recipe)
  config.update_from_flattened_dict(overrides)
  return finalize.finalize(config, "cpu")


@pytest.mark.parametrize(
  ("recipe", "overrides", "said"),
  [
    ("lm", {"model.base_width": -1}, "model.base_width=-1: at least 1, or 0 to turn muP off"),
    ("mlp", {"model.base_width": -1}, "model.base_width=-1: at least 1, or 0 to turn muP off"),
    (
      "lm",
      {"model.base_head_size": 8},
      "model.base_head_size=8 is about muP, which is off; set model.base_width, or leave it out",
    ),
    (
      "lm",
      {"model.base_width": 64, "model.base_head_size": 0},
      "model.base_head_size=0: at least 1",
    ),
    (
      "lm",
      {"model.base_width": 64, "lora.rank": 4},
      "model.base_width=64 with lora.rank=4: muP has no rule for adapters, whose rank is no width",
    ),
    (
      "lm",
      {"model.base_width": 64, "checkpoint.initialize_from": "hf://some/model"},
      "model.base_width=64: the parameters of hf://some/model are a trained model's, and muP would",
    ),
  ],
)
def test_what_mup_does_not_go_with_is_refused(recipe, overrides, said):
  with pytest.raises(ValueError, match="the config is refused") as error:
    validate.check(finalized_mup(recipe, **overrides), SIZES)
  assert said in str(error.value)


def test_the_folder_of_a_model_is_refused():
  config = finalized_mup(**{"model.base_width": 64})
  with config.unlocked():
    config.model.folder = "Qwen3-0.6B"
  with pytest.raises(ValueError, match=r"the parameters of Qwen3-0\.6B are a trained model's"):
    validate.check(config, SIZES)


@pytest.mark.parametrize("width", [0, 32, 128])
def test_the_base_model_has_the_same_heads_and_the_scale_is_as_without(width):
  config = finalized_mup(**{"model.base_width": width})
  validate.check(config, SIZES)
  assert (config.model.head_size, config.model.base_head_size) == (16, 16)
  assert config.model.attention_scale == 16**-0.5


def test_scores_of_larger_heads_fall_as_their_size():
  config = finalized_mup(**{"model.base_width": 64, "model.base_head_size": 4})
  validate.check(config, SIZES)
  assert config.model.attention_scale == 4**0.5 / 16
  given = finalized_mup(**{"model.base_width": 64, "model.attention_scale": 0.3})
  assert given.model.attention_scale == 0.3


# ------------------------------ vision transformers ------------------------------


def finalized_vit(**changed):
  config = base.get_config("vit", mesh={"data": 2})
  for key, value in changed.items():
    section = config.training if key in config.training else config.model
    section[key] = value
  return finalize.finalize(config, "cpu")


def refusal(**changed):
  config = finalized_vit(**changed)
  with pytest.raises(ValueError, match="the config is refused") as error:
    validate.check(config, resolve_sizes(config.mesh, 2))
  return str(error.value)


def test_sizes_follow_from_the_data_set():
  model = finalized_vit().model
  assert (model.input_size, model.image_size, model.output_size) == (64, 8, 10)
  assert finalized_vit(input_size=3 * 32 * 32, channels=3).model.image_size == 32


@pytest.mark.parametrize(
  ("changed", "why"),
  [
    ({"patch_size": 3}, "patch_size=3: it does not divide model.image_size=8; take one of 1, 2, 4"),
    ({"channels": 3}, "input_size=64: an image of 4 x 4 pixels with model.channels=3 has 48"),
    ({"image_size": 4}, "input_size=64: an image of 4 x 4 pixels with model.channels=1 has 16"),
    ({"heads": 5}, "model.heads=5: model.model_size=64 is no multiple of it"),
    ({"heads": 0}, "model.heads=0: at least 1"),
    ({"dropout_rate": 1.0}, "model.dropout_rate=1.0: at least 0 and below 1"),
    ({"norm_epsilon": 0.0}, "model.norm_epsilon=0.0: above 0"),
    ({"patch_size": 0}, "model.patch_size=0: at least 1"),
    ({"matmul_dtype": "int8"}, "training.matmul_dtype='int8': the model vit does not use it"),
    ({"attention_kernel": "splash"}, "training.attention_kernel='splash': one of xla"),
    ({"loss_chunks": 2}, "training.loss_chunks=2: classification has no vocabulary"),
    ({"rematerialization": "full,query=save"}, "training.rematerialization: "),
  ],
  ids=str,
)
def test_what_does_not_go_together_is_refused(changed, why):
  assert why in refusal(**changed)
