"""The keys that every recipe has, with their units and defaults; a recipe replaces some."""

from ml_collections import config_dict


def data(**keys) -> dict:
  """Returns the section `data` with some keys replaced."""
  common = {
    "data_dir": "",  # folder of TFDS data sets; "": TFDS_DATA_DIR, or ~/tensorflow_datasets
    "train_split": "train",  # TFDS syntax, such as train[:90%]
    "evaluation_split": "test",  # TFDS syntax
    "shuffle": True,  # in another order each epoch
    "prefetch_batches": 2,  # prepared ahead, in the background
    "max_bad_records": 0,  # unreadable records of a split that get weight 0; more are refused
    "sequence_length": 0,  # tokens per row (text)
    # Fewer rows per step at first, each number from a step on: ((0, 8), (100, 16), (200, 32)), of
    # which the last is global_batch_size
    "batch_size_ramp": (),
    # Shorter rows at first, in tokens: ((0, 64), (100, 128)), of which the last is sequence_length.
    # Rows are cut into equal pieces, so that the tokens of a step stay as many
    "sequence_length_ramp": (),
    "text_feature": "",  # "": the only one of that type
    # Files of data=text, conversations and preferences: paths, folders, globs, gs://, s3:// and
    # hf://OWNER/NAME, separated by commas
    "files": "",
    # A mixture in place of files: each source has name, files and weight (relative, of the tokens);
    # also evaluation_files, text_feature and maximum_epochs (default 1; 0: no limit):
    # ({"name": "web", "files": "web/", "weight": 0.7}, {"name": "code", "files": "src/", ...})
    "sources": (),
    # Other weights from a step on: ((1000, {"web": 0.2, "code": 0.8}),)
    "stages": (),
    "evaluation_files": "",  # of the validation split; "": a share of the documents of files
    # Documents of files that are held out for validation, chosen by their content
    "evaluation_fraction": 0.05,
    # bytes, a tokenizer.json, a folder with one, or a SentencePiece model; "": the one that prepare
    # has trained for these files, else bytes
    "tokenizer": "",
    # Where tokenizer is not set, a run first trains a byte-level BPE of so many tokens on what it
    # trains on (once per data_dir); 0: off
    "train_tokenizer": 0,
    # Which documents share a row: best_fit (the default of files), concatenate (of TFDS data sets)
    # or none
    "packing": config_dict.placeholder(str),
    "prepare_processes": 0,  # that tokenize; 0: one per core
    "chat_template": "",  # a file with one (conversations, preferences); "": the tokenizer's
    # Conversations without a token to train on, or longer than a row: refuse or drop
    "untrained_conversations": "refuse",
    "long_conversations": "refuse",
    "image_feature": "",  # "": the only one of that type
    "label_feature": "",  # "": the only one of that type
    "examples": 0,  # rows (random)
    "input_size": 0,  # values per example (image, random); derived from the model
    "target_size": 0,  # classes (image), values (random); derived from the model
    # Rows to skip, counted from 0 over all epochs, in ranges (first, one after the last):
    # ((544, 608),)
    "skip_rows": (),
    "skip_batches": (),  # the same in batches of global_batch_size rows, from 0: (17, 18)
  }
  return {**common, **keys}


def training(**keys) -> dict:
  """Returns the section `training` with some keys replaced."""
  common = {
    "steps": 0,  # optimizer steps
    "tokens": 0,  # instead of steps: as many as have these tokens; 0: steps
    "gradient_accumulation_steps": 1,  # microbatches per step
    # Pipeline stages (mesh.stage): 1f1b, interleaved (1F1B with pipeline_chunks parts of the layers
    # per stage: a smaller bubble, more transfers) or gpipe (memory grows with the microbatches)
    "pipeline": "1f1b",
    "pipeline_chunks": 2,  # chunks of layers per stage, of interleaved
    # microbatches of a pipeline per accumulation step. By default the most that divide the rows, up
    # to 4 * mesh.stage
    "microbatches": config_dict.placeholder(int),
    # Embeddings and losses: masked (all stages compute them, and discard what they do not need) or
    # conditional (only the first and the last stage compute them)
    "pipeline_ends": "masked",
    # All-gather the parameters of a stage over fsdp once per step, where they and their gradients
    # take at most a quarter of the memory (auto, or step), or for each microbatch (tick)
    "pipeline_gather": "auto",
    # Reduce gradients over data once per step or after each microbatch; auto: once where possible
    "gradient_reduction": "auto",
    # Dtype in which gradients of kernels and embeddings are reduced over devices: compute
    # (compute_dtype) or float32
    "gradient_reduction_dtype": "compute",
    # Names of the parameters that are trained, as patterns (* also matches /); the others stay as
    # they are, without optimizer state: ("layers/attention/*", "final_norm/*"). All, or with
    # lora.rank the adapters, which are trained besides what is given
    "trainable": config_dict.placeholder(tuple),
    # Dtype of parameters between steps: bfloat16, float32 or float64. Updates are computed in
    # float32 or wider
    "parameter_dtype": "float32",
    # Round updated bfloat16 parameters up or down at random, not to the nearest; by default on for
    # them
    "stochastic_rounding": config_dict.placeholder(bool),
    # Dtype of parameters that are not trained: bfloat16, or as parameter_dtype
    "frozen_dtype": config_dict.placeholder(str),
    # Dtype of activations and matmuls. By default bfloat16 on accelerators, else parameter_dtype,
    # but at least float32
    "compute_dtype": config_dict.placeholder(str),
    "matmul_precision": config_dict.placeholder(str),  # default, high or highest
    # Dtype of the matmuls in a decoder's layers: compute (as compute_dtype), int8 (TPU v5e and
    # later) or float8 (H100 and later, TPU7x)
    "matmul_dtype": "compute",
    # Where scales of 8-bit numbers come from: current (the array itself) or delayed (float8; the
    # largest magnitudes of the last 16 steps)
    "matmul_scaling": "current",
    # What a layer saves for its backward pass: none (everything), dots (results of matmuls), full
    # (its input), or by name: "full,query=save,key=save,layer_input=offload" (docs/memory.md)
    "rematerialization": "none",
    # Layers in one iteration of the scan over layers: transfers overlap with more work, and more is
    # in memory
    "scan_unroll": 1,
    # xla (has all scores in memory), blockwise (a scan over blocks of keys, for any platform),
    # splash (JAX's flash attention for TPUs) or cudnn (cuDNN's, for Hopper and later GPUs). By
    # default what docs/defaults.md says.
    "attention_kernel": config_dict.placeholder(str),
    # Experts' matmuls: tiles (a loop over tiles of rows) or ragged (JAX's ragged_dot, on TPUs). By
    # default what docs/defaults.md says.
    "grouped_matmul": config_dict.placeholder(str),
    "balance_loss": 0.0,  # coefficient of the balance loss of experts, taken per row; 0: off
    "router_z_loss": 0.0,  # coefficient of the z-loss of the routers' logits; 0: off
    # How far a step moves the biases of model.router_correction towards balanced experts
    "router_bias_rate": 0.0,
    # Coefficient of the squared logarithm of the softmax's normalizer, added to each token's loss;
    # 0: off
    "z_loss": 0.0,
    # DPO (data=preferences): how strongly the model is kept near the reference
    "dpo_beta": 0.1,
    "dpo_label_smoothing": 0.0,  # the assumed share of pairs that are the wrong way around
    # Chunked cross-entropy: logits of one part of the vocabulary at a time. As many chunks as keep
    # those of a device under 256 MiB
    "loss_chunks": config_dict.placeholder(int),
    # Treat a loss spike as a bad step, like a loss that is not finite: this many standard
    # deviations above the mean of the last bad_step_window losses; 0: off
    "bad_step_deviations": 0.0,
    "bad_step_window": 100,  # steps whose losses a spike is compared with
    "on_bad_step": "stop",  # stop, or roll_back: to the last good checkpoint, skipping the batch
    "bad_step_skips": 1,  # batches that a rollback skips, the last of them the bad step's
    "callbacks": (),  # registered functions that are called every n steps: ("norms",)
    "max_rollbacks": 3,  # rollbacks of a run, over all its starts; the next bad step stops it
    # Compare replicas of parameters and optimizer state, also before every save; 0: off.
    "replica_check_every_steps": 10,
  }
  return {**common, **keys}


def optimizer(**keys) -> dict:
  """Returns the section `optimizer` with some keys replaced."""
  common = {
    # adamw, adafactor, muon, schedule_free_adamw, sgd, soap, or any of optax by its name: lion,
    # contrib.muon
    "name": "adamw",
    "arguments": "",  # further ones of the optimizer: "nesterov=True,mu_dtype=bfloat16"
    # Dtype of moments between steps: float32, bfloat16 or int8 (8 bits, in blocks of 128 elements);
    # by default as training.parameter_dtype. Arrays of fewer than 4096 elements stay float32 or
    # wider
    "state_dtype": config_dict.placeholder(str),
    # Where the optimizer's state is between updates: device, or host, from which it is fetched
    # layer by layer
    "state_memory": "device",
    # Peak learning rate; AdamW's is 8e-3 for lm, 2e-3 for mlp, 3e-4 for presets, and other
    # optimizers follow (docs/optimizers.md); mlp_tutorial: 1e-5
    "learning_rate": 1e-3,
    # cosine, linear, constant, wsd (warm-up, stable, decay) or inverse_sqrt; by default cosine, and
    # constant for schedule_free_adamw and mlp_tutorial
    "schedule": "cosine",
    # Learning rate at the end over the peak; cosine: 0.1, linear and wsd: 0
    "final_fraction": config_dict.placeholder(float),
    "warmup_steps": config_dict.placeholder(int),  # linear warm-up; by default steps / 20
    "warmup_tokens": 0,  # instead of warmup_steps; 0: warmup_steps
    "decay_steps": config_dict.placeholder(int),  # of wsd, at the end; by default steps / 5
    "decay_tokens": 0,  # instead of decay_steps; 0: decay_steps
    "decay": "linear",  # of wsd: linear or 1-sqrt
    "beta_1": 0.9,  # decay of AdamW's first moment
    "beta_2": 0.95,  # decay of AdamW's second moment
    "epsilon": 1e-8,  # AdamW only
    "momentum": 0.0,  # SGD only
    # Applied to kernels and embeddings, not to scales and biases; AdamW's is 0.1, for mlp 0.05, and
    # other optimizers follow
    "weight_decay": 0.1,
    # A step at the peak takes weight_decay off a parameter, not learning_rate * weight_decay
    "independent_weight_decay": False,
    # Parts of the parameters with an optimizer, learning rate or decay of their own, the first that
    # matches: ({"parameters": "embed/*", "learning_rate": 1e-3, "weight_decay": 0.0},)
    "groups": (),
    # Exponential moving averages of the parameters, one for each decay: (0.999, 0.9999)
    "ema_decays": (),
    "clip_norm": 1.0,  # of the global gradient norm; 0: off
    "clip_groups": False,  # each of groups by the norm of its own gradients
    # Instead of clip_norm: clip to this quantile of the last clip_window norms; 0: off
    "clip_quantile": 0.0,
    "clip_window": 50,  # steps
  }
  return {**common, **keys}


def evaluation(**keys) -> dict:
  """Returns the section `evaluation` with some keys replaced."""
  common = {
    "every_steps": 0,  # periodic evaluation, besides the final one; 0: off
    "steps": 0,  # batches of a periodic evaluation; 0: the whole split
    "final_steps": 0,  # batches of the final evaluation and of `evaluate`; 0: the whole split
    # evaluate, sample and export read the average with this decay, of optimizer.ema_decays; 0: the
    # parameters themselves
    "ema_decay": 0.0,
    # Tokens sampled at the end of training, and with metrics.report at each evaluation; 0: off
    "sample_tokens": 0,
  }
  return {**common, **keys}
