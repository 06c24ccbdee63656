"""Rows that are cut into shorter ones, for `data.sequence_length_ramp`."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from input_pipeline.source import Source


def cut(source: Source, pieces: int) -> Source:
  """Returns a source of which each row is one of `pieces` equal parts of a row, in their order.

  Row n is part n % pieces of row n // pieces. Documents are numbered from 0 within it.

  Args:
    source: whose fields all have the tokens as the first dim of a row.
    pieces: divides the tokens of a row.
  """
  fields = {
    name: ((shape[0] // pieces, *shape[1:]), dtype)
    for name, (shape, dtype) in source.fields.items()
  }

  def read(numbers: Sequence[int]) -> dict[str, np.ndarray]:
    rows, parts = np.divmod(np.asarray(numbers, np.int64), pieces)
    needed, place = np.unique(rows, return_inverse=True)
    found = {}
    for name, array in source.read(needed).items():
      divided = array.reshape(len(needed), pieces, -1, *array.shape[2:])
      found[name] = divided[place, parts]
    if "segments" in found:
      found["segments"] = found["segments"] - found["segments"][:, :1]
    return found

  # Bad rows stay those of the source: which rows a step takes is decided by their numbers there.
  return dataclasses.replace(
    source,
    rows=pieces * len(source),
    fields=fields,
    read=read,
    origins=lambda number: source.origins(number // pieces),
  )
