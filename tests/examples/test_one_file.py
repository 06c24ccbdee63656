"""The trainer in one file trains as the application does, and resumes to the bit."""

import ast
import dataclasses
import importlib.util
import json
import os
import pathlib
import sys
import time
from types import ModuleType

import jax
import numpy as np
import pytest

from checks.__main__ import main as check
from commands import eject
from commands.eject import file_flags
from configs import dp4_tp2
from configs.schema import finalize
from examples import one_file
from tests.helpers.compiling import OPTIONS
from tests.helpers.jobs import make_job
from tests.test_imports import imports
from training import splits
from training.setup import Job

ROOT = pathlib.Path(__file__).parents[2]
# Distinct sizes, so that a swapped dim cannot pass; heads of keys are not divided by tensor=2.
SIZES = {"layers": 2, "model_size": 24, "feedforward_size": 40, "heads": 6, "kv_heads": 3}
SIZES |= {"head_size": 10, "norm_epsilon": 1e-5, "rotary_base": 5e3, "separate_documents": True}
DATA = {"sequence_length": 29, "global_batch_size": 8}
OPTIMIZER = {"learning_rate": 3e-3, "warmup_steps": 2, "weight_decay": 0.3, "clip_norm": 0.7}
STEPS = 6
RUN = {"steps": STEPS, "log_every": 1, "evaluate_every": 0, "evaluation_batches": 2, "seed": 3}
CONFIG = one_file.Config(**SIZES, **DATA, **OPTIMIZER, **RUN, sample_tokens=0)


def lines(workdir: pathlib.Path) -> list[dict]:
  return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def the_applications(strategy: str, dtype: str) -> tuple[Job, list[dict]]:
  """Returns a job, and the metrics of its steps and of the evaluation after the last."""
  keys = {f"model.{name}": value for name, value in SIZES.items()}
  keys |= {f"data.{name}": value for name, value in DATA.items()}
  keys |= {f"optimizer.{name}": value for name, value in OPTIMIZER.items()}
  keys |= {"model.vocabulary_size": 256, "model.vocabulary_multiple": 64, "seed": RUN["seed"]}
  keys |= {"training.steps": STEPS, "training.parameter_dtype": dtype}
  # What is logged, evaluated and saved is read by `eject` alone.
  keys |= {"metrics.every_steps": 1, "evaluation.every_steps": 0, "evaluation.steps": 2}
  job = make_job(strategy, "lm", **keys, **{"evaluation.sample_tokens": 0})
  data, state, found = splits.open_data(job), job.initial_state(), []
  step = job.compile_train_step().function
  for number in range(STEPS):
    state, metrics = step(state, data.train.batch(number, job.batch_shardings))
    found.append({"step": number + 1, **{name: float(x) for name, x in metrics.items()}})
  evaluate = job.compile_eval_step().function
  batches = [data.evaluation.batch(number, job.batch_shardings) for number in range(2)]
  sums = [evaluate(state.params, batch) for batch in batches]
  loss, weight = (sum(float(one[name]) for one in sums) for name in ("loss", "weight"))
  return job, [*found, {"step": STEPS, "eval_loss": loss / weight}]


def ejected(job: Job, path: pathlib.Path) -> ModuleType:
  """Returns the file that `eject` writes for a job, as a module."""
  values = file_flags(job.config, "cpu", job.devices.sizes)
  path.write_text(eject.filled(eject.FILE.read_text(), values, path.name, "eject"))
  spec = importlib.util.spec_from_file_location(path.stem, path)
  module = importlib.util.module_from_spec(spec)
  # Dataclasses look their module up.
  sys.modules[path.stem] = module
  spec.loader.exec_module(module)
  return module


@pytest.mark.parametrize(
  ("dtype", "tolerance", "strategy"),
  [
    ("float64", 1e-12, "dp2_fsdp2_tp2"),
    pytest.param("float32", 1e-5, "dp4_tp2", marks=pytest.mark.long),
  ],
)
def test_trains_ejected_as_the_application(dtype, tolerance, strategy, tmp_path):
  with jax.enable_x64(dtype == "float64"):
    job, wanted = the_applications(strategy, dtype)
    file = ejected(job, tmp_path / "ejected_file.py")
    with jax.numpy_dtype_promotion("standard"):
      file.train(dataclasses.replace(file.Config(), workdir=str(tmp_path / "run")))
    found = lines(tmp_path / "run")
    assert len(found) == len(wanted) == STEPS + 1
    for ours, its in zip(found, wanted, strict=True):
      for key, value in its.items():
        assert ours[key] == pytest.approx(value, rel=tolerance), (its["step"], key)


@pytest.mark.parametrize(
  ("keys", "said"),
  [
    ({"model.experts": 4}, ["model.experts=4; it has 0"]),
    ({"lora.rank": 2, "optimizer.name": "muon"}, ["lora.rank=2; it has 0", "optimizer.name=muon"]),
    ({"mesh.stage": 2, "training.z_loss": 0.1}, ["mesh.stage=2; it has 1", "z_loss=0.1; it has 0"]),
    ({"checkpoint.initialize_from": "runs/x"}, ["checkpoint.initialize_from=runs/x"]),
    ({"model.vocabulary_size": 300}, ["model.vocabulary_size is no multiple of 128"]),
  ],
)
def test_what_the_file_cannot_do_is_refused(keys, said):
  config = dp4_tp2.get_config("lm")
  config.update_from_flattened_dict(keys)
  with pytest.raises(ValueError, match=r"examples/one_file\.py cannot train this config") as error:
    file_flags(finalize.finalize(config, "cpu"), "cpu", config.mesh.to_dict())
  lines = str(error.value).splitlines()[1:]
  assert all(any(part in line for line in lines) for part in said), lines


def test_eject_writes_a_file_once(main, tmp_path):
  command = ["eject", "--config=configs/dp4_tp2.py", f"--to={tmp_path}/mine.py"]
  code, out, err = main(*command, "--config.model.layers=5")
  assert code == 0, err
  assert f"python {tmp_path}/mine.py" in out
  text = (tmp_path / "mine.py").read_text()
  assert '  mesh: str = "data=4,tensor=2"  # sizes' in text
  assert "  layers: int = 5\n" in text
  assert '  workdir: str = "runs/mine"\n' in text
  code, _, err = main(*command)
  assert code == 2
  assert "it exists" in err
  assert (tmp_path / "mine.py").read_text() == text


def test_rows_and_their_order_are_the_applications():
  sizes = {"data.sequence_length": 101, "model.vocabulary_size": 256}
  config = make_job("single", "lm", **sizes, **{"model.vocabulary_multiple": 64}).config
  for split, its in (
    ("train", splits.training_batches(config)),
    ("test", splits.evaluation_batches(config)),
  ):
    rows = one_file.Rows(dataclasses.replace(CONFIG, sequence_length=101), split)
    assert rows.count == len(its.source)
    numbers = np.array([0, 7, rows.count - 1])
    wanted, found = its.source.read(numbers), rows.take(numbers)
    for name in ("tokens", "targets", "weights"):
      np.testing.assert_array_equal(found[name], wanted[name])
    starts = [np.diff(x, axis=1) != 0 for x in (found["segments"], wanted["segments"])]
    np.testing.assert_array_equal(*starts)
    if split == "train":  # the batch in which the second epoch begins
      step = rows.count // 16
      its_ids = its.row_ids(step)
      np.testing.assert_array_equal(rows.batch(step, 16, 0)["tokens"], rows.take(its_ids)["tokens"])


def test_a_killed_run_resumes_to_the_bit(forks, tmp_path, capsys):
  (tmp_path / "text.txt").write_text("One swallow does not make a summer. " * 60)
  small = "--layers=1 --model_size=16 --feedforward_size=24 --heads=2 --kv_heads=1 --head_size=8"
  more = "--mesh=data=2 --sequence_length=16 --global_batch_size=4 --steps=60 --sample_tokens=0"
  flags = [*small.split(), *more.split(), "--save_every=7", "--log_every=1", "--evaluate_every=20"]
  flags += [f"--text={tmp_path}/*.txt"]
  environment = {**os.environ, "XLA_FLAGS": " ".join(f"--{n}={x}" for n, x in OPTIONS.items())}
  environment |= {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
  environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}

  def start(name):
    command = ["examples/one_file.py", *flags, f"--workdir={tmp_path / name}"]
    return forks.start(command, out=tmp_path / f"{name}.out", environment=environment)

  assert start("whole").wait() == 0, (tmp_path / "whole.out").read_text()
  killed, log = start("killed"), tmp_path / "killed" / "metrics.jsonl"
  while not log.exists() or log.read_text().count("\n") < 10:
    assert killed.poll() is None, (tmp_path / "killed.out").read_text()
    time.sleep(0.002)
  killed.kill()
  killed.wait()
  assert not (tmp_path / "killed" / "step_00000060.npz").exists()
  (tmp_path / "killed" / "part.npz").write_bytes(b"half of a checkpoint")
  assert start("killed").wait() == 0
  assert "from step 0\n" not in (tmp_path / "killed.out").read_text().partition("step 10 ")[2]
  assert log.read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()
  ours, its = (np.load(tmp_path / name / "step_00000060.npz") for name in ("killed", "whole"))
  assert sorted(ours.files) == sorted(its.files)
  for name in set(ours.files) - {"config"}:
    np.testing.assert_array_equal(ours[name], its[name])
  # On another mesh.
  config = one_file.Config(**{**json.loads(str(its["config"])), "mesh": "data=2,fsdp=2"})
  config, layout = one_file.started(config)
  with jax.numpy_dtype_promotion("standard"):
    placed = one_file.Program(config, layout).placed
  state = one_file.restore(tmp_path / "whole" / "step_00000060.npz", config, placed)
  for (name, leaf), sharding in zip(
    one_file.named(state).items(), jax.tree.leaves(placed), strict=True
  ):
    np.testing.assert_array_equal(leaf, its[name])
    assert leaf.sharding == sharding
  assert state["params"]["final_norm/scale"].addressable_shards[0].data.shape == (8,)
  with pytest.raises(SystemExit), jax.numpy_dtype_promotion("standard"):
    one_file.main([*flags, "--beta_2=0.9", f"--workdir={tmp_path / 'whole'}"])
  assert "beta_2 was 0.95 and is 0.9" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("flags", "said"),
  [
    ("--mesh=data=3,tensor=5", "global_batch_size=32 is no multiple of 3; heads=8 is no multiple"),
    ("--mesh=rows=2,data=0", "there is no axis rows, but data, fsdp, tensor; data has size '0'"),
    ("--mesh=data=16", "takes 16 devices, and there are 8"),
    ("--text=nowhere/*.txt", "there is no text in it to train on"),
  ],
)
def test_what_does_not_fit_is_refused(flags, said, tmp_path, capsys):
  with pytest.raises(SystemExit) as exit_info:
    one_file.main([flags, f"--workdir={tmp_path / 'run'}"])
  assert exit_info.value.code == 2
  assert said in capsys.readouterr().err
  assert not (tmp_path / "run").exists()


def test_is_short_and_stands_alone():
  text = pathlib.Path(one_file.__file__).read_text()
  assert len(text.splitlines()) <= 600
  modules = {name.split(".")[0] for _, name in imports(ast.parse(text), deferred=False)}
  assert modules - sys.stdlib_module_names == {"jax", "numpy", "optax"}
  deferred = {name for _, name in imports(ast.parse(text))} - {*sys.stdlib_module_names}
  assert [name for name in deferred if name.split(".")[0] not in modules] == ["checks"]


@pytest.mark.parametrize("only", ["budget", pytest.param("", marks=pytest.mark.long)])
def test_check_finds_nothing(only, capsys):
  meshes = ["--mesh=1", "--mesh=fsdp=2,tensor=2"]
  with jax.numpy_dtype_promotion("standard"):
    code = check([one_file.__file__, "--attached", *meshes, f"--only={only}"])
  assert code == 0, capsys.readouterr().out
