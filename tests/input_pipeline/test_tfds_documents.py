"""From a TFDS data set to rows, by a shard of the store."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from etils import epath

from input_pipeline import row_source, store, tfds
from input_pipeline.catalog import Reference
from tests.input_pipeline.damage import shard_of

_ROOT = pathlib.Path(__file__).parents[2]


def _stream(source):
  """Puts the rows back together, each token once; checks that neighbours overlap by one."""
  rows = source.read(np.arange(len(source)))
  tokens, targets, weights = rows["tokens"], rows["targets"], rows["weights"]
  there = weights.ravel() == 1
  assert (np.diff(there.astype(int)) <= 0).all(), "padding stands only at the very end"
  stream = np.append(tokens.ravel()[there], targets.ravel()[there][-1])
  np.testing.assert_array_equal(targets.ravel()[there], stream[1:])
  assert not tokens.ravel()[~there][1:].any()
  return stream.astype(np.uint8).tobytes()


@pytest.mark.parametrize("length", [1, 7, 99, 500])
def test_text_rows_rebuild_the_documents(config, tiny_text, data_dir, length):
  source = row_source.open_source(config(tiny_text, sequence_length=length), "train", seed=0)
  builder = tfds.load_builder(Reference(tiny_text, "", ""), data_dir)
  documents = [item.value["body"] for item in tfds.examples(builder, "train")]
  stream = b"".join(document + b"\0" for document in documents)
  assert _stream(source) == stream
  assert len(source) == -(-(len(stream) - 1) // length)
  assert source.fields["tokens"] == ((length,), np.dtype(np.int32))


def test_images_by_name_and_folder(config, tiny_images):
  data = config(tiny_images, "image", input_size=15, target_size=4)
  source = row_source.open_source(data, "train", seed=0)
  assert source.name == "tiny_images/small:1.2.0 train"
  assert len(source) == 11
  rows = source.read(np.array([10, 0, 3]))
  assert {f: (a.shape[1:], a.dtype) for f, a in rows.items()} == source.fields
  pixels = np.random.default_rng(0).integers(0, 256, (11, 15), np.uint8)
  everything = source.read(np.arange(11))
  # TFDS stores examples in an order of its own: each of them is there once, with its label.
  found = [int(np.flatnonzero((pixels == row).all(1))[0]) for row in everything["inputs"] * 255]
  assert sorted(found) == list(range(11))
  np.testing.assert_array_equal(everything["targets"], np.array(found) % 4)
  np.testing.assert_array_equal(rows["inputs"], everything["inputs"][[10, 0, 3]])
  np.testing.assert_array_equal(everything["weights"], 1)


def test_an_integer_can_be_named_as_the_label(config, tiny_images):
  data = config(tiny_images, "image", input_size=15, target_size=2001, label_feature="year")
  targets = row_source.open_source(data, "train", seed=0).read(np.arange(11))["targets"]
  assert sorted(targets.tolist()) == list(range(1990, 2001))


def test_a_slice_of_a_split_is_a_split(config, tiny_images):
  data = config(tiny_images, "image", input_size=15, target_size=4)
  whole, first, rest = (
    row_source.open_source(data, split, seed=0) for split in ("train", "train[:4]", "train[4:]")
  )
  assert (len(first), len(rest)) == (4, 7)
  inputs = [s.read(np.arange(len(s)))["inputs"] for s in (whole, first, rest)]
  np.testing.assert_array_equal(inputs[0], np.concatenate(inputs[1:]))
  assert len({s.fingerprint for s in (whole, first, rest)}) == 3


def test_a_store_is_reused_without_tfds(config):
  data = config("python_source", sequence_length=101)
  fingerprint = row_source.open_source(data, "test", seed=0).fingerprint
  program = (
    "import sys, ml_collections\n"
    "from input_pipeline import row_source\n"
    f"data = ml_collections.ConfigDict({data.to_dict()!r})\n"
    "print(row_source.open_source(data, 'test', 0).fingerprint)\n"
    "print(sorted({'tensorflow_datasets', 'sklearn'} & set(sys.modules)))\n"
  )
  assert _run(program).communicate()[0].split("\n")[:2] == [fingerprint, "[]"]


def test_a_folder_without_manifest_is_prepared_again(config, tiny_text):
  data = config(tiny_text, packing="none")
  folder = shard_of(data)
  digest = store.Shard.open(epath.Path(folder)).digest
  (folder / store.MANIFEST).unlink()
  left_over = folder.parent / f"{folder.name}.dead.tmp"
  left_over.mkdir()
  assert store.Shard.open(epath.Path(shard_of(data))).digest == digest
  assert not left_over.exists()


@pytest.mark.parametrize("facts", [{"shape": [3, 4, 1]}, {"shape": "x"}, {"labels": [3, 0]}])
def test_a_shard_that_describes_other_images_is_refused(config, tiny_images, facts):
  data = config(tiny_images, "image", input_size=15, target_size=4)
  path = shard_of(data) / store.MANIFEST
  content = path.read_text()
  path.write_text(json.dumps(json.loads(content) | facts))
  try:
    with pytest.raises(ValueError, match=r"shard.json cannot be read .*; delete .* and run again"):
      row_source.open_source(data, "train", seed=0)
  finally:
    path.write_text(content)


def _run(program):
  return subprocess.Popen(
    [sys.executable, "-c", program],
    stdout=subprocess.PIPE,
    text=True,
    env=os.environ | {"PYTHONPATH": str(_ROOT), "JAX_PLATFORMS": "cpu"},
  )
