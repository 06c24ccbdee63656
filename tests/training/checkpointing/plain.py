"""The arrays of a checkpoint, read without the project, as docs/checkpoints.md says."""

import pathlib

import numpy as np
import tensorstore as ts


def arrays(step: pathlib.Path) -> dict[str, np.ndarray]:
  """Returns name -> array of a step's folder."""
  state = {"driver": "ocdbt", "base": f"file://{(step / 'state').resolve()}"}
  keys = [key.decode() for key in ts.KvStore.open(state).result().list().result()]
  names = [key.removesuffix("/.zarray") for key in keys if key.endswith("/.zarray")]
  spec = {"driver": "zarr", "kvstore": state}
  return {name: ts.open({**spec, "path": name}).result().read().result() for name in names}
