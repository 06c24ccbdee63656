"""Configs in checkpoints of older versions, with the current keys."""

from collections.abc import Mapping
from typing import Any

from input_pipeline import position
from training.tasks import TASKS

# What versions without these keys did: data sets came from TFDS by name, as bytes; no adapters.
_OLD_DATA = {
  "files": "",
  "evaluation_files": "",
  "evaluation_fraction": 0.05,
  "tokenizer": "bytes",
  "train_tokenizer": 0,
  "packing": "concatenate",
  "prepare_processes": 0,
  "chat_template": "",
  "untrained_conversations": "refuse",
  "long_conversations": "refuse",
  "sources": (),
  "batch_size_ramp": (),
  "sequence_length_ramp": (),
  "stages": (),
}
_OLD_LORA = {"rank": 0, "alpha": 16.0, "targets": ("*",), "rs": False, "dropout": 0.0}
# Likewise of decoders.
_OLD_DECODER = {
  "attention": "grouped_query",
  "latent_size": 0,
  "query_latent_size": 0,
  "rotary_pairs": "halves",
  "layer_types": (),
  "local_rotary_scaling": (),
  "rotary_size": 0,
  "pre_norms": True,
  "query_key_norm_across_heads": False,
  "clip_qkv": 0.0,
  "attention_scale_by_inverse_layer": False,
  "attention_sinks": False,
  "embedding_multiplier": 1.0,
  "residual_multiplier": 1.0,
  "logits_divisor": 1.0,
  "base_width": 0,
  "experts": 0,
  "experts_per_token": 2,
  "shared_feedforward_size": 0,
  "dense_layers": 0,
  "sparse_every": 1,
  "mlp_only_layers": (),
  "router_scores": "softmax",
  "router_normalized": True,
  "router_scale": 1.0,
  "router_groups": 1,
  "router_top_groups": 1,
  "router_group_score": "max",
  "router_bias": False,
  "router_correction": False,
  "expert_biases": False,
  "gate_limit": 0.0,
  "up_offset": 0.0,
  "expert_exchange": "rounds",
  "expert_capacity": 1.25,
}


def upgraded(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a checkpoint's config with the current keys.

  `data.skip_batches` becomes `data.skip_rows`, and `task` replaces `data.kind` and `training.loss`.
  Keys that an older version did not have get the value that preserves its behaviour.
  """
  data, training = dict(config["data"]), dict(config["training"])
  rows = position.batches(sorted(data.pop("skip_batches", ())), data["global_batch_size"])
  # Before there were tasks, the recipe chose a kind of data and a loss.
  data.pop("kind", None)
  loss, named = training.pop("loss", None), {task.trained_as: name for name, task in TASKS.items()}
  task = {"task": named[loss]} if loss in named else {}
  model = config["model"]
  if model["name"] == "transformer":
    derived = {
      "max_positions": data["sequence_length"],
      "base_head_size": model["head_size"],
      "value_head_size": model["head_size"],
      "latent_norm_epsilon": model["norm_epsilon"] if model.get("latent_size") else 1e-6,
      "expert_feedforward_size": model.get("feedforward_size"),
    }
    model = {**derived, **_OLD_DECODER, **model}
  elif model["name"] == "mlp":
    model = {"base_width": 0, **model}
  return {
    "lora": _OLD_LORA,
    **config,
    "model": model,
    "data": {**_OLD_DATA, "skip_batches": (), "skip_rows": rows, **data},
    "training": {
      "trainable": ("*",),
      "frozen_dtype": training["parameter_dtype"],
      "tokens": 0,
      "z_loss": 0.0,
      "balance_loss": 0.0,
      "router_z_loss": 0.0,
      "router_bias_rate": 0.0,
      "grouped_matmul": "tiles",
      "gradient_reduction": "microbatch",
      "gradient_reduction_dtype": "compute",
      "matmul_dtype": "compute",
      "matmul_scaling": "current",
      "scan_unroll": 1,
      "pipeline": "1f1b",
      "pipeline_chunks": 2,
      "pipeline_ends": "masked",
      "pipeline_gather": "auto",
      "microbatches": 1,
      "dpo_beta": 0.1,
      "dpo_label_smoothing": 0.0,
      "stochastic_rounding": False,
      **training,
    },
    "optimizer": {
      "state_dtype": training["parameter_dtype"],
      **_upgraded_optimizer(config["optimizer"]),
    },
    **task,
  }


def _upgraded_optimizer(keys: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a checkpoint's section `optimizer` with the current keys."""
  return {
    "arguments": "",
    "final_fraction": 0.1 if keys["schedule"] == "cosine" else 1.0,
    "warmup_tokens": 0,
    "decay_steps": 0,
    "decay_tokens": 0,
    "decay": "linear",
    "independent_weight_decay": False,
    "groups": (),
    "clip_groups": False,
    "clip_quantile": 0.0,
    "clip_window": 50,
    "ema_decays": (),
    "state_memory": "device",
    **keys,
  }
