"""The config.json of DeepSeek's attention: what it says, what is written, what is refused."""

import pytest

from interop import hf_config

# As published with DeepSeek-V3, of which only the first three layers are dense.
V3 = {
  "model_type": "deepseek_v3",
  "hidden_size": 7168,
  "intermediate_size": 18_432,
  "num_hidden_layers": 3,
  "first_k_dense_replace": 3,
  "num_attention_heads": 128,
  "num_key_value_heads": 128,
  "q_lora_rank": 1536,
  "kv_lora_rank": 512,
  "qk_nope_head_dim": 128,
  "qk_rope_head_dim": 64,
  "v_head_dim": 128,
  "vocab_size": 129_280,
  "rms_norm_eps": 1e-6,
  "rope_theta": 10_000,
  "rope_scaling": {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
  },
  "max_position_embeddings": 163_840,
  "n_routed_experts": 256,
  "scoring_func": "sigmoid",
  "num_nextn_predict_layers": 1,
}
LITE = {"q_lora_rank": None, "model_type": "deepseek_v2", "num_attention_heads": 16}
LITE |= {"num_key_value_heads": 16}


def read(**keys):
  return hf_config.read({**V3, **keys}, "config.json").model


def refusal(**keys):
  with pytest.raises(ValueError, match="cannot be built") as caught:
    read(**keys)
  [_, line] = str(caught.value).splitlines()
  return line


def test_the_sizes_and_the_scale_are_the_published_ones():
  model = read()
  assert (model["attention"], model["rotary_pairs"]) == ("latent", "adjacent")
  assert (model["heads"], model["kv_heads"], model["head_size"]) == (128, 128, 192)
  assert (model["rotary_size"], model["value_head_size"]) == (64, 128)
  assert (model["latent_size"], model["query_latent_size"]) == (512, 1536)
  # 192 ** -0.5 times the square of 0.1 ln 40 + 1 = 1.3688879.
  assert model["attention_scale"] == pytest.approx(0.135234, rel=1e-5)
  assert model["rotary_scaling"][1]["attention_factor"] == 1.0


def test_queries_without_a_latent_vector_and_pairs_that_are_halves():
  assert read(**LITE)["query_latent_size"] == 0
  assert read(**LITE)["rotary_pairs"] == "adjacent"
  assert read(rope_interleave=False)["rotary_pairs"] == "halves"


@pytest.mark.parametrize(("one", "every"), [(1.0, 1.0), (0.707, 0.707), (0.5, 1.5), (0.1, 0.9)])
def test_the_scale_is_written_back_as_mscale(one, every):
  scaling = {**V3["rope_scaling"], "mscale": one, "mscale_all_dim": every}
  given = hf_config.read({**V3, "rope_scaling": scaling}, "config.json")
  back = hf_config.write(given.model, given.positions, "deepseek_v3")
  again = hf_config.canonical(hf_config.read(back, "back").model)
  wanted = hf_config.canonical(given.model)
  assert all(hf_config.same_value(again[key], wanted[key]) for key in wanted)
  assert back["rope_scaling"]["mscale_all_dim"] == pytest.approx(every)
  assert back["rope_parameters"]["mscale"] == pytest.approx(one)
  assert back["first_k_dense_replace"] == 3


def test_what_cannot_be_expressed_is_refused():
  assert "each of the 128 heads has keys and values of its own" in refusal(num_key_value_heads=8)
  assert "q_lora_rank=0: a whole number of at least 1" in refusal(q_lora_rank=0)
  assert "head_dim=128: it would be 64, by qk_rope" in refusal(head_dim=128)
  assert "qk_head_dim=128: it would be 192" in refusal(qk_head_dim=128)
  assert read(head_dim=64, qk_head_dim=192) == read()
  assert "mlp_bias=True: models of this type are read without" in refusal(mlp_bias=True)


def test_norms_of_latent_vectors_keep_their_epsilon_whatever_the_others_have():
  model = read(rms_norm_eps=1e-5, attention_bias=True)
  assert (model["norm_epsilon"], model["latent_norm_epsilon"]) == (1e-5, 1e-6)
  assert model["biases"] == "attention"
  back = hf_config.write(model, 64, "deepseek_v3")
  assert (back["rms_norm_eps"], back["attention_bias"]) == (1e-5, True)
  with pytest.raises(ValueError, match=r"latent_norm_epsilon=1e-05 \(it would be 1e-06\)"):
    hf_config.write({**model, "latent_norm_epsilon": 1e-5}, 64, "deepseek_v3")


def test_other_attention_has_no_place_in_it():
  llama = {"model_type": "llama", "hidden_size": 16, "num_attention_heads": 4}
  given = hf_config.read({**llama, "vocab_size": 37}, "config.json")
  with pytest.raises(ValueError, match=r"model\.attention='grouped_query'"):
    hf_config.write(given.model, given.positions, "deepseek_v3")
