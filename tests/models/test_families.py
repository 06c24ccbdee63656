"""The decoder as each open family has it: logits, sizes, and that every key of theirs acts."""

import functools
import importlib.util
import math

import jax
import numpy as np
import pytest
from flax import nnx

from configs import dp8
from configs.schema import finalize, presets
from models import transformer
from models.layer_pattern import is_global
from models.transformer import train_flops_per_example
from partitioning.rules import named_leaves
from tests.models import families
from tests.models.families import FAMILIES, LENGTH, ROWS, drawn, tokens, tree_of
from training.step import make_program

FIXTURE = families.__file__.replace("families.py", "fixtures/families.npz")

# As published: the families' model cards and the safetensors indexes beside their weights.
PUBLISHED = {
  "gpt2_124m": 124_439_808,
  "llama2_7b": 6_738_415_616,
  "llama2_70b": 68_976_648_192,
  "llama3_8b": 8_030_261_248,
  "llama3_70b": 70_553_706_496,
  "llama3_405b": 405_853_388_800,
  "mistral_7b": 7_241_732_096,
  "qwen3_0_6b": 596_049_920,
  "qwen3_8b": 8_190_735_360,
  "gemma2_9b": 9_241_705_984,
  "gemma3_1b": 999_885_952,
}


job_of = functools.cache(families.job_of)  # prepared once for all tests


@functools.cache
def arrays_of(family):
  """Returns the parameters of a family, by name."""
  return drawn(job_of(family))


def logits(job, arrays):
  """Returns the logits of a job with these parameters."""
  params = tree_of(job, arrays)

  def forward(params, tokens_BT):
    return nnx.merge(job.program.graphdef, params)(tokens_BT)

  compiled = job.compile(
    forward, params, tokens(), in_shardings=(job.state_shardings.params, None)
  ).function
  return np.asarray(compiled(params, tokens()))


def close(ours, wanted):
  """Tells whether logits agree to 1e-4 of their size."""
  return np.abs(ours - wanted).max() <= 1e-4 * np.abs(wanted).max()


@pytest.mark.parametrize("family", FAMILIES)
def test_gives_the_logits_of_an_independent_implementation(family):
  job = job_of(family)
  arrays = drawn(job)
  with np.load(FIXTURE) as fixture:
    wanted = fixture[family]
  ours = logits(job, arrays)
  assert ours.shape == wanted.shape == (ROWS, LENGTH, 61)
  assert close(ours, wanted), np.abs(ours - wanted).max()
  if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
    from tests.models import write_families

    assert close(write_families.logits(family), wanted)


ACTS = [
  (family, key)
  for family, key in [
    ("gpt2", "biases"),
    ("gpt2", "norm"),
    ("gpt2", "activation"),
    ("llama3", "rotary_scaling"),
    ("llama3", "rotary_base"),
    ("mistral", "window"),
    ("gemma2", "attention_soft_cap"),
    ("gemma2", "logits_soft_cap"),
    ("gemma2", "attention_scale"),
    ("gemma2", "global_every"),
    ("gemma2", "scaled_embeddings"),
    ("gemma2", "norm_scale_from_one"),
    ("gemma2", "activation"),
    ("gemma3", "local_rotary_base"),
    ("gemma3", "query_key_norm"),
  ]
]
OTHERWISE = {
  "biases": "none",
  "norm": "rms",
  "activation": "silu",
  "rotary_scaling": (),
  "rotary_base": 9.0,
  "window": 6,
  "attention_soft_cap": 0.0,
  "logits_soft_cap": 0.0,
  "attention_scale": 0.5,
  "global_every": 1,
  "scaled_embeddings": False,
  "norm_scale_from_one": False,
  "local_rotary_base": 0.0,
  "query_key_norm": False,
}


@pytest.mark.parametrize(("family", "key"), ACTS)
def test_every_key_of_a_family_shows_in_its_logits(family, key):
  arrays = arrays_of(family)
  other = job_of(family, **{f"model.{key}": OTHERWISE[key]})
  kept = {name: arrays[name] for name in named_leaves(other.state.params)}
  with np.load(FIXTURE) as fixture:
    assert not close(logits(other, kept), fixture[family])


@pytest.mark.parametrize("preset", presets.PRESETS)
def test_a_preset_has_as_many_parameters_as_published(preset):
  config = dp8.get_config(f"model={preset},data=python_source")
  config.model.vocabulary_multiple = 1  # what is padded is not published
  program = make_program(finalize.finalize(config, "tpu"))
  state = program.abstract_state()
  assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state.params)) == PUBLISHED[preset]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("preset", presets.PRESETS)
def test_model_flops_are_six_for_each_weight_and_token_and_attentions_pairs(preset, causal):
  config = finalize.finalize(dp8.get_config(f"model={preset},data=python_source"), "tpu")
  model, length = config.model, config.data.sequence_length
  leaves = named_leaves(make_program(config).params)
  multiplied = ("kernel", "embed/table") if model.tied_embeddings else ("kernel",)
  weights = sum(math.prod(x.shape) for name, x in leaves.items() if name.endswith(multiplied))
  pairs = 0  # of a query and a key that it sees, or is computed with
  for layer in range(model.layers):
    window = length if is_global(config, layer) else min(length, model.window)
    triangle = window * (window + 1) // 2
    pairs += triangle + (length - window) * window if causal else length * window
  # Two products of each pair, of 2 H operations per head, forward and twice as many backward.
  wanted = 6 * weights * length + 3 * 2 * 2 * model.head_size * model.heads * pairs
  assert train_flops_per_example(config, causal=causal) == pytest.approx(wanted, rel=2e-4)


def test_every_preset_is_published():
  assert PUBLISHED.keys() == presets.PRESETS.keys()


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3", "gpt2", "qwen2"])
def test_reading_in_pieces_gives_the_logits_of_reading_at_once(family):
  job = job_of(family)
  params = tree_of(job, drawn(job))
  pieces = (9, 1, 1, 8)

  def both(params, tokens_BT):
    model = nnx.merge(job.program.graphdef, params)
    cache, found, start = transformer.empty_cache(job.config, ROWS, LENGTH), [], 0
    for width in pieces:
      counts_B = jax.numpy.full(ROWS, width, "int32")
      logits_BV, cache = model.extend(tokens_BT[:, start : start + width], counts_B, cache)
      found.append(logits_BV)
      start += width
    return model(tokens_BT), found

  whole_BTV, found = job.compile(both, params, tokens()).function(params, tokens())
  ends = np.cumsum(pieces) - 1
  for end, logits_BV in zip(ends, found, strict=True):
    assert close(np.asarray(logits_BV), np.asarray(whole_BTV[:, end]))
