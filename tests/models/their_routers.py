"""Routers of Hugging Face's `transformers`, in float64: run by the Python that has it installed.

  PYTHON tests/models/their_routers.py FOLDER

FOLDER has routers.json (name -> the numbers of models.experts.Router) and given.npz (NAME/logits,
NAME/bias); written.npz gets NAME/gates and NAME/experts. Nothing of this project is imported.
"""

import json
import pathlib
import sys

import numpy as np
import torch

# The library computes scores in float32 whatever the parameters are.
torch.float32 = torch.float = torch.float64
torch.Tensor.float = torch.Tensor.double
torch.set_default_dtype(torch.float64)

from transformers import AutoConfig  # noqa: E402
from transformers.models.deepseek_v2 import modeling_deepseek_v2  # noqa: E402
from transformers.models.deepseek_v3 import modeling_deepseek_v3  # noqa: E402
from transformers.models.gpt_oss import modeling_gpt_oss  # noqa: E402
from transformers.models.mixtral import modeling_mixtral  # noqa: E402
from transformers.models.olmoe import modeling_olmoe  # noqa: E402
from transformers.models.qwen3_moe import modeling_qwen3_moe  # noqa: E402

CLASSES = {
  "mixtral": modeling_mixtral.MixtralTopKRouter,
  "qwen3_moe": modeling_qwen3_moe.Qwen3MoeTopKRouter,
  "olmoe": modeling_olmoe.OlmoeTopKRouter,
  "deepseek_v2": modeling_deepseek_v2.DeepseekV2TopkRouter,
  "deepseek_v3": modeling_deepseek_v3.DeepseekV3TopkRouter,
  "gpt_oss": modeling_gpt_oss.GptOssTopKRouter,
}


def routed(name: str, numbers: dict, logits: np.ndarray, bias: np.ndarray | None):
  """Returns the (gates, experts) of a router that is given its logits."""
  kind = next(kind for kind in sorted(CLASSES, key=len, reverse=True) if name.startswith(kind))
  config = AutoConfig.for_model(
    kind,
    num_experts_per_tok=numbers["top_k"],
    num_local_experts=numbers["experts"],
    hidden_size=numbers["experts"],
    num_attention_heads=1,
  )
  config.num_experts = numbers["experts"]
  config.norm_topk_prob = numbers["normalize"]
  config.routed_scaling_factor = numbers["scale"]
  config.n_group, config.topk_group = numbers["groups"], numbers["top_groups"]
  config.topk_method = "greedy" if numbers["groups"] == 1 else "group_limited_greedy"
  router = CLASSES[kind](config)
  router.weight.data = torch.eye(numbers["experts"])  # the logits are its inputs
  if kind == "gpt_oss":
    router.bias.data.zero_()
  if bias is not None:
    router.e_score_correction_bias = torch.from_numpy(bias)
  with torch.no_grad():
    _, gates, experts = router(torch.from_numpy(logits))
  assert gates.dtype == torch.float64, gates.dtype
  return gates.numpy(), experts.numpy()


def main(folder: pathlib.Path) -> None:
  """Writes what all routers give."""
  found = {}
  with np.load(folder / "given.npz") as given:
    for name, numbers in json.loads((folder / "routers.json").read_text()).items():
      bias = given.get(f"{name}/bias")
      gates, experts = routed(name, numbers, given[f"{name}/logits"], bias)
      found[f"{name}/gates"], found[f"{name}/experts"] = gates, experts
  np.savez(folder / "written.npz", **found)


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]))
