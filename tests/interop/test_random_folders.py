"""Folders of random models that transformers 4.57 and 5 write here and now: logits and defaults."""

import json
import pathlib
import subprocess

import jax
import numpy as np
import pytest
from flax import nnx

from interop import hf_config, hf_folder, read_weights
from interop.hf_config import FAMILIES
from models import model_spec
from tests.helpers.jobs import make_job
from tests.interop import folders as fixtures
from tests.models.write_families import PYTHONS

pytestmark = pytest.mark.transformers
# Which version 4.57 does not know.
NOT_IN_4 = (
  *("ministral3", "mistral4", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe"),
  *("nemotron_h", "kimi_linear", "minimax", "olmo_hybrid"),
)
SCRIPT = pathlib.Path(__file__).parent / "random_folders.py"
# Fixtures whose keys the script draws.
DRAWN = (
  *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gpt2", "phi3", "lfm2"),
  *("qwen3_moe", "olmoe", "deepseek_v3", "glm4_moe", "llama4", "ministral3", "mistral4", "bamba"),
  *("granitemoehybrid", "granitemoehybrid_experts", "falcon_h1"),
  *("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid"),
)


@pytest.fixture(scope="module", params=PYTHONS)
def root(request, tmp_path_factory):
  folder = tmp_path_factory.mktemp(f"transformers{request.param}")
  unknown = NOT_IN_4 if request.param == "4" else ()
  known = (",".join(one for one in names if one not in unknown) for names in (DRAWN, FAMILIES))
  subprocess.run([PYTHONS[request.param], str(SCRIPT), str(folder), *known], check=True)
  return folder


def test_their_logits_are_ours(root):
  tokens = fixtures.tokens()
  folders = sorted(path for path in root.iterdir() if path.is_dir())
  assert len(folders) >= 2 * len({*DRAWN} - {*NOT_IN_4})
  for folder in folders:
    described = hf_folder.read_config(folder, "model.folder")
    keys = {f"model.{key}": value for key, value in described.model.items() if value is not None}
    keys |= {"data.sequence_length": fixtures.LENGTH, "model.vocabulary_multiple": 8}
    with jax.enable_x64(True):
      job = make_job("single", "lm", **keys, **{"training.parameter_dtype": "float64"})
      source = read_weights.open_folder(str(folder), model_spec(job.config), "model.folder")
      params = read_weights.read(source, job.placed_state.params)
      with job.tracing():
        ours = np.asarray(nnx.merge(job.program.graphdef, params)(tokens))
    theirs = np.load(folder / "logits.npy")
    assert np.abs(ours[..., : theirs.shape[-1]] - theirs).max() < 1e-10, folder


# What their code reads for training, generation, other tasks than language modelling, and speed.
HARMLESS = {
  *("initializer_range", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id"),
  *("attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout"),
  *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "z_loss_coefficient"),
  *("num_labels", "problem_type", "return_dict", "chunk_size_feed_forward", "pretraining_tp"),
  *("output_attentions", "output_hidden_states", "is_decoder"),
  *("_attn_implementation", "attn_implementation"),
  *("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type"),
  *("summary_use_proj", "reorder_and_upcast_attn", "mamba_chunk_size", "num_logits_to_keep"),
  *("dtype", "aux_loss_alpha", "seq_aux", "chunk_size", "block_size", "use_mamba_kernels"),
  # How parameters are drawn.
  *("time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual"),
  *("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max"),
  "linear_dt_init_floor",
}


# And of parts that the models that are read do not have: experts, and dense layers.
OF_OTHERS = {
  "granitemoehybrid": {"intermediate_size", "num_experts_per_tok"},
  "qwen3_5_moe_text": {"intermediate_size"},
}


def test_their_code_reads_no_key_that_is_said_to_have_no_effect(root):
  for model_type, read in json.loads((root / "read.json").read_text()).items():
    ignored = {*hf_config.IGNORED, *FAMILIES[model_type].ignored} - HARMLESS
    ignored -= OF_OTHERS.get(model_type, set())
    assert len(read) > 9, model_type
    assert not ignored & {*read}, model_type


def test_what_a_config_leaves_out_is_what_their_class_has(root):
  known = json.loads((root / "defaults.json").read_text())
  assert {*FAMILIES} - {*known} <= {*NOT_IN_4}
  for model_type, theirs in known.items():
    left_out = {"model_type": model_type}
    if model_type == "olmo3":  # 10,000 in version 4.57, 500,000 in 5; published models name it
      left_out["rope_theta"] = 500_000.0
      theirs = {**theirs, **({"rope_theta": 500_000.0} if "rope_theta" in theirs else {})}
    if model_type == "falcon_h1":  # 100,000 in version 4.57, 10,000 in 5; published models name it
      theirs = {**theirs, "rope_theta": 100_000.0, "rope_parameters": None}
    if model_type == "deepseek_v2":  # the first has no default, the second is not the same in both
      needed = {"num_experts_per_tok": 6, "vocab_size": 102_400}
      left_out, theirs = left_out | needed, theirs | needed
    if model_type == "nemotron_h":  # whose class has layers of experts beside such of MLPs
      left_out["hybrid_override_pattern"] = "M*-"
      theirs = {**theirs, "layers_block_type": ["linear_attention", "full_attention", "mlp"]}
    if model_type == "glm4_moe":  # whose width is no multiple of the heads
      left_out["head_dim"] = theirs["head_dim"] = 128
    assert hf_config.read(left_out, model_type) == hf_config.read(theirs, model_type)
