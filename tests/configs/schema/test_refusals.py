"""What is refused before any device is touched: each by a line with the key, numbers and a fix."""

import pytest

from configs.keys import table
from configs.schema import model_checks
from models import spec
from tests.configs.loading import checked, finalized, refusal, settings

PRESET = "model=mistral_7b,data=python_source"
TEXT, CONVERSATIONS = "model=lm,data=text", "model=lm,data=conversations"
PREFERENCES = "model=lm,data=preferences"
FILES = "data.files=rows.jsonl data.tokenizer=bytes"
PROMPTS, REWARDS = "model=lm,data=prompts", f"{FILES} grpo.rewards=number"
LATENT = (
  "model.attention=latent model.kv_heads=8 model.head_size=10 model.rotary_size=4 "
  "model.latent_size=24 model.query_latent_size=16 model.value_head_size=7"
)
YARN = 'model.rotary_scaling=("yarn",{"factor":2.0,"original_length":8'
STAGES = "mesh.stage=4 model.layers=8"
INTERLEAVED = f"{STAGES} training.pipeline=interleaved"
HOST = "optimizer.state_memory=host"
RING = "partitioning.collective_matmul=True partitioning.sequence_parallel=True"
B, T = "data.batch_size_ramp", "data.sequence_length_ramp"

# (recipe, settings, part of the only line that is printed)
CASES = [
  # --- batches and rows
  ("lm", "mesh.data=3 mesh.fsdp=2 data.global_batch_size=20", "x fsdp=2 = 6; make it 18 or 24"),
  ("lm", "mesh.data=8 data.global_batch_size=5", "by the batch axes data=8; make it 8"),
  (
    "lm",
    "mesh.data=8 data.global_batch_size=40 training.gradient_accumulation_steps=4",
    "data.global_batch_size=40 / 4 accumulation steps is not divisible by the batch axes data=8; "
    "make it 32 or 64",
  ),
  (
    "lm",
    "mesh.data=2 data.global_batch_size=28 training.gradient_accumulation_steps=5",
    "data.global_batch_size=28 is not divisible by training.gradient_accumulation_steps=5",
  ),
  ("lm", "data.skip_batches=(3,-1)", "data.skip_batches: -1 is not the number of a batch"),
  ("lm", "data.skip_batches=('3',)", "data.skip_batches: '3' is not the number of a batch"),
  ("lm", "data.skip_rows=((8,8),)", "data.skip_rows: (8, 8) is not a range of rows"),
  ("lm", "data.skip_rows=((-8,8),)", "data.skip_rows: (-8, 8) is not a range of rows"),
  # --- answers to prompts
  ("lm", "grpo.kl=0.1", "grpo.kl=0.1: the task causal_lm does not use it; leave it at 0.0"),
  (PROMPTS, FILES, "grpo.rewards='': name what an answer is worth"),
  (PROMPTS, f"{REWARDS} grpo.answers=5", "not a multiple of grpo.answers=5: a row is an answer"),
  (PROMPTS, f"{REWARDS} grpo.new_tokens=128", "leaves no place for a prompt in a row of data.sequ"),
  (PROMPTS, f"{REWARDS} grpo.updates=4", "checkpoint.every_steps=50 is not a multiple of grpo.up"),
  (PROMPTS, f"{REWARDS} data.skip_rows=((8,20),)", "(8, 20) begins or ends within a group of grpo"),
  (PROMPTS, f"{REWARDS} model.dropout_rate=0.1", "would not give a token the same probability"),
  (PROMPTS, f"{REWARDS} data.packing=best_fit", "a row of data=prompts is one answer; take none"),
  (PROMPTS, f"{REWARDS} {T}=((0,64),(10,128))", "rows of grpo cannot be cut"),
  (PROMPTS, f"{REWARDS} {STAGES}", "data.name='prompts' (grpo) has no pipeline; set mesh.stage=1"),
  (
    PROMPTS,
    f"{REWARDS} optimizer.name=schedule_free_adamw optimizer.schedule=constant",
    "it takes gradients elsewhere than at the parameters, which answers are drawn from",
  ),
  # --- ramps
  ("lm", f"{B}=((0,8.0),(10,32))", "stages (step, value from there on), such as ((0, 8), (100"),
  ("lm", f"{B}=(8,32)", "stages (step, value from there on)"),
  ("lm", f"{B}=((5,8),(10,32))", "the first stage begins at step 0"),
  ("lm", f"{B}=((0,8),(0,32))", "each step is larger than the one before"),
  ("lm", f"{B}=((0,32),(10,8),(20,32))", "each value is larger than the one before"),
  ("lm", f"{B}=((0,0),(10,32))", "each value is at least 1"),
  ("lm", f"{B}=((0,8),(10,16))", "with 16, and data.global_batch_size=32: the last stage has that"),
  ("lm", f"{T}=((0,32),(10,64))", "ends with 64, and data.sequence_length=128"),
  ("lm", f"{T}=((0,48),(10,128))", "48 does not divide data.sequence_length=128 into equal rows"),
  (
    "lm",
    f"mesh.data=4 mesh.fsdp=2 {B}=((0,8),(20,32)) training.gradient_accumulation_steps=2",
    "8 rows from step 0 on are not divisible by the batch axes data=4 x fsdp=2 x expert=1 and 2 "
    "microbatches = 16; make it 16",
  ),
  # --- files and conversations
  (TEXT, f"{FILES} data.chat_template=t.jinja", "it is 'text'; set that, or leave the key at ''"),
  (TEXT, f"{FILES} data.long_conversations=drop", "is about data.name=conversations or pref"),
  ("lm", "data.files=a", "data.files='a' is about data.name=text or conversations or preferences"),
  (TEXT, "data.tokenizer=bytes", "data.files='': data.name='text' is read from files; name them"),
  (TEXT, f"{FILES} data.stages=((3,{{}}),)", "data.stages=((3, {}),) is about data.sources, which"),
  (CONVERSATIONS, f"{FILES} data.packing=concatenate", "conversations are never split; take best_"),
  (CONVERSATIONS, f"{FILES} data.text_feature=chat", "conversations are read from 'messages', 'c"),
  # --- decoders
  (PRESET, "data.sequence_length=1024", "data.sequence_length 4096 or more, or set model.window=0"),
  ("lm", "model.kv_heads=3", "model.heads=8 is not a multiple of model.kv_heads=3; set"),
  ("lm", "model.head_size=7", "model.head_size=7 is odd; rotary positions turn pairs"),
  ("lm", "model.biases=some", "model.biases='some': one of none, qkv, atten"),
  ("lm", "model.biases=query,ou", "separated by commas; did you mean 'out'?"),
  ("lm", "model.biases=gate model.gated=False", "model.gated=False there is no gate"),
  ("lm", "model.rotary_size=18", "model.rotary_size=18 is beyond model.head_size=16"),
  ("lm", "model.rotary_size=3", "model.rotary_size=3 is odd; rotary positions turn pairs"),
  ("lm", "model.rotary_size=8 model.positions=learned", "set that, or leave the key at 0"),
  ("lm", "model.positions=learned model.rotary_pairs=adjacent", "about model.positions=rotary"),
  (
    "lm",
    "model.positions=learned model.rotary_scaling=(8.0,1.0,4.0,8192.0)",
    "model.rotary_scaling=(8.0, 1.0, 4.0, 8192.0) is about model.positions=rotary, and it is",
  ),
  ("lm", "model.pre_norms=False", "layers without any norm do not train"),
  ("lm", "model.query_key_norm_across_heads=True", "is False; set that, or leave the key at False"),
  ("lm", "model.global_every=2", "are about layers that see a window; set model.window"),
  ("lm", "model.rotary_scaling=(8.0,4.0,1.0,64.0)", "above 0 and low at most high"),
  (
    "lm",
    'model.local_rotary_scaling=("linear",{"factor":2.0})',
    "is about model.local_rotary_base, which is 0.0; set that",
  ),
  (
    "lm",
    'model.window=4 model.local_rotary_base=9.0 model.local_rotary_scaling=("pi",{})',
    "model.local_rotary_scaling=('pi', {}): one of linear, dynamic",
  ),
  ("lm", 'model.window=8 model.layer_types=("full","slidin")', "of full, sliding, full_unrota"),
  (
    "lm",
    'model.window=8 model.layer_types=("full","sliding","full","full")',
    "has 4 types for model.layers=3",
  ),
  ("lm", 'model.window=8 model.layer_types=("full",)', "=8: no layer is of the type sliding"),
  ("lm", 'model.layer_types=("sliding",)', "model.window=0: the type sliding needs a window"),
  ("lm", 'model.layer_types=("full_unrotated",)', "model.positions='rotary', all are unrotated"),
  (
    "lm",
    'model.window=8 model.global_every=2 model.layer_types=("sliding",)',
    "both say which layers see a window",
  ),
  ("lm", 'model.rotary_scaling=("yarm",{"factor":2.0})', "llama3, yarn, longrope; did you"),
  ("lm", 'model.rotary_scaling=("linear",2.0)', "numbers by name, such as ('linear', {'f"),
  ("lm", 'model.rotary_scaling=("yarn",{"factor":2.0})', "it lacks 'original_length'"),
  ("lm", 'model.rotary_scaling=("linear",{"factor":0})', "'factor': a number above 0"),
  ("lm", 'model.rotary_scaling=("linear",{"factor":2.0,"faktor":1})', "linear has no 'faktor'; it"),
  ("lm", f'{YARN},"beta_fast":2.0,"truncate":1}})', "'truncate': True or False"),
  ("lm", f'{YARN},"beta_fast":0.5}})', "'beta_slow': at most 'beta_fast'"),
  ("model=gpt2_124m", "data.sequence_length=2048", "is beyond model.max_positions=1024; make data"),
  ("lm", "model.max_positions=64", "model.max_positions=64: model.positions='rotary'"),
  # --- what is cut into equal parts
  ("lm", "mesh.tensor=2 training.loss_chunks=3", "that a device has of each token; make it 2 or 4"),
  ("lm", "model.layers=6 training.scan_unroll=4", "model.layers=6; make it one of 1, 2, 3, 6"),
  (
    "lm",
    "mesh.context=4 mesh.tensor=4 model.context_attention=ulysses",
    "model.context_attention=ulysses: model.heads=8 is not a multiple of mesh.context x "
    "mesh.tensor = 16; set it to ring or gather",
  ),
  (
    "lm",
    "mesh.context=4 data.sequence_length=12 model.context_attention=ring",
    "data.sequence_length=12 is not divisible by 2 x mesh.context = 8: in a ring each device has "
    "an early and a late piece; make it 8 or 16, or set model.context_attention=gather",
  ),
  # --- latent attention
  ("lm", f"{LATENT} model.latent_size=0", "model.latent_size=0: model.attention=latent computes"),
  ("lm", f"{LATENT} model.kv_heads=4", "values of its own; set it to model.heads=8"),
  ("lm", f"{LATENT} model.rotary_size=0", "make it even, above 0 and below 10, such as 2"),
  ("lm", f"{LATENT} model.rotary_size=10", "with model.attention=latent a part of the"),
  ("lm", f"{LATENT} model.query_key_norm=True", "is 'latent'; set that, or leave the key at False"),
  ("lm", f"{LATENT} model.attention_sinks=True", "is about model.attention=grouped_query, and"),
  ("lm", f"{LATENT} model.attention_scale_by_inverse_layer=True", "model.attention=grouped_query"),
  ("lm", 'model.attention_temperature=("some",0.1,8)', "all or unrotated, a number above 0"),
  ("lm", 'model.attention_temperature=("all",0.1,0)', "and a whole number of tokens, such as"),
  ("lm", 'model.attention_temperature=("unrotated",0.1,8)', "no layer is unrotated; add the type"),
  ("lm", "model.window_chunks=True", "is about model.window, which is 0; set that"),
  ("lm", f"{LATENT} model.window=4 model.window_chunks=True", "keys are masked by windows that sl"),
  ("lm", "model.experts=4 model.router_scales_inputs=True", "set model.experts_per_token=2 to 1"),
  ("lm", f"{LATENT} model.clip_qkv=2.0", "model.clip_qkv=2.0 is about model.attention=grouped_q"),
  ("lm", f"{LATENT} model.biases=query,up", "model.biases='query,up': of model.attention=latent"),
  ("lm", f"{LATENT} model.biases=all", "set it to none, mlp, attention or attention,mlp"),
  ("lm", f"{LATENT} model.base_width=20", "='latent': muP has no rule for the sizes of"),
  ("lm", f"{LATENT} lora.rank=2", "model.attention='latent': its projections have no adapters"),
  ("lm", "model.latent_size=8", "model.latent_size=8 is about model.attention=latent, and it is"),
  ("lm", "model.query_latent_size=8", "model.query_latent_size=8 is about"),
  ("lm", "model.latent_norm_epsilon=1e-5", "model.latent_norm_epsilon=1e-05 is about"),
  ("lm", "model.value_head_size=7", "model.value_head_size=7 is about model.attention=latent; set"),
  # --- experts
  ("lm", "model.router_scale=2.0", "model.experts, which is 0; set that, or leave the key at 1.0"),
  ("lm", "training.balance_loss=0.1", "training.balance_loss=0.1 is about model.experts, which"),
  ("lm", "training.grouped_matmul=ragged", "is about model.experts, which is 0; set that, or"),
  ("lm", "model.experts=6 model.experts_per_token=7", "experts_per_token=7: from 1 to model.exp"),
  ("lm", "model.experts=6 model.router_groups=4", "set model.router_groups to one of 1, 2, 3, 6"),
  (
    "lm",
    "model.experts=6 model.router_groups=3 model.router_top_groups=4",
    "model.router_top_groups=4: from 1 to model.router_groups=3",
  ),
  (
    "lm",
    "model.experts=6 model.router_groups=6 model.router_top_groups=2 model.router_group_score=top2",
    "model.router_group_score=top2: groups of model.experts / model.router_groups = 1",
  ),
  (
    "lm",
    "model.experts=6 model.router_groups=3 model.experts_per_token=4",
    "model.experts_per_token=4 is more than the 2 experts of model.router_top_groups=1 groups",
  ),
  ("lm", "model.experts=6 model.dense_layers=3", "model.dense_layers=3: from 0 to 2, one less"),
  ("lm", "model.experts=6 model.sparse_every=4", "model.mlp_only_layers=(): no layer has experts"),
  ("lm", "model.experts=6 model.mlp_only_layers=(0,1,2)", "no layer has experts; set model.exper"),
  ("lm", "model.experts=6 model.mlp_only_layers=(3,)", "=(3,): 3 is no number of a layer, from 0"),
  ("lm", "model.experts=6 training.router_bias_rate=0.1", "is about model.router_correction, whi"),
  ("lm", "model.experts=6 model.gated=False model.gate_limit=7.0", "it is of experts with a gate"),
  ("lm", "model.experts=6 lora.rank=2", "adapters are for dense models; leave lora.r"),
  ("lm", "model.experts=6 training.matmul_dtype=int8", "experts are not multiplied in 8 bits"),
  ("lm", "mesh.expert=4 model.experts=6", "by mesh.expert=4; set mesh.expert to one of 2, 3, 6"),
  ("lm", "mesh.data=2 mesh.expert=4", "set mesh.data=8 and mesh.expert=1, or set model.experts"),
  # --- adapters and muP
  ("lm", "lora.alpha=32.0", "lora.alpha=32.0 is about lora.rank, which is 0; set that, or leave"),
  ("lm", "lora.targets=('query',)", "lora.targets=('query',) is about lora.rank, which is 0; set"),
  ("mlp", "lora.rank=4", "lora.rank=4: the model mlp does not use it; leave it at 0"),
  ("lm", "model.base_head_size=8", "=8 is about muP, which is off; set model.base_width, or leave"),
  ("lm", "model.base_width=64 lora.rank=4", "muP has no rule for adapters, whose rank is no width"),
  (
    "lm",
    "model.base_width=64 checkpoint.initialize_from=hf://some/model",
    "model.base_width=64: the parameters of hf://some/model are a trained model's, and muP would",
  ),
  # --- dtypes
  ("lm", "training.compute_dtype=float31", "bfloat16, float32, float64; did you mean"),
  ("lm", "training.compute_dtype=float16", "set training.compute_dtype=bfloat16, whose"),
  ("lm", "training.compute_dtype=float64", "needs training.parameter_dtype=float64"),
  (
    "lm",
    "training.parameter_dtype=float64 training.gradient_reduction_dtype=float32",
    "float32 is narrower than training.compute_dtype=float64; leave it at compute",
  ),
  (
    "lm",
    "training.parameter_dtype=bfloat16 training.frozen_dtype=float32",
    "frozen_dtype='float32': one of bfloat16",
  ),
  ("lm", "training.frozen_dtype=float16", "training.frozen_dtype='float16': one of bfloat16, f"),
  ("lm", "optimizer.state_dtype=int4", "of bfloat16, float32, int8, float64; did you mean 'int8'?"),
  (
    "lm",
    "training.parameter_dtype=float64 optimizer.state_dtype=int8",
    "optimizer.state_dtype=int8: with training.parameter_dtype=float64 it is one of float64; leave "
    "it out",
  ),
  ("lm", "optimizer.state_dtype=float64", "int8; set training.parameter_dtype=float64 too"),
  ("lm", "training.stochastic_rounding=True", "is 'float32'; set that, or leave the key at False"),
  (
    "lm",
    "optimizer.groups=({'parameters':'embed/*','state_dtype':'int8'},)",
    "state_dtype is the same for all groups; set optimizer.state_dtype",
  ),
  # --- 8-bit and collective matmuls
  (
    "lm",
    "training.matmul_dtype=int8 training.matmul_scaling=delayed",
    "training.matmul_scaling='delayed' is about training.matmul_dtype=float8, and it is 'int8'; "
    "set that, or leave the key at 'current'",
  ),
  ("lm", "training.matmul_scaling=delayed", "training.matmul_dtype=float8, and it is 'compute'"),
  (
    PREFERENCES,
    f"{FILES} training.matmul_dtype=float8 training.matmul_scaling=delayed",
    "its reference model has no earlier steps; leave",
  ),
  ("lm", "partitioning.collective_matmul=True", "so that no sequence is gathered; change that"),
  ("lm", f"{RING} training.matmul_dtype=int8 lora.rank=2", "with lora.rank=2: adapters read"),
  ("lm", f"{RING} lora.rank=4 lora.dropout=0.1", "lora.dropout=0.1: it is drawn for the gathered"),
  # --- preferences
  (PREFERENCES, f"{FILES} data.packing=best_fit", "a row of data=preferences is one pair; take"),
  (PREFERENCES, f"{FILES} training.dpo_label_smoothing=0.5", "at least 0 and below 0.5"),
  (PREFERENCES, f"{FILES} training.z_loss=0.1", "the task dpo does not use it"),
  ("lm", "training.dpo_beta=0.5", "the task causal_lm does not use it"),
  # --- memory
  ("lm", "training.rematerialization=dot", "elementwise, dots, full; did you mean 'dots'?"),
  ("lm", "training.rematerialization=full,quary=save", "query, key, value, attention_output"),
  ("lm", "training.rematerialization=gate=save model.gated=False", "activation of this model"),
  ("lm", f"{HOST} optimizer.name=muon", "layers are updated one by one, and muon may need"),
  (
    "lm",
    f"{HOST} optimizer.groups=({{'parameters':'embed/*','name':'contrib.muon'}},)",
    "optimizer.state_memory=host: layers are updated one by one, and contrib.muon may need whole",
  ),
  (
    "lm",
    f"{HOST} optimizer.clip_quantile=0.5 optimizer.clip_norm=0.0",
    "optimizer.clip_quantile=0.5 needs the norm of all",
  ),
  ("lm", f"{HOST} optimizer.state_dtype=int8", "=int8 rounds whole arrays; set it to float32"),
  # --- pipeline stages
  ("lm", "training.pipeline=gpipe", "mesh.stage, which is 1; set that, or leave the key at '1f1b'"),
  ("lm", "training.microbatches=4", "training.microbatches=4 is about mesh.stage, which is 1"),
  ("lm", f"{STAGES} model.layers=6", "mesh.stage to one of 2, 3, 6, or make model.layers 4 or 8"),
  ("lm", f"{INTERLEAVED} training.pipeline_chunks=3", "mesh.stage=4 x training.pipeline_chunks=3;"),
  ("lm", f"{STAGES} training.pipeline_chunks=4", "is about training.pipeline=interleaved, and it"),
  ("lm", f"{STAGES} training.microbatches=5", "training.microbatches=5: data.global_batch_size="),
  ("lm", f"{INTERLEAVED} training.microbatches=2", "such as 4; 1f1b takes any number"),
  ("lm", f"{STAGES} partitioning.parameters.layers=()", "over stage alone; set it to ('stage',)"),
  ("mlp", "mesh.stage=2", "mesh.stage=2: mlp has no stacked layers to split; set mesh.stage=1"),
  # --- the optimizer, and others
  ("lm", "training.steps=13 optimizer.warmup_steps=14", "warmup_steps=14: at most 13 steps"),
  ("lm", "partitioning.overrides=('layers/mlp/up/kernel',)", "a name with the entries of a Partit"),
  ("lm", "processes.slow_ratio=0.9", "processes.slow_ratio=0.9: above 1, or 0 to turn it off"),
  ("lm", "compiler_options=a=1,b", "compiler_options: 'b' is not name=value"),
  # --- what an optimizer, a model or a task does not read
  ("lm", "optimizer.name=sgd optimizer.weight_decay=0.2", "use it; of those keys it uses momentum"),
  ("lm", "optimizer.name=sgd optimizer.beta_2=0.9", "optimizer.beta_2=0.9: sgd does not use it"),
  ("mlp", "optimizer.momentum=0.9", "beta_2, epsilon, weight_decay, independent_weight_decay"),
  ("lm", "optimizer.name=lion optimizer.beta_1=0.8", "arguments are given by optimizer.arguments"),
  ("mlp", "training.rematerialization=full", "the model mlp does not use it; leave it at 'none'"),
  ("mlp", "partitioning.sequence_parallel=True", "the model mlp does not use it"),
  ("mlp", "partitioning.reshard_after_forward=False", "the model mlp does not use it; leave it at"),
  ("mlp", "training.scan_unroll=2", "the model mlp does not use it; leave it at 1"),
  ("mlp", "training.balance_loss=0.1", "the model mlp does not use it; leave it at 0.0"),
  ("mlp", "training.matmul_dtype=int8", "the model mlp does not use it; leave it at 'compute'"),
  ("mlp", "evaluation.sample_tokens=9", "the task classification does not use it; leave it at 0"),
  ("mlp_tutorial", "data.label_feature=label", "data.label_feature='label': the task"),
  ("lm", "data.image_feature=image", "data.image_feature='image': the task"),
  # --- vision transformers
  ("vit", "model.patch_size=3", "it does not divide model.image_size=8; take one of 1, 2, 4, 8"),
  ("vit", "model.channels=3", "an image of 4 x 4 pixels with model.channels=3 has 48"),
  ("vit", "model.image_size=4", "an image of 4 x 4 pixels with model.channels=1 has 16"),
  ("vit", "model.heads=5", "model.heads=5: model.model_size=64 is no multiple of it"),
  ("vit", "training.loss_chunks=2", "training.loss_chunks=2: classification has no vocabulary"),
  ("vit", "training.rematerialization=full,query=save", "training.rematerialization: "),
]


@pytest.mark.parametrize(("recipe", "keys", "said"), CASES)
def test_one_line_says_what_does_not_go_together(recipe, keys, said):
  [line] = refusal(keys, recipe)
  assert said in line


# --- What of several lines at least one says


@pytest.mark.parametrize(
  ("recipe", "keys", "said"),
  [
    ("mlp", f"{T}=((0,4),)", "does not use it"),
    ("lm", "partitioning.parameters.model=(2,)", "=(2,): names of mesh axes, such as ('fsdp',)"),
    ("lm", "optimizer.schedule=cosin", "one of cosine, linear, constant, wsd, inverse_sqrt; did y"),
    ("lm", "training.matmul_precision=hihg", "one of default, high, highest; did you mean 'hi"),
    ("lm", "training.on_bad_step=rollback", "one of stop, roll_back; did you mean 'roll_back'?"),
    ("lm", "training.parameter_dtype=float16", "one of bfloat16, float32, float64; did you mean"),
    ("lm", "training.gradient_reduction_dtype=float23", "one of compute, float32; did you mean"),
    ("lm", "training.matmul_dtype=fp8", "one of compute, int8, float8"),
    ("lm", "optimizer.state_memory=hots", "one of device, host; did you mean 'host'?"),
    ("lm", f"{STAGES} training.pipeline=1F1B", "1f1b, interleaved, gpipe"),
    ("lm", "model.experts=6 model.router_scores=sigmod", "did you mean 'sigmoid'"),
    ("lm", "model.experts=6 training.grouped_matmul=dense", "one of tiles, ragged"),
    ("lm", "model.norm=laier", "model.norm='laier': one of rms, layer; did you mean"),
    ("lm", "model.activation=relu2", "'relu2': one of silu, gelu, gelu_erf, gelu_sigmoid"),
    (CONVERSATIONS, f"{FILES} data.untrained_conversations=dorp", "one of refuse, drop; did"),
    ("vit", "training.attention_kernel=splash", "training.attention_kernel='splash': one of xla"),
    ("lm", "data.sequence_length=0", "data.sequence_length=0: at least 1"),
    (
      "lm",
      "checkpoint.memory_every_steps=2 checkpoint.local_dir=gs://a/b",
      "checkpoint.local_dir=gs://a/b: it is a folder of each host",
    ),
    ("vit", "model.patch_size=0", "model.patch_size=0: at least 1"),
    ("lm", "model.dropout_rate=1.0", "model.dropout_rate=1.0: at least 0 and below 1"),
    ("lm", "optimizer.epsilon=1e999", "optimizer.epsilon=inf: at least 0"),
    ("lm", "model.rotary_base=1e999", "model.rotary_base=inf: above 0"),
    ("lm", "model.experts=6 model.up_offset=1e999", "model.up_offset=inf: a finite number"),
    ("lm", "lora.rank=4 lora.alpha=0.0", "lora.alpha=0.0: above 0"),
    ("lm", "model.base_width=64 model.base_head_size=0", "model.base_head_size=0: at least 1"),
  ],
)
def test_a_line_says_what_is_refused(recipe, keys, said):
  assert any(said in line for line in refusal(keys, recipe))


def test_numbers_have_a_least():
  rows = {key: row for key, row, _ in table.rows(finalized("lm")) if row.smallest is not None}
  assert len(rows) > 90
  for key, row in rows.items():
    assert list(row.range_errors(row.smallest)) == [], key
    assert "at least" in next(row.range_errors(row.smallest - 1)), key
  sections = ("evaluation.", "checkpoint.", "processes.", "lora.")
  wrong = {key: row.smallest - 1 for key, row in rows.items() if key.startswith(sections)}
  lines = refusal(" ".join(f"{key}={value}" for key, value in wrong.items()), "lm")
  for key in wrong:
    assert any(line.startswith(f"  {key}=") and "at least" in line for line in lines), key


def test_all_that_is_wrong_comes_in_one_message():
  lines = refusal(
    "mesh.data=3 data.global_batch_size=32 training.steps=0 optimizer.schedule=lin "
    "model.kv_heads=5 model.head_size=9",
    "lm",
  )
  assert len(lines) == 5
  for part in ("training.steps=0", "'linear'", "kv_heads=5", "head_size=9", "batch axes data=3"):
    assert part in "\n".join(lines)


# --- What is accepted beside it


@pytest.mark.parametrize(
  ("recipe", "keys"),
  [
    ("lm", "training.steps=1 optimizer.warmup_steps=1"),
    ("lm", f"mesh.data=4 {B}=((0,8),(10,32)) {T}=((0,32),(20,128))"),
    ("lm", f"{T}=((0,2),(10,128)) training.loss_chunks=16"),  # chunks cut no rows
    ("lm", "mesh.context=4 data.sequence_length=16 model.context_attention=ring"),
    ("lm", "mesh.context=4 data.sequence_length=12 model.context_attention=gather"),
    ("lm", "mesh.context=4 data.sequence_length=12 model.context_attention=auto"),
    ("lm", "mesh.context=4 data.sequence_length=12 model.context_attention=ulysses"),
    ("lm", "model.rotary_pairs=adjacent"),
    ("lm", LATENT),
    ("lm", f"{LATENT} model.biases=attention,mlp model.window=5"),
    ("lm", f"{LATENT} training.matmul_dtype=int8"),
    ("mixtral_8x7b", "model.experts=0"),  # what the preset says of experts, nobody has set
  ],
)
def test_what_goes_together_is_accepted(recipe, keys):
  checked(keys, recipe)


def test_the_names_of_biases_are_those_of_the_dims_table():
  assert (*spec.BIASES,) == model_checks.BIASES
  assert model_checks.LINEARS == spec.LINEARS


def test_settings_are_read_as_flags_are():
  assert settings("a.b=3 c=(1,'x') d=text e=a=b") == {
    "a.b": 3,
    "c": (1, "x"),
    "d": "text",
    "e": "a=b",
  }
