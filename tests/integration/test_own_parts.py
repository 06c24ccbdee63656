"""Parts of a decoder from a folder outside of the tree, those of docs/extending.md."""

import runpy
import sys
import types

import numpy as np
import pytest

from partitioning.rules import named_leaves
from runtime.extensions import Table
from tests.docs.pages import ROOT, files
from tests.helpers.compiling import FAST
from tests.helpers.jobs import first_state, host_batch, make_job
from tests.models import numpy_decoder

ALL = """
import bilinear
import gated_attention  # noqa: F401 (registers)
import parts
import scaled  # noqa: F401 (registers)


def get_config(recipe="scaled"):
  config, other = bilinear.get_config(recipe), parts.get_config()
  for key in ("norm", "activation", "positions"):
    config.model[key] = other.model[key]
  config.model.attention = "gated"
  return config
"""
SIZES = {"layers": 2, "model_size": 32, "heads": 4, "kv_heads": 2, "feedforward_size": 40}
SIZES |= {"mlp_ratio": 1.5, "vocabulary_size": 256}
BOTH = [f"--set=model.{key}={value}" for key, value in SIZES.items()]
BOTH += [f"--set=compiler_options={FAST}", "--set=data.sequence_length=16"]
BOTH += ["--set=data.global_batch_size=8"]
ONE = {"data": 1, "tensor": 1}
# Mesh -> keys of both sides.
MESHES = {
  "data=2 fsdp=2 tensor=2": ("lora.rank=3", "lora.targets=('one','gate','out')"),
  "data=1 stage=2 context=2 tensor=2": (),
  "data=2 expert=2 tensor=2": ("model.experts=4", "model.dense_layers=1"),
}


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
  """Returns the folder of the page's files, and one that has all parts."""
  folder = tmp_path_factory.mktemp("parts")
  for name, text in files((ROOT / "docs" / "extending.md").read_text()).items():
    (folder / name).write_text(text)
  (folder / "all_parts.py").write_text(ALL)
  return folder


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES)
def test_they_are_equal_on_every_mesh(main, mine, mesh):
  config = mine / "all_parts.py"
  sizes = dict(one.split("=") for one in mesh.split())
  flags = [f"--config.mesh.{axis}={size}" for axis, size in sizes.items()]
  flags += [f"--against.mesh.{axis}={size}" for axis, size in ONE.items()]
  flags += [f"--set={key}" for key in MESHES[mesh]]
  if "fsdp" in sizes:
    flags += ["--config.partitioning.sequence_parallel=True"]
  code, out, err = main("compare", f"--config={config}", f"--against={config}", *flags, *BOTH)
  assert code == 0, (out, err)
  assert all(part in out for part in ("mlp/one", "attention/gate", "norm/alpha"))


@pytest.fixture
def bilinear(mine, monkeypatch):
  """Registers the MLP and the metric of the page, as the strategy `bilinear`, for one test."""

  def register(table, name, value):
    monkeypatch.setitem(table, name, value)
    monkeypatch.setitem(table.origins, name, mine)

  monkeypatch.setattr(Table, "register", register)
  runpy.run_path(str(mine / "top_1.py"))
  found = types.SimpleNamespace(**runpy.run_path(str(mine / "bilinear.py")))
  monkeypatch.setitem(sys.modules, "configs.bilinear", found)


def test_loss_and_metric_are_what_numpy_computes(bilinear, monkeypatch):
  own = {"model.mlp_ratio": 1.2, "evaluation.metrics": ("top_1",)}
  job = make_job("bilinear", "lm", **own)
  assert job.placements["parameters"]["layers/mlp/two/kernel"].shape == (2, 40, 48)
  params, batch = first_state(job).params, host_batch(job)
  sums = job.compile(job.program.sums, job.state.params, job.batch).function(params, batch)

  def mlp(model, weights, x_TD):
    one, two, down = (weights[f"mlp/{name}/kernel"] for name in ("one", "two", "down"))
    return ((x_TD @ one) * (x_TD @ two)) @ down

  monkeypatch.setattr(numpy_decoder, "mlp", mlp)
  arrays = {name: np.asarray(x) for name, x in named_leaves(params).items()}
  rows = [batch[name] for name in ("tokens", "targets", "weights", "segments")]
  wanted = numpy_decoder.loss(job.config, arrays, *rows)
  assert sums["loss"] / sums["weight"] == pytest.approx(wanted, rel=1e-5)
  likeliest = [
    numpy_decoder.logits(job.config, arrays, tokens_T, segments_T).argmax(-1)
    for tokens_T, _, _, segments_T in zip(*rows, strict=True)
  ]
  right = np.average(np.stack(likeliest) == batch["targets"], weights=batch["weights"])
  assert 0 < right < 1
  assert sums["top_1"] / sums["weight"] == pytest.approx(right, rel=1e-6)


@pytest.mark.parametrize(
  ("file", "keys", "said"),
  [
    ("bilinear", "model.mlp=bilinar", "one of feedforward, bilinear; did you mean 'bilinear'?"),
    ("bilinear", "model.gated=False", "is about model.mlp=feedforward, and it is 'bilinear'"),
    ("bilinear", "model.mlp=feedforward model.mlp_ratio=2", "is about model.mlp=bilinear, and it"),
    ("top_1", "training.metrics=top1", "unknown metric 'top1'; registered are top_1; did you mean"),
    ("bilinear", "lora.rank=2 lora.targets=('on',)", "'on' matches no linear layer; near is one"),
    ("top_1:mlp", "", "training.metrics=('top_1',): the model mlp does not use it"),
  ],
)
def test_a_wrong_name_or_key_is_refused_with_what_is_near(main, mine, file, keys, said):
  name, _, recipe = file.partition(":")
  config = f"{mine / name}.py:{recipe}".rstrip(":")
  flags = [f"--config.{key}" for key in keys.split()]
  code, out, err = main("layout", f"--config={config}", *flags)
  assert code == 2, (out, err)
  assert said in err


def test_help_names_them(main, mine):
  code, out, err = main("help", "model.mlp_ratio", "model.mlp", f"--config={mine / 'bilinear.py'}")
  assert code == 0, err
  words = " ".join(out.split())
  assert "--config.model.mlp_ratio=3.0 width of a bilinear MLP over model_size" in words
  assert "docs/extending.md); registered: bilinear" in words
