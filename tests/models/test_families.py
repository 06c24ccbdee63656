"""The decoder as each open family has it: logits, sizes, and that every key of theirs acts."""

import functools
import math

import jax
import numpy as np
import pytest
from flax import nnx

from configs import dp8
from configs.schema import finalize, recipes
from models import attention, model_spec, transformer
from models.positions import is_global
from models.transformer import active_elements
from partitioning.parallel import ring_attention
from partitioning.rules import named_leaves
from tests.models import families, write_families
from tests.models.families import FAMILIES, KEPT, LENGTH, ROWS, drawn, tokens, tree_of
from training.specs import resolve
from training.step import make_program

FIXTURE = families.__file__.replace("families.py", "fixtures/families.npz")

# As published: the families' model cards and the safetensors indexes beside their weights.
PUBLISHED = {
  "gpt2_124m": 124_439_808,
  "gpt3_175b": 174_604_259_328,  # 174.6 billion: arXiv:2005.14165, table D.1
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
  "llama3_2_1b": 1_235_814_400,
  "llama3_2_3b": 3_212_749_824,
  "llama3_3_70b": 70_553_706_496,
  "mistral_nemo_12b": 12_247_782_400,
  "qwen2_5_0_5b": 494_032_768,
  "qwen2_5_1_5b": 1_543_714_304,
  "qwen2_5_3b": 3_085_938_688,
  "qwen2_5_7b": 7_615_616_512,
  "qwen2_5_14b": 14_770_033_664,
  "qwen2_5_32b": 32_763_876_352,
  "qwen2_5_72b": 72_706_203_648,
  "qwen3_1_7b": 1_720_574_976,  # 2,031,739,904 with the embedding stored twice
  "qwen3_4b": 4_022_468_096,
  "qwen3_14b": 14_768_307_200,
  "qwen3_32b": 32_762_123_264,
  # Of the whole model, without the vision tower of 416,866,032 and the projector to the text's
  # width: 1152 of each, and a norm's 1152.
  "gemma3_4b": 4_300_079_472 - 416_866_032 - 1152 * (2560 + 1),
  "gemma3_12b": 12_187_325_040 - 416_866_032 - 1152 * (3840 + 1),
  "gemma3_27b": 27_432_406_640 - 416_866_032 - 1152 * (5376 + 1),
  "phi4_mini": 3_836_021_760,
  "olmo2_1b": 1_484_916_736,
  "lfm2_350m": 354_483_968,
  "lfm2_700m": 742_489_344,
  "lfm2_1_2b": 1_170_340_608,
  # Of 32 layers 29 with Mamba-2 and 3 with attention; 9.78 billion, as published.
  "bamba_9b": 29 * 102_286_976 + 3 * 41_943_040 + 32 * 176_168_960 + 2 * 525_336_576 + 4096,
  # As transformers counts them at the published sizes.
  "nemotron_h_8b": 8_100_852_736,
  "nemotron3_nano_30b_a3b": 31_577_937_344 + 23 * 128,  # with the biases of 23 routers
  "kimi_linear_48b_a3b": 49_122_675_072 + 26 * 256,  # with the biases of 26 routers
  "minimax_text_01": 456_089_655_296,
  "olmo_hybrid_7b": 7_430_870_688,
  "granite4_h_tiny": 6_939_037_248,
  "granite4_h_small": 32_207_337_984,
  "granite4_h_micro": 36 * 25_847_232 + 4 * 10_485_760 + 40 * 50_335_744 + 205_520_896 + 2048,
  "olmo2_7b": 7_298_617_344,
  "olmo2_13b": 13_716_198_400,
  "olmo2_32b": 32_234_279_936,
  "smollm2_135m": 134_515_008,
  "smollm2_360m": 361_821_120,
  "smollm2_1_7b": 1_711_376_384,
  "smollm3_3b": 3_075_098_624,
  "mixtral_8x7b": 46_702_792_704,
  "mixtral_8x22b": 140_620_634_112,
  "qwen3_30b_a3b": 30_532_122_624,
  "qwen3_235b_a22b": 235_093_634_560,
  "olmoe_1b_7b": 6_919_161_856,
  # Without the layer that predicts a second token; as transformers counts them.
  "qwen3_next_80b_a3b": 79_674_391_296,
  "qwen3_5_9b": 8_953_803_264,
  "qwen3_5_35b_a3b": 34_660_610_688,
  "deepseek_v2_lite": 15_706_484_224,
  "deepseek_v3": 671_026_419_200,
  "ministral3_3b": 3_429_006_336,
  "ministral3_8b": 8_489_553_920,
  "ministral3_14b": 13_506_073_600,
  "mistral_small_4": 118_972_826_624,
  # Of the whole model, without what it sees with.
  "llama4_scout": 108_641_793_536 - 871_932_416,
  "llama4_maverick": 401_583_781_376 - 871_932_416,
  # Of all the tensors, without the layer that predicts further tokens: a layer with experts, two
  # tables of tokens, a projection from twice the width, and three norms.
  "glm4_5_air": 110_468_824_832 - 3_616_573_568,
  "glm4_5": 358_337_791_296 - 5_539_962_272,
  "gpt_oss_20b": 20_914_757_184,
  "gpt_oss_120b": 116_829_156_672,
}


job_of = functools.cache(families.job_of)  # prepared once for all tests


@functools.cache
def arrays_of(family):
  """Returns the parameters of a family, by name."""
  return drawn(job_of(family))


FLOAT64 = {"training.parameter_dtype": "float64", "training.compute_dtype": "float64"}
# Of the largest logit.
BOUNDS = {"float64": 1e-10, "float32": 3e-5}
# Mesh -> strategy, and what else it sets. Rows and vocabulary are what eight devices divide.
MESHES = {
  "dp8": ("dp8", {}),
  "fsdp8": ("fsdp8", {}),
  "dp4_tp2": ("dp4_tp2", {}),
  "context2": ("single", {"mesh.context": 2, "model.context_attention": "ring"}),
  "context2_gathered": ("single", {"mesh.context": 2, "model.context_attention": "gather"}),
}
ON_MESH = {"data.global_batch_size": 8, "model.vocabulary_multiple": 8}
# Family -> how it is computed, each once: on one device where nothing is said; in blocks, those
# whose options are attention's; or on a mesh.
BLOCKS = "blocks"
WAYS = {
  **dict.fromkeys(("gemma2", "gemma3", "mistral", "qwen2_windows"), BLOCKS),
  **{"phi3": "dp8", "granite": "fsdp8", "olmo3": "dp4_tp2", "smollm3_windows": "context2"},
}


def logits(job, arrays):
  """Returns the logits of a job with these parameters, in the order of the text."""
  params, given = tree_of(job, padded(job, arrays)), rows_of(job)

  def forward(params, tokens_BT):
    return nnx.merge(job.program.graphdef, params)(tokens_BT)

  compiled = job.compile(
    forward, params, given, in_shardings=(job.state_shardings.params, None)
  ).function
  found = np.asarray(compiled(params, given))
  if job.devices.sizes["context"] > 1 and job.config.model.context_attention == "ring":
    order = ring_attention.zigzag_order(LENGTH, job.devices.sizes["context"])
    found = found[:, np.argsort(order)]
  return found[:ROWS, :, :61]


def rows_of(job):
  """Returns the tokens, repeated for a job with more rows."""
  return np.tile(tokens(), (job.config.data.global_batch_size // ROWS, 1))


def padded(job, arrays):
  """Returns the parameters with zeros for the tokens that a job's vocabulary is padded with."""
  shapes = {name: leaf.shape for name, leaf in named_leaves(job.state.params).items()}
  return {
    name: np.pad(x, [(0, to - size) for size, to in zip(x.shape, shapes[name], strict=True)])
    for name, x in arrays.items()
  }


def close(ours, wanted, dtype="float32"):
  """Tells whether logits agree, up to a part of their size, with those that the fixture has."""
  if ours.ndim == 3 and ours.shape[1] != wanted.shape[1]:
    ours = ours[:, KEPT]
  return np.abs(ours - wanted).max() <= BOUNDS[dtype] * np.abs(wanted).max()


# Whose options others have too: compared by `make test-transformers`, on every mesh.
AGAIN = (
  *("qwen3_yarn", "qwen3_biases", "olmo2", "olmo2_biases", "smollm3", "llama_shortrope", "llama2"),
  *("deepseek2", "deepseek3_halves", "llama_linear", "gpt2_positions", "qwen2"),
)


@pytest.mark.parametrize(
  "family",
  [pytest.param(x, marks=pytest.mark.transformers) if x in AGAIN else x for x in FAMILIES],
)
def test_gives_the_logits_of_an_independent_implementation(family, monkeypatch):
  way, wanted = WAYS.get(family), fixture(family)
  monkeypatch.setitem(attention.TILES, "cpu", attention.Tiles((4, 7), 128, ""))
  blocks = {"training.attention_kernel": "blockwise"} if way == BLOCKS else {}
  with jax.enable_x64(True):
    if way in MESHES:
      ours = on_mesh(family, way, **FLOAT64)
    else:
      ours = logits(job_of(family, **FLOAT64, **blocks), arrays_of(family))
  assert ours.shape == (ROWS, LENGTH, 61)
  assert wanted.shape == (ROWS, len(KEPT), 61)
  assert close(ours, wanted, "float64"), np.abs(ours[:, KEPT] - wanted).max()


def on_mesh(family, mesh, **overrides):
  """Returns the logits of a family on a mesh."""
  strategy, keys = MESHES[mesh]
  job = families.job_of(family, strategy, **ON_MESH, **keys, **overrides)
  return logits(job, arrays_of(family))


@functools.cache
def fixture(family):
  """Returns the logits of the transformers library, float64, at the positions KEPT."""
  with np.load(FIXTURE) as found:
    return found[family]


# But a longer table of positions, of which the rows use the first ones.
OPTIONS = [name for name in FAMILIES if "_" in name and name != "gpt2_positions"]


@pytest.mark.parametrize("family", OPTIONS)
def test_an_option_shows_in_the_logits_of_its_family(family):
  others = [name for name in FAMILIES if name != family]
  assert not any(close(fixture(name), fixture(family)) for name in others)


@pytest.mark.transformers
@pytest.mark.parametrize("version", write_families.PYTHONS)
def test_the_fixture_is_what_the_library_computes(version):
  found = write_families.logits(write_families.known_to(version), version)
  for family, theirs in found.items():
    assert close(theirs, fixture(family), "float64"), family


@pytest.mark.transformers
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_gives_those_logits_on_every_mesh(family, mesh):
  wanted = fixture(family)
  assert close(on_mesh(family, mesh), wanted)
  with jax.enable_x64(True):
    assert close(on_mesh(family, mesh, **FLOAT64), wanted, "float64")


def described(preset):
  """Returns the finalized config of a preset, its spec, and name -> elements of its parameters."""
  config = dp8.get_config(f"model={preset},data=python_source")
  config.model.vocabulary_multiple = 1  # what is padded is not published
  config = finalize.finalize(config, "tpu")
  spec = model_spec(config)
  return config, spec, dict(transformer._names(spec.unquantized))


@pytest.mark.parametrize("preset", recipes.PRESETS)
def test_a_preset_has_as_many_parameters_as_published(preset):
  *_, elements = described(preset)
  assert sum(elements.values()) == PUBLISHED[preset]


# With learned positions; local layers; latent attention and experts; each kind of mixer.
@pytest.mark.parametrize(
  "preset",
  [
    *("gpt2_124m", "gemma3_1b", "deepseek_v2_lite", "qwen3_next_80b_a3b", "kimi_linear_48b_a3b"),
    *("granite4_h_tiny", "minimax_text_01", "lfm2_350m", "gpt_oss_20b", "llama4_scout"),
  ],
)
def test_a_model_has_the_parameters_that_its_spec_names(preset):
  config, _, elements = described(preset)
  leaves = named_leaves(make_program(resolve(config)).params)
  assert {name: math.prod(leaf.shape) for name, leaf in leaves.items()} == elements


# The formula is that of the others: of attention to all, in windows, and with tied embeddings.
COUNTED = ("llama3_8b", "mistral_7b", "gemma2_9b", "gemma3_1b", "qwen3_0_6b")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("preset", COUNTED)
def test_model_flops_are_six_for_each_weight_and_token_and_attentions_pairs(preset, causal):
  config, spec, elements = described(preset)
  model, length = config.model, config.data.sequence_length
  multiplied = ("kernel", "embed/table") if model.tied_embeddings else ("kernel",)
  weights = sum(count for name, count in elements.items() if name.endswith(multiplied))
  pairs = 0  # of a query and a key that it sees, or is computed with
  for layer in range(model.layers):
    window = length if is_global(spec, layer) else min(length, model.window)
    triangle = window * (window + 1) // 2
    pairs += triangle + (length - window) * window if causal else length * window
  # Two products of each pair, of 2 H operations per head, forward and twice as many backward.
  wanted = 6 * weights * length + 3 * 2 * 2 * model.head_size * model.heads * pairs
  assert spec.train_flops_per_example(causal=causal) == pytest.approx(wanted, rel=2e-4)


def test_every_preset_is_published():
  assert PUBLISHED.keys() == recipes.PRESETS.keys()


# Parameters that a token uses, in billions: as published, by the families' pages and reports.
ACTIVE = {
  "mixtral_8x7b": 12.9,
  "mixtral_8x22b": 39.2,
  "qwen3_30b_a3b": 3.35,
  "qwen3_235b_a22b": 22.2,
  "olmoe_1b_7b": 1.28,
  "deepseek_v3": 37.6,
}


def test_a_token_of_qwen3_next_uses_10_of_512_experts_in_layers_of_either_kind():
  config, _, elements = described("qwen3_next_80b_a3b")
  routed = 48 * 512 * 3 * 2048 * 512
  wanted = PUBLISHED["qwen3_next_80b_a3b"] - routed + routed * 10 // 512
  assert active_elements(config.model, elements) == wanted == 3_874_929_408


@pytest.mark.parametrize("preset", ACTIVE)
def test_a_token_uses_as_many_parameters_as_published(preset):
  config, spec, elements = described(preset)
  assert active_elements(config.model, elements) / 1e9 == pytest.approx(ACTIVE[preset], abs=0.05)
  # Six per weight that multiplies, and attention's pairs.
  kernels = {name: count for name, count in elements.items() if name.endswith("kernel")}
  model, length = config.model, config.data.sequence_length
  pairs = 6 * model.layers * model.heads * (model.head_size + model.value_head_size) * length
  wanted = length * (6 * active_elements(config.model, kernels) + pairs)
  assert spec.train_flops_per_example() == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(
  "family",
  [
    *("gemma3", "gpt2"),
    *(pytest.param(x, marks=pytest.mark.long) for x in ("smollm3_windows", "llama_dynamic")),
  ],
)
def test_reading_in_pieces_gives_the_logits_of_reading_at_once(family):
  job = job_of(family)
  params = tree_of(job, drawn(job))
  pieces = (9, 1, 1, 8)

  def both(params, tokens_BT):
    model = nnx.merge(job.program.graphdef, params)
    cache, found, start = transformer.empty_cache(model_spec(job.config), ROWS, LENGTH), [], 0
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
