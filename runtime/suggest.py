"""The suggestion at the end of a message about an unknown name: `; did you mean 'x'?`."""

import difflib
from collections.abc import Iterable

# Of difflib's ratio: 2 x matching characters / characters of both. Transposed letters in a name of
# three keep it (mlp, mpl: 0.67); names that share a few letters do not (wikitext, kitti: 0.62).
CUTOFF = 0.65


# What config keys and their values are called elsewhere: nanoGPT, nanochat, transformers, PyTorch,
# MaxText, papers.
ELSEWHERE = {
  "model.model_size": "width n_embd d_model hidden_size embed_dim embedding_size model_dim dim",
  "model.layers": "n_layer n_layers num_layers num_hidden_layers num_decoder_layers",
  "model.depth": "num_blocks",
  "model.heads": "n_head n_heads num_heads num_attention_heads num_query_heads",
  "model.kv_heads": "n_kv_head n_kv_heads num_kv_heads num_key_value_heads",
  "model.head_size": "head_dim d_head",
  "model.feedforward_size": "d_ff ffn ffn_dim mlp_dim mlp_size intermediate_size hidden_dim",
  "model.vocabulary_size": "vocab vocab_size n_vocab",
  "model.dropout_rate": "dropout resid_pdrop",
  "model.activation": "hidden_act act act_fn nonlinearity",
  "model.norm_epsilon": "rms_norm_eps layer_norm_eps",
  "model.rotary_base": "rope_theta rope_base",
  "model.tied_embeddings": "tie_word_embeddings tie_embeddings weight_tying",
  "model.biases": "bias use_bias",
  "model.window": "sliding_window",
  "model.experts": "num_experts n_experts num_local_experts",
  "model.experts_per_token": "num_experts_per_tok moe_top_k",
  "data.global_batch_size": "batch bs batch_size train_batch_size per_device_train_batch_size",
  "data.sequence_length": "block_size context_length seq_len seq_length max_seq_len n_ctx",
  "data.name": "dataset dataset_name",
  "training.steps": "max_iters max_steps num_steps iters iterations num_iterations epochs",
  "training.gradient_accumulation_steps": "grad_accum accumulation_steps grad_accum_steps",
  "training.compute_dtype": "dtype precision mixed_precision",
  "training.rematerialization": "remat gradient_checkpointing activation_checkpointing",
  "training.attention_kernel": "flash_attention attn_implementation",
  "optimizer.name": "optim opt",
  "optimizer.learning_rate": "lr max_lr base_lr peak_lr",
  "optimizer.final_fraction": "min_lr min_lr_ratio",
  "optimizer.schedule": "lr_scheduler lr_scheduler_type scheduler lr_schedule",
  "optimizer.warmup_steps": "warmup warmup_iters num_warmup_steps",
  "optimizer.decay_steps": "lr_decay_iters",
  "optimizer.weight_decay": "wd decay_rate",
  "optimizer.beta_1": "beta1 b1 adam_beta1",
  "optimizer.beta_2": "beta2 b2 adam_beta2",
  "optimizer.epsilon": "eps adam_epsilon",
  "optimizer.clip_norm": "grad_clip max_grad_norm gradient_clip clip",
  "optimizer.ema_decays": "ema",
  "evaluation.every_steps": "eval_interval eval_steps eval_every",
  "evaluation.steps": "eval_iters eval_batches",
  "metrics.every_steps": "log_interval log_every logging_steps",
  "metrics.sinks": "wandb wandb_log report_to",
  "checkpoint.every_steps": "save_interval save_every save_steps checkpoint_interval",
  "checkpoint.initialize_from": "init_from resume_from pretrained",
  "lora.rank": "lora_r r",
  "mesh.data": "dp",
  "mesh.tensor": "tp tensor_parallel_size model_parallel_size",
  "mesh.stage": "pp pipeline_parallel_size",
  "mesh.context": "cp sp context_parallel_size",
  "mesh.expert": "ep expert_parallel_size",
  "workdir": "out_dir output_dir logdir",
  "relu_squared": "relu2 squared_relu",
  "silu": "swish swiglu",
  "gelu": "gelu_new gelu_tanh gelu_pytorch_tanh geglu",
  "bfloat16": "bf16",
  "float32": "fp32 f32",
}


def elsewhere(name: str) -> list[str]:
  """Returns what is called so elsewhere: dotted config keys, flags and values of keys."""
  word = name.rpartition(".")[2].lower()
  return [ours for ours, theirs in ELSEWHERE.items() if word in theirs.split()]


def closest(name: str, known: Iterable[str]) -> str | None:
  """Returns the known name that a misspelled one was meant to be; None where none is similar.

  One that means the same elsewhere comes first.

  Dotted names are compared part by part, so that a section which both share does not make two
  keys similar. The last part alone decides where a section was left out or is another one, and
  then it must be the same.
  """
  known, meant = list(known), elsewhere(name)
  meant += [other.rpartition(".")[2] for other in meant]
  if found := [other for other in meant if other in known]:
    return found[0]
  parts = name.split(".")

  def similarity(other: str) -> float:
    others = other.split(".")
    if len(parts) == len(others):
      similar = min(_ratio(*pair) for pair in zip(parts, others, strict=True))
      if similar >= CUTOFF:
        return similar
    return CUTOFF if "." in other and others[-1] == parts[-1] else 0.0

  best = max(known, key=similarity, default=None)
  return best if best is not None and similarity(best) >= CUTOFF else None


def nearest(name: str, known: Iterable[str]) -> str:
  """Returns `; did you mean 'x'?`, or nothing where no known name is similar."""
  found = closest(name, known)
  return f"; did you mean {found!r}?" if found is not None else ""


def most_similar(name: str, known: Iterable[str], count: int) -> list[str]:
  """Returns that many of the known names, the most similar first, however little they are."""
  return sorted(known, key=lambda other: -_ratio(name, other))[:count]


def _ratio(one: str, other: str) -> float:
  one, other = one.lower(), other.lower()
  ratio = difflib.SequenceMatcher(None, one, other).ratio()
  # A name that another one ends with is rather that (global_batch_size) than one that goes on
  # (batch_size_ramp).
  return ratio + 0.1 if ratio >= CUTOFF and other.endswith(f"_{one}") else ratio
