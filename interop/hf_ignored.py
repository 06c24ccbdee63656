"""Keys of a config.json that no family reads: without effect, or allowed with one value only."""

from interop.hf_quantization import UNQUANTIZED

# About training, generation, files and classes; nothing of it changes a model's logits.
IGNORED = (
  *("architectures", "_name_or_path", "transformers_version", "auto_map", "name_or_path"),
  *("torch_dtype", "dtype", "use_cache", "initializer_range", "tokenizer_class", "use_bfloat16"),
  *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
  *("unk_token_id", "prefix", "task_specific_params", "finetuning_task", "problem_type"),
  *("id2label", "label2id", "num_labels", "return_dict", "torchscript", "tf_legacy_loss"),
  *("output_attentions", "output_hidden_states", "output_scores", "return_dict_in_generate"),
  *("_attn_implementation", "attn_implementation", "_attn_implementation_autoset"),
  *("_experts_implementation", "experts_implementation"),
  *("chunk_size_feed_forward", "cross_attention_hidden_size", "is_decoder", "pretraining_tp"),
  # Dropout: that of training here is model.dropout_rate.
  *("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"),
  # Generation, of versions that kept it in this file.
  *("bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping"),
  *("encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id"),
  *("forced_eos_token_id", "length_penalty", "max_length", "min_length", "no_repeat_ngram_size"),
  *("num_beam_groups", "num_beams", "num_return_sequences", "remove_invalid_values"),
  *("repetition_penalty", "suppress_tokens", "temperature", "top_k", "top_p", "typical_p"),
  *("max_new_tokens", "max_window_size"),
  # Tools that leave a note.
  *("unsloth_version", "unsloth_fixed", "transformers.js_config", "model_name"),
)

# Key -> (the values that it may have, why no other).
ONLY: dict[str, tuple[tuple, str]] = {
  "compression_config": (
    (None,),
    f"the weights are quantized; {UNQUANTIZED}",
  ),
  "is_encoder_decoder": ((False, None), "only decoders are read"),
  "tie_encoder_decoder": ((False, None), "only decoders are read"),
  "add_cross_attention": ((False, None), "only decoders without cross-attention are read"),
  "use_bidirectional_attention": ((False, None), "only causal attention is read"),
  "attention_bias": ((False, None), "models of this type are read without"),
  "mlp_bias": ((False, None), "models of this type are read without"),
  "pruned_heads": (({}, None), "heads that were pruned are not read"),
}
