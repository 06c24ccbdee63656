"""The verb `config`: values, units, origins, meanings, refusals."""

import json

import pytest

from commands import config as verb
from commands import config_flag
from configs import base
from configs.schema import finalize
from partitioning.mesh_sizes import resolve_sizes

DP4_TP2 = "--config=configs/dp4_tp2.py"


def test_every_key_with_its_origin(main):
  code, out, err = main("config", DP4_TP2, "--config.training.steps=0.3e1", "--json")
  assert (code, err) == (0, "")
  rows = {row["key"]: row for row in json.loads(out)}
  assert len(rows) > 200
  steps = rows["training.steps"]
  assert steps == {
    "key": "training.steps",
    "value": 3,
    "unit": "steps",
    "origin": "override",
    "source": "",
    "meaning": "optimizer steps",
  }
  assert rows["mesh.tensor"]["source"] == "configs/dp4_tp2.py"
  assert rows["training.attention_kernel"]["origin"] == "platform"
  assert "128 tokens are shorter than 256" in rows["training.attention_kernel"]["source"]
  assert rows["optimizer.learning_rate"]["value"] == 0.008
  assert rows["optimizer.warmup_steps"]["value"] == 0  # a twentieth of three steps


def test_named_keys_as_text_for_devices_that_are_not_there(main):
  words = ("training.att", "mesh", "partitioning.seq", "model.layers")
  mesh = ("--config.mesh.fsdp=32", "--config.mesh.tensor=2", "--config.data.global_batch_size=32")
  code, out, err = main(
    "config", *words, "--config=configs/fsdp.py:llama3_8b", "--topology=v5p-128", *mesh
  )
  assert (code, err) == (0, "")
  lines = out.splitlines()
  assert "mesh.tensor=2" + " " * 31 + "devices, override" in lines
  assert "model.layers=32" + " " * 29 + "layers, recipe llama3_8b" in lines
  assert "training.attention_kernel='splash'" in out
  at = lines.index("partitioning.sequence_parallel=True")
  assert lines[at + 1].startswith("  platform tpu: mesh.tensor=2: what lies between blocks")
  assert "optimizer" not in "".join(line for line in lines if not line.startswith(" "))
  assert max(map(len, lines)) <= 80


def test_what_a_run_changes_comes_first_or_alone(main):
  command = ("config", DP4_TP2, "--config.model.heads=2")
  code, out, err = main(*command)
  assert (code, err) == (0, "")
  names = [line.partition("=")[0] for line in out.splitlines() if line[:1] not in ("", " ")]
  changed = ["mesh.data", "mesh.tensor", "model.heads", "model.kv_heads"]
  head = ["changed from the recipe lm:", *changed, "not changed:", "argument"]
  assert names[: len(head)] == head
  assert len(out.splitlines()) < 300
  folded = "partitioning.parameters: 34 dims; `config partitioning.parameters` lists them"
  assert out.splitlines()[-1] == folded
  _, out, _ = main(*command, "--changed", "--json")
  assert [row["key"] for row in json.loads(out)] == changed
  _, out, _ = main("config", "--config=configs/single.py", "--changed")
  assert out == "nothing is changed from the recipe lm\n"


@pytest.mark.parametrize(
  ("words", "said", "shown"),
  [
    (("config", "optimizer.foo", DP4_TP2), "no config key begins with 'optimizer.foo'", ""),
    (("config", "trainin.steps", DP4_TP2), "did you mean 'training.steps'?", ""),
    (("layout", DP4_TP2, "--json"), "belongs to the verbs config and check, not to layout", ""),
    (
      ("config", "training.steps", DP4_TP2, "--config.training.steps=0"),
      "training.steps=0: at least 1",
      "training.steps=0",
    ),
  ],
)
def test_refusals(main, words, said, shown):
  code, out, err = main(*words)
  assert code == 2
  assert err.startswith("refused: ")
  assert said in err
  assert out.startswith(shown) if shown else out == ""


# ------------------------------ where a value comes from ------------------------------


def found(argument, overrides=None, *, mesh=None, platform="cpu"):
  config = base.get_config(argument, mesh=mesh)
  for key, value in (overrides or {}).items():
    section, _, name = key.rpartition(".")
    (config[section] if section else config)[name] = value
  sizes = resolve_sizes(config.mesh.to_dict(), None)
  final, choices = finalize.with_choices(config, platform, sizes)
  elsewhere = [finalize.finalize(config, one, sizes) for one in {*verb.PLATFORMS} - {platform}]
  given = {"file": "f.py", "overridden": overrides or {}, "elsewhere": elsewhere}
  origin = verb.origins(config, final, choices, platform=platform, **given)
  assert {*origin} == {key for key, _ in config_flag.leaves(final)}
  assert {kind for kind, _ in origin.values()} <= {*verb.KINDS}
  return origin


def test_a_preset():
  keys = found("llama3_8b")
  assert keys["model.layers"] == keys["data.sequence_length"] == ("recipe", "llama3_8b")
  assert keys["model.dropout_rate"] == keys["data.shuffle"] == ("default", "")
  assert keys["training.steps"] == keys["optimizer.learning_rate"] == ("recipe", "llama3_8b")
  keys = found("lm", {"model.model_size": 256, "model.kv_heads": 2})
  assert keys["model.heads"] == keys["model.layers"] == ("default", "")
  assert keys["model.feedforward_size"] == ("derived", "3 x model_size")
  assert keys["model.kv_heads"] == ("override", "")


def test_an_override_counts_as_one_even_if_it_is_the_default():
  keys = found("mlp", {"training.steps": 400, "seed": 3}, mesh={"data": 4})
  assert keys["training.steps"] == keys["seed"] == ("override", "")
  assert keys["mesh.data"] == ("file", "f.py")
  assert keys["mesh.fsdp"] == ("default", "")
  assert keys["data.global_batch_size"] == ("recipe", "mlp")
  assert keys["data.prefetch_batches"] == ("default", "")


@pytest.mark.parametrize(("platform", "width"), [("cpu", 512), ("tpu", 8192)])
def test_what_the_platform_decides(platform, width):
  keys = found("mlp_tutorial", platform=platform)
  assert keys["model.model_size"] == keys["training.compute_dtype"] == ("platform", platform)
  assert keys["data.input_size"] == ("derived", "")
  final = finalize.finalize(base.get_config("mlp_tutorial"), platform)
  assert final.model.model_size == width


def test_an_override_that_is_replaced_is_derived():
  keys = found("lm", {"data.skip_batches": (1,)})
  assert keys["optimizer.warmup_steps"] == ("derived", "")
  assert keys["data.skip_batches"] == keys["data.skip_rows"] == ("derived", "")
