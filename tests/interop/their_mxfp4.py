"""Decodes MXFP4 with `transformers`; run by the Python of an environment that has it.

  PYTHON their_mxfp4.py FOLDER

FOLDER has given.npz (blocks, scales); decoded.npy gets the values in float32.
"""

import pathlib
import sys

import numpy as np
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

if __name__ == "__main__":
  folder = pathlib.Path(sys.argv[1])
  given = np.load(folder / "given.npz")
  arrays = (torch.from_numpy(given[name]) for name in ("blocks", "scales"))
  np.save(folder / "decoded.npy", convert_moe_packed_tensors(*arrays).float().numpy())
