"""The section `model`, by kind of model; a decoder's defaults are those of the recipe `lm`."""

from configs.keys.row import ACCEPT, MAY_CHANGE, Key, Rows, Unset, shared
from runtime.forms import MOST_LAYERS

MOST_HEADS = 2**16  # or experts: refusals list how they can be divided
ROTARY = "model.positions=rotary"
DELTA = "model.mixer=gated_delta|kimi_delta"
LATENT, GROUPED_QUERY = "model.attention=latent", "model.attention=grouped_query"

# On resume: what follows from it is compared itself.
_DEPTH: Rows = {
  "depth": Key(
    0,
    "One dial: layers = depth, model_size = 64 x depth, and what follows from these: "
    "feedforward_size, heads, kv_heads and optimizer.learning_rate, each unless it is set. 0: off",
    unit="layers",
    most=MOST_LAYERS,
    resume=MAY_CHANGE,
  )
}

# Of mixtures of experts.
_EXPERTS: Rows = {
  "experts_per_token": Key(2, "top-k", unit="experts"),
  "shared_feedforward_size": Key(
    0, "width of the shared experts together; 0: there are none", unit="dims"
  ),
  "shared_gate": Key(
    False,
    "the shared experts' outputs are multiplied by a sigmoid for each token (Qwen)",
    needs="model.shared_feedforward_size",
  ),
  "dense_layers": Key(0, "the first layers, which have no experts", unit="layers"),
  "sparse_every": Key(1, "of the layers after those each so many-th has experts", unit="layers"),
  "mlp_only_layers": Key((), "further layers without experts, by their numbers from 0 on: (3, 5)"),
  "router_scores": Key(
    "softmax",
    "softmax, sigmoid (DeepSeek-V3), or softmax_of_chosen: over the chosen logits alone (gpt-oss)",
    choices=("softmax", "sigmoid", "softmax_of_chosen"),
  ),
  "router_normalized": Key(True, "the gates of a token are divided by their sum"),
  "router_scale": Key(1.0, "factor of the gates", above=0),
  "router_groups": Key(
    1, "of experts, from the best of which a token's are chosen", unit="groups of experts"
  ),
  "router_top_groups": Key(1, "how many are the best", unit="groups of experts"),
  "router_group_score": Key(
    "max", "the largest score (DeepSeek-V2), or top2: sum of two (V3)", choices=("max", "top2")
  ),
  "router_bias": Key(False, "a trained bias of the router's logits (gpt-oss)"),
  "router_correction": Key(
    False,
    "A bias of the scores by which experts are chosen, moved by training.router_bias_rate (V3)",
  ),
  "router_scales_inputs": Key(
    False, "an expert's input is multiplied by the gate, not its output (Llama 4)"
  ),
  "expert_biases": Key(False, "of an expert's gate, up and down (gpt-oss)"),
  "gate_limit": Key(
    0.0, "largest gate, and largest magnitude of up, in experts (gpt-oss); 0: none"
  ),
  "up_offset": Key(0.0, "added to up in experts (gpt-oss)", finite=True),
  # On resume: the same sums in another order, as with another mesh.
  "expert_exchange": Key(
    "rounds",
    "How tokens reach experts on other devices: rounds of all-to-all, or gathered",
    choices=("rounds", "gathered"),
    resume=MAY_CHANGE,
  ),
  "expert_capacity": Key(
    1.25,
    "Rows of the buffer between two devices, relative to the mean: memory and speed, not results",
    above=0,
    resume=MAY_CHANGE,
  ),
}

# Of mixers with a state; 0: what follows from other keys.
WITH_STATES = ("gated_delta", "kimi_delta", "mamba2", "lightning")
MIXER: Rows = {
  "mixer_heads": Key(0, "heads of values; 0: heads", unit="heads", most=MOST_HEADS),
  "mixer_key_heads": Key(
    0,
    "heads of queries and keys, each of which serves as many heads of values; 0: mixer_heads",
    unit="heads",
    most=MOST_HEADS,
  ),
  "mixer_head_size": Key(0, "of queries and keys; 0: head_size", unit="dims"),
  "mixer_value_head_size": Key(0, "of values; 0: mixer_head_size", unit="dims"),
}

DECODER: Rows = {
  "name": Key("transformer", ""),
  **_DEPTH,
  "layers": Key(3, "transformer blocks", unit="layers", most=MOST_LAYERS),
  "model_size": Key(128, "width of the residual stream", unit="dims"),
  "feedforward_size": Key(384, "hidden width of the MLP", unit="dims"),
  "base_width": Key(
    0,
    "muP: the width at which learning rates were tuned; the other widths of that model are "
    "smaller in proportion. 0: off",
    unit="dims",
    excludes={
      "model.attention=latent": "muP has no rule for the sizes of latent vectors",
      "lora.rank": "muP has no rule for adapters, whose rank is no width",
    },
  ),
  "base_head_size": Key(Unset(int), "muP: head size there; head_size", unit="dims"),
  "attention": Key(
    "grouped_query",
    "grouped_query, or latent: keys and values of all heads are projections of one latent vector "
    "per token (multi-head latent attention, DeepSeek)",
    choices=("grouped_query", "latent"),
    registry="attention",
  ),
  "latent_size": Key(0, "of latent attention: numbers of that vector", unit="dims", needs=LATENT),
  "query_latent_size": Key(
    0, "of a latent vector of the queries; 0: they have none", unit="dims", needs=LATENT
  ),
  "latent_norm_epsilon": Key(
    1e-06, "of the norms of latent vectors; the others have norm_epsilon", above=0, needs=LATENT
  ),
  "value_head_size": Key(Unset(int), "of latent attention; head_size", unit="dims"),
  "heads": Key(8, "query heads", unit="heads", most=MOST_HEADS),
  "kv_heads": Key(
    4, "key/value heads; fewer than heads: grouped-query attention", unit="heads", most=MOST_HEADS
  ),
  "head_size": Key(Unset(int), "model_size / heads", unit="dims"),
  "vocabulary_size": Key(Unset(int), "as the tokenizer's; 256: bytes", unit="tokens", most=2**30),
  "vocabulary_multiple": Key(
    128, "the vocabulary is padded to a multiple of this, on every mesh", unit="tokens"
  ),
  "positions": Key(
    "rotary", "rotary (RoPE) or learned", choices=("rotary", "learned"), registry="positions"
  ),
  "max_positions": Key(Unset(int), "of learned ones; data.sequence_length", unit="tokens"),
  "rotary_base": Key(10000.0, "RoPE's theta", above=0),
  "rotary_size": Key(
    0,
    "Dims of a head that are rotated, the first ones; 0: all. Of latent attention the last ones "
    "of queries, and of a key that all heads share",
    unit="dims",
    needs=ROTARY,
  ),
  "rotary_pairs": Key(
    "halves",
    "dims that are rotated together: i, i + h, or adjacent: 2i, 2i + 1",
    choices=("halves", "adjacent"),
    needs=ROTARY,
  ),
  "rotary_scaling": Key(
    (),
    "For rows longer than pretraining: linear, dynamic, yarn, longrope or llama3, with its "
    'numbers: ("yarn", {"factor": 4.0, "original_length": 32768}); four numbers are llama3\'s '
    "(factor, low, high, original length); (): none",
    needs=ROTARY,
  ),
  "local_rotary_base": Key(
    0.0, "theta of sliding-window layers; 0: rotary_base with rotary_scaling"
  ),
  "local_rotary_scaling": Key(
    (), "of local_rotary_base, as rotary_scaling", needs="model.local_rotary_base"
  ),
  "window": Key(
    0, "sliding-window attention: tokens that a token attends to; 0: all", unit="tokens"
  ),
  "window_chunks": Key(
    False,
    "windows do not slide: a token attends to its own chunk of so many of its document (Llama 4)",
    needs="model.window",
    excludes={LATENT: "its keys are masked by windows that slide"},
  ),
  "global_every": Key(
    0, "every n-th layer has full attention in spite of the window; 0: none", unit="layers"
  ),
  "layer_types": Key(
    (),
    "Instead of global_every: the type of each layer, full or sliding (it has the window), "
    "full_unrotated or sliding_unrotated (without RoPE), mixer (model.mixer in place of "
    "attention), full_with_mixer (side by side, in all layers) or mlp (that alone, or experts: "
    "then the others have none, Nemotron-H); repeated where there are more layers: "
    '("sliding", "sliding", "full")',
    excludes={"model.global_every": "both say which layers see a window"},
  ),
  "mixer": Key(
    "none",
    "What layers of the type mixer have in place of attention, with a state whose size does not "
    "depend on the number of tokens: gated_delta (Gated DeltaNet, arXiv:2412.06464), kimi_delta "
    "(Kimi Delta Attention, arXiv:2510.26692), mamba2 (arXiv:2405.21060), lightning (lightning "
    "attention, arXiv:2501.08313), or short_convolution (LFM2)",
    choices=("none", "gated_delta", "kimi_delta", "mamba2", "lightning", "short_convolution"),
    registry="mixer",
    excludes={
      "model.base_width": "muP has no rule for the sizes of mixers",
      "training.matmul_dtype": "8-bit matmuls are not for mixers, whose decays are matmuls too",
    },
  ),
  "convolution_size": Key(
    4,
    "tokens that a mixer's causal convolution sees, its own the last",
    unit="tokens",
    needs="model.mixer=gated_delta|kimi_delta|mamba2|short_convolution",
  ),
  **shared(MIXER, needs=f"model.mixer={'|'.join(WITH_STATES)}"),
  "mixer_step_limits": Key(
    (), "the smallest and the largest step of Mamba-2; (): any", needs="model.mixer=mamba2"
  ),
  "mtp_layers": Key(
    0,
    "Layers behind the last that predict further tokens, in training alone, with the weight "
    "training.mtp_weight (multi-token prediction, DeepSeek-V3)",
    unit="layers",
    needs=ROTARY,
    excludes={
      "model.base_width": "muP has no rule for layers that predict further tokens",
      "training.matmul_dtype": "8-bit matmuls are not for layers that predict further tokens",
      "mesh.stage": "the last stage would have more layers than the others",
      "task=dpo": "its loss is of pairs of rows",
    },
  ),
  "mixer_norm": Key(
    "after_gate",
    "of Mamba-2's output: after_gate, before_gate, or none (Falcon-H1)",
    choices=("after_gate", "before_gate", "none"),
    needs="model.mixer=mamba2",
  ),
  "mixer_norm_epsilon": Key(
    0.0,
    "of the norm of Gated DeltaNet's or Kimi Delta Attention's output; 0: norm_epsilon",
    needs=DELTA,
  ),
  "mixer_pre_norms": Key(
    False,
    "layers with a mixer in place of attention have the norms of pre_norms alone, whatever the "
    "others have (Olmo Hybrid)",
    needs="model.post_norms",
  ),
  "mixer_negative_eigenvalues": Key(
    False,
    "keys write with strengths of up to 2, not 1, so that the state's eigenvalues reach from -1 to "
    "1 (arXiv:2411.12537; Olmo Hybrid)",
    needs=DELTA,
  ),
  "norm": Key("rms", "rms or layer", choices=("rms", "layer"), registry="norm"),
  "norm_epsilon": Key(1e-06, "added to the variance", above=0),
  "norm_scale_from_one": Key(False, "the stored scale is added to one (Gemma)"),
  "pre_norms": Key(True, "normalize the inputs of attention and MLP"),
  "post_norms": Key(False, "normalize the outputs: also (Gemma 2), or instead (OLMo 2)"),
  "query_key_norm": Key(False, "RMSNorm of each query and key head", needs=GROUPED_QUERY),
  "query_key_norm_across_heads": Key(
    False, "of all heads of a token at once (OLMo 2)", needs="model.query_key_norm"
  ),
  "query_key_unit_norm": Key(
    False,
    "queries and keys of layers with RoPE have unit root mean square (Llama 4 Scout)",
    needs=GROUPED_QUERY,
  ),
  "clip_qkv": Key(
    0.0,
    "Largest magnitude of queries, keys and values, after their norms (OLMoE); 0: any",
    needs=GROUPED_QUERY,
  ),
  "biases": Key(
    "none",
    'none, qkv, attention, mlp, all (GPT-2; without a gate\'s), or names: "query,value,out". Names'
    " are query, key, value, out, gate, up, down. Of latent attention, attention stands for the "
    "projections to latent vectors and to the rotary key, and out",
    usual=("none", "qkv", "attention", "mlp", "all"),
  ),
  "activation": Key(
    "silu",
    "silu, gelu (tanh approximation), gelu_erf (exact), gelu_sigmoid (x sigmoid(1.702 x)), relu "
    "or relu_squared",
    choices=("silu", "gelu", "gelu_erf", "gelu_sigmoid", "relu", "relu_squared"),
    registry="activation",
  ),
  "mlp": Key(
    "feedforward",
    "feedforward, or a class of your own (docs/extending.md)",
    choices=("feedforward",),
    registry="mlp",
  ),
  "gated": Key(
    True,
    "MLP: down(f(gate(x)) * up(x)); else down(f(up(x)))",
    needs="model.mlp=feedforward",
    excludes=dict.fromkeys(("model.gate_limit", "model.up_offset"), "it is of experts with a gate"),
  ),
  "experts": Key(
    0,
    "Mixture of experts: routed experts of a sparse layer, in place of its MLP; 0: all are dense",
    unit="experts",
    most=MOST_HEADS,
  ),
  "expert_feedforward_size": Key(Unset(int), "of an expert; feedforward_size", unit="dims"),
  **shared(_EXPERTS, needs="model.experts"),
  "attention_scale": Key(
    Unset(float),
    "Factor of the scores; head_size**-0.5, or with base_width base_head_size**0.5 / head_size",
    above=0,
  ),
  "attention_scale_by_inverse_layer": Key(
    False, "Scores of the n-th layer, counted from 1, are divided by n (GPT-2)", needs=GROUPED_QUERY
  ),
  "attention_temperature": Key(
    (),
    "(layers, strength, length): scores of all or the unrotated layers are multiplied by "
    "1 + strength ln(1 + floor(position / length)), positions counted from 0 or, of the unrotated, "
    '1: ("all", 0.1, 16384) (Ministral 3), ("unrotated", 0.1, 8192) (Llama 4); (): 1',
  ),
  "attention_soft_cap": Key(0.0, "soft-capping of the scaled scores; 0: off"),
  "attention_sinks": Key(
    False, "a learned score per head in the softmax, without a value (gpt-oss)", needs=GROUPED_QUERY
  ),
  "attention_gate": Key(
    False,
    "outputs of attention are multiplied by sigmoids of a projection of its input (Qwen3-Next)",
    needs=GROUPED_QUERY,
    excludes={"model.base_width": "muP has no rule for gates of attention"},
  ),
  "logits_soft_cap": Key(0.0, "soft-capping of the logits; 0: off"),
  "scaled_embeddings": Key(False, "multiply embeddings by model_size**0.5 (base_width**0.5)"),
  "embedding_multiplier": Key(1.0, "factor of the embeddings (Granite)", above=0),
  "residual_multiplier": Key(
    1.0, "factor of what attention and MLP add to the residual (Granite)", above=0
  ),
  "normed_residual": Key(
    0.0,
    "attention and MLP add to so many times their normalized input (MiniMax-01); 0: to the "
    "residual",
    needs="model.pre_norms=True",
  ),
  "multipliers": Key(
    (),
    "Factors by name, of the output of a linear layer, or of the input of attention, mixer or mlp "
    '(Falcon-H1): (("mixer", 1.2), ("attention/key", 0.5), ("mlp/down", 0.7))',
    excludes={
      "model.biases": "factors are of kernels",
      "training.matmul_dtype": "kernels are multiplied in 8 bits without factors",
    },
  ),
  "logits_divisor": Key(
    1.0, "divides the logits, before their soft cap (Granite's logits_scaling)", above=0
  ),
  # On resume: a schedule over mesh.context, which may change as well.
  "context_attention": Key(
    "auto",
    "where context > 1: ring; gather, keys and values of whole rows; ulysses, heads in exchange "
    "for the sequence; or auto: by a cost formula",
    choices=("auto", "ring", "gather", "ulysses"),
    resume=MAY_CHANGE,
  ),
  "embedding_standard_deviation": Key(
    Unset(float), "1; tied: model_size**-0.5, or with base_width base_width**-0.5"
  ),
  "dropout_rate": Key(0.0, "of the outputs of attention and MLP", below=1, resume=ACCEPT),
  "tied_embeddings": Key(False, "compute the logits with the embedding table"),
  "separate_documents": Key(
    Unset(bool),
    "Intra-document attention masking; positions restart. By default with data that are read from"
    " files, not with TFDS data sets",
  ),
}

MLP: Rows = {
  "name": Key("mlp", ""),
  "input_size": Key(Unset(int), "values per image", unit="values"),
  "model_size": Key(128, "width of the residual stream", unit="dims"),
  "feedforward_size": Key(Unset(int), "as model_size", unit="dims"),
  "base_width": Key(0, "muP: the width at which learning rates were tuned; 0: off", unit="dims"),
  "output_size": Key(Unset(int), "classes", unit="classes"),
  "bias_standard_deviation": Key(0.0, "of initial biases"),
}

VIT: Rows = {
  "name": Key("vit", ""),
  **_DEPTH,
  "input_size": Key(Unset(int), "values per image", unit="values"),
  "channels": Key(1, "of an image: 3 of a coloured one", unit="channels"),
  "image_size": Key(Unset(int), "pixels of a side; follows from input_size", unit="pixels"),
  "patch_size": Key(2, "pixels of a patch's side", unit="pixels"),
  "layers": Key(2, "transformer blocks", unit="layers", most=MOST_LAYERS),
  "model_size": Key(64, "width of the residual stream", unit="dims"),
  "feedforward_size": Key(256, "hidden width of the MLP", unit="dims"),
  "heads": Key(4, "query heads", unit="heads"),
  "norm_epsilon": Key(1e-06, "added to the variance", above=0),
  "dropout_rate": Key(0.2, "of the outputs of attention and MLP", below=1, resume=ACCEPT),
  "output_size": Key(Unset(int), "classes", unit="classes"),
}
