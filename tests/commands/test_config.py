"""The verb `config`: values, units, origins, meanings, refusals."""

import json

import pytest

DP4_TP2 = "--config=configs/dp4_tp2.py"


def test_every_key_with_its_origin(main):
  code, out, err = main("config", DP4_TP2, "--config.training.steps=3", "--json")
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
  origins = {key: (row["origin"], row["source"]) for key, row in rows.items()}
  assert origins["mesh.tensor"] == ("file", "configs/dp4_tp2.py")
  assert origins["mesh.fsdp"] == ("default", "")
  assert origins["model.layers"] == ("recipe", "lm")
  assert origins["training.attention_kernel"][0] == "platform"
  assert "128 tokens are shorter than 256" in origins["training.attention_kernel"][1]
  assert origins["optimizer.warmup_steps"] == ("derived", "")
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
  assert "model.layers=32" + " " * 29 + "layers, preset llama3_8b" in lines
  assert "training.attention_kernel='splash'" in out
  at = lines.index("partitioning.sequence_parallel=True")
  assert lines[at + 1].startswith("  platform tpu: mesh.tensor=2: what lies between blocks")
  assert "optimizer" not in "".join(line for line in lines if not line.startswith(" "))
  assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
  ("words", "said", "shown"),
  [
    (("config", "optimizer.foo", DP4_TP2), "no config key begins with 'optimizer.foo'", ""),
    (("config", "trainin.steps", DP4_TP2), "did you mean 'training.steps'?", ""),
    (("config",), "no config; for example", ""),
    (("train", "steps", DP4_TP2), "unexpected 'steps' after the verb", ""),
    (("layout", DP4_TP2, "--json"), "--json belongs to the verb config, not to layout", ""),
    (("config", DP4_TP2, "--topology=v5p:4"), "v5p takes 3 dims", ""),
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
