"""The shipped configs, what is derived from their keys, and what is refused."""

import importlib

import pytest

from commands import config_flag
from configs import base
from configs.schema import axis_tables, finalize, recipes, validate
from models import MODELS
from partitioning.mesh import AXES
from tests.jobs import STRATEGIES, make_job

MESHES = {
  "single": {},
  "dp8": {"data": 8},
  "dp4_tp2": {"data": 4, "tensor": 2},
  "tp8": {"tensor": 8},
  "fsdp8": {"fsdp": 8},
  "fsdp": {"fsdp": -1},
  "dp2_fsdp2_tp2": {"data": 2, "fsdp": 2, "tensor": 2},
}
SIZES = dict.fromkeys(AXES, 1)


def load(strategy="single", argument=None, /, **overrides):
  """Returns a shipped config as the command line would leave it; overrides are dotted keys."""
  config = importlib.import_module(f"configs.{strategy}").get_config(argument)
  for key, value in overrides.items():
    config.update_from_flattened_dict({key: value})
  return config


def finalized(argument=None, platform="cpu", /, **overrides):
  """Returns a finalized config."""
  return finalize.finalize(load("single", argument, **overrides), platform)


# ---- What is shipped ----


def test_every_shipped_strategy_is_tested():
  shipped = {path.removeprefix("configs/").removesuffix(".py") for path in config_flag.strategies()}
  assert shipped == {*MESHES} == {*STRATEGIES}


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("recipe", recipes.RECIPES)
@pytest.mark.parametrize("strategy", MESHES)
def test_every_strategy_goes_with_every_recipe(strategy, recipe, platform):
  config = finalize.finalize(load(strategy, recipe), platform)
  assert config.mesh.to_dict() == {**SIZES, **MESHES[strategy]}
  sizes = {axis: 8 if size == -1 else size for axis, size in config.mesh.items()}
  validate.check(config, sizes)
  unset = [
    f"{section}.{key}"
    for section in ("model", "data", "training", "optimizer", "evaluation")
    for key, value in config[section].items()
    if value is None
  ]
  assert unset == []
  assert config.argument == recipe


def test_the_default_recipe_is_lm():
  assert load("dp8", None).to_dict() == load("dp8", "lm").to_dict()
  assert load("dp8", None).model.name == "transformer"


def test_the_mesh_names_the_axes_that_there_are():
  assert tuple(base.MESH) == AXES


@pytest.mark.parametrize("recipe", ["lm", "mlp"])
def test_the_axis_tables_hold_the_dims_that_the_model_has_and_no_other(recipe):
  job = make_job("single", recipe, **({"model.positions": "learned"} if recipe == "lm" else {}))
  tables = axis_tables.AXIS_TABLES[job.config.model.name]
  letters = "".join(MODELS[job.config.model.name].PARAMETERS.values())
  assert {*tables["parameters"]} == {job.legend[letter].name for letter in letters}
  letters = "".join(c.letters for c in job.activations.seen)
  letters += "".join(array.letters for array in job.placements["batch"].values())
  assert {*tables["activations"]} == {job.legend[letter].name for letter in letters}
  every = {dim.name for dim in job.legend.values()}
  assert {*tables["parameters"], *tables["activations"]} == every
  assert {axis for t in tables.values() for axes in t.values() for axis in axes} <= {*AXES}


# ---- What is derived ----


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_warmup_follows_the_steps_that_were_asked_for(platform):
  default = finalized("lm", platform)
  assert default.optimizer.warmup_steps == default.training.steps // 20 > 0
  assert finalized("lm", platform, **{"training.steps": 140}).optimizer.warmup_steps == 7
  both = {"training.steps": 140, "optimizer.warmup_steps": 3}
  assert finalized("lm", platform, **both).optimizer.warmup_steps == 3
  assert finalized("mlp_tutorial", platform, **{"training.steps": 140}).optimizer.warmup_steps == 0


def test_the_head_size_follows_width_and_heads():
  assert finalized(**{"model.model_size": 88, "model.heads": 8}).model.head_size == 11
  assert finalized(**{"model.model_size": 176, "model.heads": 4}).model.head_size == 44
  assert finalized(**{"model.model_size": 100, "model.head_size": 6}).model.head_size == 6
  with pytest.raises(ValueError, match=r"model_size=100 is not a multiple of model\.heads=7; ch"):
    finalized(**{"model.model_size": 100, "model.heads": 7})


def test_the_compute_dtype_follows_the_platform_and_the_parameters():
  assert finalized("lm", "cpu").training.compute_dtype == "float32"
  assert finalized("lm", "gpu").training.compute_dtype == "bfloat16"
  assert finalized("lm", "tpu").training.compute_dtype == "bfloat16"
  wide = {"training.parameter_dtype": "float64"}
  assert finalized("lm", "cpu", **wide).training.compute_dtype == "float64"
  chosen = {"training.compute_dtype": "float32"}
  assert finalized("lm", "gpu", **chosen).training.compute_dtype == "float32"


def test_the_tutorials_network_is_as_wide_as_the_platform_allows():
  for platform, width in (("gpu", 8192), ("tpu", 8192), ("cpu", 512)):
    config = finalized("mlp_tutorial", platform)
    model = (config.model.input_size, config.model.model_size, config.model.feedforward_size)
    assert (*model, config.model.output_size) == (784, width, width, 10)
    assert config.data.global_batch_size == config.data.examples == width
    assert (config.data.input_size, config.data.target_size) == (784, 10)
  narrow = finalized("mlp_tutorial", "gpu", **{"model.model_size": 96})
  assert (narrow.model.feedforward_size, narrow.data.global_batch_size) == (96, 8192)


def test_the_optimizers_table_follows_the_parameters():
  table = {"partitioning.parameters.vocabulary": ("tensor", "fsdp")}
  tables = finalized(**table).partitioning
  assert tables.optimizer.to_dict() == tables.parameters.to_dict()
  assert tables.optimizer.vocabulary == ("tensor", "fsdp")
  zero = finalized(**table, **{"partitioning.optimizer.model": ("data", "fsdp")}).partitioning
  assert (zero.parameters.model, zero.optimizer.model) == (("fsdp",), ("data", "fsdp"))


@pytest.mark.parametrize("recipe", recipes.RECIPES)
def test_finalize_leaves_its_input_as_it_was(recipe):
  config = load("dp4_tp2", recipe)
  before = config.to_json_best_effort()
  found = finalize.finalize(config, "cpu")
  assert config.to_json_best_effort() == before
  assert config.optimizer.warmup_steps == (0 if recipe == "mlp_tutorial" else None)
  assert found.is_locked
  assert found.model.is_locked
  again = finalize.finalize(found, "cpu")
  assert again.to_json_best_effort() == found.to_json_best_effort()


# ---- Choosing model and data ----


def test_model_and_data_are_picked_apart():
  config = finalized("model=mlp,data=mnist")
  assert (config.model.name, config.data.name) == ("mlp", "mnist")
  assert (config.model.input_size, config.model.output_size) == (784, 10)
  assert (config.data.input_size, config.data.target_size) == (784, 10)
  assert finalized("mlp").model.input_size == 64
  assert finalized("data=my_text").model.name == "transformer"


def test_an_unknown_image_data_set_asks_for_its_sizes():
  with pytest.raises(ValueError, match=r"data\.name='cats': set model\.input_size") as refusal:
    finalized("model=mlp,data=cats")
  assert "it is known for digits, mnist, fashion_mnist only" in str(refusal.value)
  with pytest.raises(ValueError, match=r"data\.name='cats': set model\.output_size"):
    finalized("model=mlp,data=cats", **{"model.input_size": 507})
  sizes = {"model.input_size": 507, "model.output_size": 11}
  assert finalized("model=mlp,data=cats", **sizes).data.input_size == 507


NEAR = ("mlp_tutoral", "model=llama3_8", "model=mlq")


@pytest.mark.parametrize(
  ("argument", "said"),
  [
    (
      "mlp_tutoral",
      "unknown recipe 'mlp_tutoral'; there are lm, mlp, mlp_tutorial, gpt2_124m, llama2_7b, ",
    ),
    ("mlp_tutoral", "; did you mean 'mlp_tutorial'?"),
    ("model=llama3_8", "unknown model 'llama3_8'; there are lm, mlp"),
    ("model=llama3_8", "; did you mean 'llama3_8b'?"),
    ("zebra", "unknown recipe 'zebra'; there are lm, mlp, mlp_tutorial"),
    ("model=mlq", "; did you mean 'mlp'?"),
    ("model=mlp,date=mnist", "'date=mnist' is neither model=NAME nor data=NAME"),
    ("model=", "--config=FILE:model=: 'model=' is neither model=NAME nor data=NAME"),
    ("model=mlp,mnist", "'mnist' is neither model=NAME nor data=NAME"),
  ],
)
def test_an_unknown_choice_is_refused_with_the_nearest(argument, said):
  with pytest.raises(ValueError, match=r"NAME|unknown") as refusal:
    load("dp8", argument)
  assert said in str(refusal.value)
  assert ("did you mean" in str(refusal.value)) == (argument in NEAR)


def test_the_task_cannot_be_overridden_while_model_and_data_stay():
  for name in ("regression", "causal_lmm"):
    with pytest.raises(
      ValueError, match=f"task='{name}' was overridden while model and data"
    ) as no:
      finalized("lm", task=name)
    assert "those of 'causal_lm'; choose another recipe with --config=FILE:RECIPE" in str(no.value)


def test_the_models_name_cannot_be_overridden_while_its_sizes_stay():
  with pytest.raises(ValueError, match=r"model\.name='mlp' was overridden while the sizes") as no:
    finalized("lm", **{"model.name": "mlp"})
  assert "those of 'transformer'; pick the model with --config=FILE:model=NAME" in str(no.value)


def test_an_unknown_key_is_refused():
  config = load("dp8")
  with pytest.raises(AttributeError, match="modle"):
    config.modle = 1
  with pytest.raises(AttributeError, match="tensr"):
    config.mesh.tensr = 2
  with pytest.raises(KeyError, match='Key "hats" does not exist'):
    config.update_from_flattened_dict({"partitioning.parameters.hats": ("tensor",)})


# ---- What does not go together ----


def refusal(argument, sizes, /, **overrides):
  """Returns the message with which `check` refuses."""
  with pytest.raises(ValueError, match="the config is refused") as error:
    validate.check(finalized(argument, **overrides), {**SIZES, **sizes})
  return str(error.value)


@pytest.mark.parametrize(
  ("sizes", "overrides", "said"),
  [
    (
      {"data": 3, "fsdp": 2, "tensor": 5},
      {"data.global_batch_size": 20},
      "data.global_batch_size=20 is not divisible by the batch axes data=3 x fsdp=2 = 6; "
      "make it 18 or 24",
    ),
    (
      {"data": 8},
      {"data.global_batch_size": 5},
      "data.global_batch_size=5 is not divisible by the batch axes data=8 x fsdp=1 = 8; make it 8",
    ),
    (
      {"data": 8},
      {"data.global_batch_size": 40, "training.gradient_accumulation_steps": 4},
      "data.global_batch_size=40 / 4 accumulation steps is not divisible by the batch axes "
      "data=8 x fsdp=1 = 8; make it 32 or 64",
    ),
    (
      {"data": 2},
      {"data.global_batch_size": 28, "training.gradient_accumulation_steps": 5},
      "data.global_batch_size=28 is not divisible by training.gradient_accumulation_steps=5",
    ),
    (
      {},
      {"optimizer.schedule": "cosin"},
      "optimizer.schedule='cosin': one of cosine, constant; did you mean 'cosine'?",
    ),
    ({}, {"training.rematerialization": "dot"}, "one of none, dots, full; did you mean 'dots'?"),
    (
      {"context": 2},
      {"training.loss_chunks": 3},
      "data.sequence_length=128 is not divisible by training.loss_chunks=3 x mesh.context=2",
    ),
    ({}, {"training.loss_chunks": 0}, "training.loss_chunks=0: at least 1"),
    ({}, {"training.parameter_dtype": "bfloat16"}, "parameter_dtype='bfloat16': one of float32, f"),
    ({}, {"training.compute_dtype": "float31"}, "bfloat16, float32, float64; did you mean"),
    ({}, {"training.compute_dtype": "float16"}, "set training.compute_dtype=bfloat16, whose"),
    ({}, {"training.parameter_dtype": "float16"}, "='float16': one of float32, float64; did you"),
    ({}, {"training.matmul_precision": "hihg"}, "one of default, high, highest; did you mean 'hi"),
    (
      {},
      {"training.compute_dtype": "float64"},
      "training.compute_dtype=float64 needs training.parameter_dtype=float64",
    ),
    (
      {},
      {"model.heads": 8, "model.kv_heads": 3},
      "model.heads=8 is not a multiple of model.kv_heads=3",
    ),
    ({}, {"model.head_size": 7}, "model.head_size=7 is odd; rotary positions turn pairs"),
    ({}, {"model.dropout_rate": 1.0}, "model.dropout_rate=1.0: at least 0 and below 1"),
    ({}, {"model.dropout_rate": -0.25}, "model.dropout_rate=-0.25: at least 0 and below 1"),
    (
      {},
      {"training.steps": 13, "optimizer.warmup_steps": 14},
      "optimizer.warmup_steps=14: at most 13 steps",
    ),
    ({}, {"model.layers": 0}, "model.layers=0: at least 1"),
    ({}, {"model.kv_heads": 0}, "model.kv_heads=0: at least 1"),
    ({}, {"model.heads": 0}, "model.heads=0: at least 1"),
    ({}, {"training.on_bad_step": "rollback"}, "'rollback': one of stop, roll_back; did you mean"),
    ({}, {"data.skip_batches": (3, -1)}, "data.skip_batches: -1 is not the number of a batch"),
    ({}, {"data.skip_rows": ((8, 8),)}, "data.skip_rows: (8, 8) is not a range of rows"),
    ({}, {"data.skip_rows": ((-8, 8),)}, "data.skip_rows: (-8, 8) is not a range of rows"),
    ({}, {"data.skip_rows": (8, 16)}, "data.skip_rows: 8 is not a range of rows"),
    ({}, {"data.skip_batches": ("3",)}, "data.skip_batches: '3' is not the number of a batch"),
    ({}, {"data.sequence_length": 0}, "data.sequence_length=0: at least 1"),
    ({}, {"seed": 2**32}, "seed=4294967296: below 2**32"),
    (
      {},
      {"partitioning.parameters.model": (2,)},
      "partitioning.parameters.model=(2,): names of mesh axes, such as ('fsdp',)",
    ),
    (
      {},
      {"partitioning.overrides": ("layers/mlp/up/kernel",)},
      "partitioning.overrides: 'layers/mlp/up/kernel' is not a name with the entries of a Partit",
    ),
    ({}, {"processes.slow_ratio": 0.9}, "processes.slow_ratio=0.9: above 1, or 0 to turn it off"),
    ({}, {"training.replica_check_every_steps": -1}, "replica_check_every_steps=-1: at least 0"),
    ({}, {"compiler_options": "a=1,b"}, "compiler_options: 'b' is not name=value"),
  ],
)
def test_keys_that_do_not_go_together_are_refused(sizes, overrides, said):
  assert said in refusal("lm", sizes, **overrides)


@pytest.mark.parametrize(("key", "least"), validate.LEAST.items())
def test_counts_have_a_least(key, least):
  message = refusal("lm", {}, **{key: least - 1})
  assert f"{key}={least - 1}" in message
  assert f": at least {least}" in message
  if key != "training.steps":  # of one step, none can be left to warm up
    validate.check(finalized("lm", **{key: least}), SIZES)


def test_the_least_number_of_steps_is_enough():
  validate.check(finalized("lm", **{"training.steps": 1, "optimizer.warmup_steps": 1}), SIZES)


def test_all_that_is_wrong_comes_in_one_message():
  message = refusal(
    "lm",
    {"data": 3},
    **{
      "data.global_batch_size": 32,
      "training.steps": 0,
      "optimizer.schedule": "linear",
      "model.kv_heads": 5,
      "model.head_size": 9,
    },
  )
  assert len(message.splitlines()) == 6
  for part in ("training.steps=0", "'linear'", "kv_heads=5", "head_size=9", "batch axes data=3"):
    assert part in message
