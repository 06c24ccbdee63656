"""Every file of docs/extending.md, run from a folder outside of the tree."""

import json
import re
import shutil

import pytest

from tests.docs.pages import ROOT, files
from tests.helpers.cli import lines_of
from tests.helpers.compiling import FAST

DP8 = ["--config.mesh.data=8", "--config.mesh.tensor=1"]
DP4_TP2 = ["--config.mesh.data=4", "--config.mesh.tensor=2"]
SHORT = [
  f"--config.compiler_options={FAST}",
  "--config.metrics.tensorboard=false",
  "--config.metrics.every_steps=1",
  "--config.evaluation.final_steps=1",
  "--config.optimizer.warmup_steps=0",
  "--config.optimizer.schedule=constant",
]
NO_STEPS = ["--config.evaluation.sample_tokens=0", "--config.evaluation.every_steps=0"]
# Three runs have all of the page: config files that import others, which register what they use.
CASES = {
  "a model": "from vit import get_config  # noqa: F401\n",
  "a task and a factored optimizer": """
import factored
import pairs


def get_config(recipe="pairs"):
  config, other = pairs.get_config(recipe), factored.get_config(recipe)
  for key in ("name", "weight_decay", "beta_2"):
    config.optimizer[key] = other.optimizer[key]
  return config
""",
  "a size, parts, zero1, an optimizer of optax, data, callback and sink": """
import bilinear
import gated_attention  # noqa: F401 (registers)
import helper  # noqa: F401 (beside it)
import parts
import small_llama  # noqa: F401 (registers)
import together
import top_1  # noqa: F401 (registers)
import zero1


def get_config(recipe="small_llama"):
  config, other = bilinear.get_config(recipe), together.get_config(recipe)
  config.partitioning.optimizer.model = zero1.get_config(recipe).partitioning.optimizer.model
  for key in ("norm", "activation", "positions"):
    config.model[key] = parts.get_config(recipe).model[key]
  config.model.attention = "gated"
  config.training.metrics = config.evaluation.metrics = ("top_1",)
  config.data.name = other.data.name
  config.training.callbacks, config.metrics.sinks = other.training.callbacks, other.metrics.sinks
  config.optimizer.name = "lion"
  return config
""",
}
MODEL, TASK, OTHERS = CASES
EACH_STEP = ["--config.checkpoint.every_steps=1", "--config.checkpoint.keep=3"]
KEYS = {
  MODEL: SHORT,
  TASK: [*SHORT, *EACH_STEP, "--config.evaluation.final_steps=0"],
  OTHERS: [*SHORT, *NO_STEPS, "--config.optimizer.arguments=b1=0.95"],
}


# A model with a running mean, as batch normalization has one; only training changes it.
CENTERED = """
import types

import jax.numpy as jnp
from flax import nnx

from configs import base
from configs.schema import recipes
from configs.schema.axis_tables import AXIS_TABLES
from models import MODELS, mlp


class Centered(mlp.MLP):
  def __init__(self, spec, *, rngs):
    super().__init__(spec, rngs=rngs)
    self.mean = nnx.BatchStat(jnp.zeros(spec.input_size, jnp.float32))

  def loss_sums(self, batch, key=None):
    if key is not None:
      self.mean[...] = 0.5 * self.mean[...] + 0.5 * jnp.mean(batch["inputs"], axis=0)
    centered = batch["inputs"] - self.mean[...]
    return super().loss_sums({**batch, "inputs": centered}, key)


def centered():
  config = recipes.mlp()
  config.model.update({"name": "centered", "model_size": 16})
  return config


MODELS.register("centered", types.SimpleNamespace(SPEC=mlp.SPEC, build=Centered))
AXIS_TABLES.register("centered", AXIS_TABLES["mlp"])
recipes.RECIPES.register("centered", centered)


def get_config(recipe="centered"):
  return base.get_config(recipe)
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
  """Returns the folder of the page's files."""
  folder = tmp_path_factory.mktemp("mine")
  for name, text in files((ROOT / "docs" / "extending.md").read_text()).items():
    (folder / name).write_text(text)
  (folder / "helper.py").write_text("")
  for number, text in enumerate(CASES.values()):
    (folder / f"case_{number}.py").write_text(text)
  return folder


def losses(workdir):
  """Returns step -> loss."""
  return {line["step"]: line["loss"] for line in lines_of(workdir) if "loss" in line}


def config_of(mine, case):
  """Returns the flag with a case's file."""
  return f"--config={mine / f'case_{[*CASES].index(case)}.py'}"


def train(main, mine, case, workdir, mesh, steps):
  """Trains until a step; returns the exit code and what was printed."""
  more = [*KEYS[case], *mesh, f"--config.training.steps={steps}", f"--workdir={workdir}"]
  return main(config_of(mine, case), *more)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.long
def test_it_trains_on_one_mesh_and_resumes_on_another(main, mine, tmp_path, case):
  for mesh, steps in ((DP8, 2), (DP4_TP2, 3)):
    code, out, err = train(main, mine, case, tmp_path, mesh, steps)
    assert code == 0, (out, err)
  assert [*losses(tmp_path)] == [1, 2, 3]
  if case == TASK:
    again = tmp_path / "again"
    shutil.copytree(tmp_path / "checkpoints" / "1", again / "checkpoints" / "1")
    code, out, err = train(main, mine, case, again, DP8, 2)
    assert code == 0, (out, err)
    assert losses(again) == {2: losses(tmp_path)[2]}  # to the bit
  if case == OTHERS:
    assert "counting, train, 256 rows" in out
    steps = {line.split()[0] for line in (tmp_path / "norms.txt").read_text().splitlines()}
    assert steps == {"2"}
    rows = [line.split(",") for line in (tmp_path / "metrics_long.csv").read_text().splitlines()]
    assert {int(row[0]): float(row[2]) for row in rows if row[1] == "loss"} == losses(tmp_path)
    layout = (tmp_path / "layout.txt").read_text()
    assert re.search(r"optimizer/0/mu/embed/table .* \(tensor, data\) ", layout), layout
    # A module of the folder of a file that registers a data source has changed.
    (mine / "helper.py").write_text("CHANGED = 1\n")
    code, out, err = train(main, mine, case, tmp_path, DP4_TP2, 4)
    assert code == 2, (out, err)
    assert "--accept-changes=versions.code" in err


def test_the_same_model_on_both_meshes(main, mine):
  both = [f"--config={mine / 'vit.py'}", f"--against={mine / 'vit.py'}"]
  on_dp8 = [word.replace("--config.", "--against.") for word in DP8]
  code, out, err = main("compare", *both, *DP4_TP2, *on_dp8, f"--set=compiler_options={FAST}")
  assert code == 0, (out, err)


def test_evaluate_takes_the_variables_of_the_checkpoint(main, tmp_path):
  (tmp_path / "centered.py").write_text(CENTERED)
  command = [f"--config={tmp_path / 'centered.py'}", *SHORT, "--config.training.steps=3"]
  code, out, err = main(*command, *DP8, f"--workdir={tmp_path}")
  assert code == 0, (out, err)
  [written] = [line["eval_loss"] for line in lines_of(tmp_path) if "eval_loss" in line]
  # The run knows the file that it was begun with.
  code, out, err = main("evaluate", str(tmp_path), "mesh.data=4", "mesh.tensor=2")
  assert code == 0, (out, err)
  assert f"eval_loss {written:.4f} " in out
  (tmp_path / "centered.py").unlink()
  code, out, err = main("evaluate", str(tmp_path))
  assert code == 2, out
  assert f"was begun with {tmp_path}/centered.py, which is not there; give the config" in err


def test_an_error_in_a_model_is_one_message_with_its_place(main, tmp_path):
  path = tmp_path / "wrong.py"
  path.write_text(wrong := CENTERED.replace("jnp.mean(", "jnp.meen("))
  [number] = [i for i, line in enumerate(wrong.splitlines(), 1) if "jnp.meen(" in line]
  code, out, err = main("layout", f"--config={path}")
  assert code == 2, (out, err)
  assert err.startswith(f"refused: {path}:{number}: AttributeError: module 'jax.numpy' has no")
  assert "Traceback" not in err


def test_an_error_while_rows_are_read_is_one_message_with_its_place(main, mine, tmp_path):
  (mine / "torn.py").write_text(
    "import dataclasses\n"
    "import pairs\n"
    "from input_pipeline.row_source import SOURCES\n"
    "def torn(data, split, seed):\n"
    "  source = pairs.halves(data, split, seed)\n"
    "  return dataclasses.replace(source, read=lambda rows: {}[rows[0]])\n"
    "SOURCES.register('torn', torn)\n"
    "def get_config(recipe='pairs'):\n"
    "  config = pairs.get_config(recipe)\n"
    "  config.data.name = 'torn'\n"
    "  return config\n"
  )
  code, out, err = main(f"--config={mine / 'torn.py'}", *SHORT, f"--workdir={tmp_path}")
  assert code == 1, (out, err)
  assert f"error: {mine / 'torn.py'}:6: KeyError: " in err
  assert "Traceback" not in err


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_plan_loads_the_files_in_its_own_process(main, mine, tmp_path, case):
  more = ["--topology=h100:8", "--config.planning.cache_dir=", f"--workdir={tmp_path}"]
  code, out, err = main("plan", config_of(mine, case), *more)
  assert code == 0, (out, err)
  assert json.loads((tmp_path / "plan.json").read_text())["fits"]


def test_a_callback_that_raises_ends_the_run_and_a_sink_that_raises_does_not(main, mine, tmp_path):
  (tmp_path / "failing.py").write_text(
    "from configs import base\n"
    "from training.callbacks import CALLBACKS, Callback\n"
    "from training.metrics.sinks import SINKS\n"
    "SINKS.register('broken', lambda config, workdir, step: 1 / 0)\n"
    "CALLBACKS.register('wrong', Callback(2, lambda context: context.nothing))\n"
    "def get_config(recipe='mlp'):\n"
    "  config = base.get_config(recipe, mesh={'data': 8})\n"
    "  config.training.callbacks, config.metrics.sinks = ('wrong',), ('broken',)\n"
    "  return config\n"
  )
  workdir = tmp_path / "run"
  path = tmp_path / "failing.py"
  keys = [*SHORT, *DP8, "--config.model.model_size=16", "--config.training.steps=3"]
  code, out, err = main(f"--config={path}", *keys, f"--workdir={workdir}")
  assert code == 1, (out, err)
  said = f"the callback 'wrong' fails after step 2: {path}:5: AttributeError: "
  assert said in err
  assert "Traceback" not in err
  assert out.count("the sink 'broken' is dropped") + err.count("the sink 'broken' is dropped") == 1
  assert [*losses(workdir)] == [1, 2]


def test_two_files_that_cannot_be_loaded_together_are_one_message(main, mine, tmp_path):
  other = tmp_path / "counting.py"
  other.write_text((mine / "counting.py").read_text())
  code, out, err = main("layout", f"--config={mine / 'together.py'}", f"--against={other}")
  assert code == 2, (out, err)
  said = f"{other}: {mine} has a module 'counting' too, and Python would import only one of them"
  assert err == f"refused: --against={other}: {said}; rename one\n"
  folder = tmp_path / "apart"
  folder.mkdir()
  (folder / "one.py").write_text((mine / "vit.py").read_text())
  code, out, err = main("layout", f"--config={mine / 'vit.py'}", f"--against={folder / 'one.py'}")
  assert code == 2, (out, err)
  assert f"the model 'my_vit' is already registered by {mine / 'vit.py'}; rename it" in err
