"""main.py, but rows of the training split weigh nothing by construction: what to compare with.

The rows are read like any other; WEIGHTLESS holds their numbers, as JSON.
"""

import dataclasses
import json
import os
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent))

from input_pipeline import row_source

open_source = row_source.open_source
weightless = np.array(json.loads(os.environ["WEIGHTLESS"]), np.int64)


def opened(data, split, *more):
  """Opens a split as sources.open_source does."""
  source = open_source(data, split, *more)
  if split != data.train_split:
    return source

  def read(indices):
    rows = source.read(indices)
    rows["weights"][np.isin(indices, weightless)] = 0
    return rows

  return dataclasses.replace(source, read=read)


row_source.open_source = opened  # before anything imports it by its name

from absl import app  # noqa: E402

import main  # noqa: E402

if __name__ == "__main__":
  app.run(main.main, flags_parser=main.parse_flags)
