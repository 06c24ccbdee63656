"""What is suggested for a name that is unknown, and what is not."""

import importlib
import pathlib
import re

import pytest

from commands import config_flag
from configs import base
from runtime import suggest

ROOT = pathlib.Path(__file__).parent.parent.parent
KEYS = [key for key, _, _ in config_flag.keys(base.get_config("lm"))]
DATA_SETS = ["digits", "kitti", "mnist", "python_source", "wiki40b", "glue", "lm1b"]


@pytest.mark.parametrize(
  ("name", "known", "meant"),
  [
    ("training.stepz", KEYS, "training.steps"),
    ("trainign.steps", KEYS, "training.steps"),
    ("data.batch_size", KEYS, "data.global_batch_size"),
    ("learning_rate", KEYS, "optimizer.learning_rate"),
    ("training.learning_rate", KEYS, "optimizer.learning_rate"),
    ("data.colour", KEYS, None),
    ("model.width", KEYS, "model.model_size"),
    ("lr", KEYS, "optimizer.learning_rate"),
    ("optimizer.beta2", KEYS, "optimizer.beta_2"),
    ("model.batch_size", KEYS, "data.global_batch_size"),
    ("lr", ("learning_rate", "weight_decay"), "learning_rate"),
    ("relu2", ("relu", "relu_squared"), "relu_squared"),
    ("out_dir", ("workdir", "html"), "workdir"),
    ("model.colour", KEYS, None),
    ("wikitext", DATA_SETS, None),
    ("imagenet", DATA_SETS, None),
    ("python_sauce", DATA_SETS, "python_source"),
    ("mpl", ("lm", "mlp", "mlp_tutorial"), "mlp"),
    ("help", ("train", "evaluate", "sample", "layout", "plan"), None),
    ("Trian", ("train", "evaluate"), "train"),
    ("", ("train",), None),
    ("train", (), None),
  ],
)
def test_a_suggestion_is_what_was_meant_or_none(name, known, meant):
  assert suggest.closest(name, known) == meant
  hint = suggest.nearest(name, known)
  assert hint == (f"; did you mean {meant!r}?" if meant else "")


def test_what_something_is_called_elsewhere_names_keys_that_are_there():
  theirs = [word for words in suggest.ELSEWHERE.values() for word in words.split()]
  assert len(theirs) == len({*theirs})
  assert {key for key in suggest.ELSEWHERE if "." in key} <= {*KEYS}
  lasts = {key.rpartition(".")[2] for key in KEYS}
  assert {*theirs} & lasts == {"batch", "dropout"}  # of axis tables and of LoRA
  nanogpt = "n_layer n_head n_embd block_size dropout bias batch_size max_iters lr_decay_iters"
  nanogpt += " min_lr beta1 beta2 grad_clip warmup_iters eval_interval eval_iters log_interval"
  assert [word for word in nanogpt.split() if not suggest.elsewhere(word)] == []


def test_there_is_one_function_that_suggests():
  # Each place with a cutoff of its own ends in another absurd suggestion.
  ours = (path.relative_to(ROOT) for path in ROOT.rglob("*.py"))
  ours = [p for p in ours if p.parts[0] != "tests" and not p.parts[0].startswith(".")]
  rates = re.compile(r"get_close_matches|\.(quick_|real_quick_)?ratio\(\)")
  found = [path.as_posix() for path in ours if rates.search((ROOT / path).read_text())]
  assert found == ["runtime/suggest.py"]
  assert importlib.util.find_spec("runtime.suggest")
