"""Arrays in the memory of another process, found by what they hold, and bits of them flipped.

A simulated device keeps an array in one piece, and a step mostly updates it in place. Other memory
may hold the same, left over from a save or for the time of a step. The process knows nothing of it.
"""

import contextlib
import os
import pathlib
import signal
from collections.abc import Iterator

import numpy as np
import tensorstore as ts

PIECE_BYTES = 2**26
# How far an element may have gone since it was saved; and the largest, in units in the last place.
DRIFT, DRIFT_PLACES = 1e-3, 2**17


def saved_array(checkpoint: pathlib.Path, name: str) -> np.ndarray:
  """Returns an array of a checkpoint, read without the project."""
  state = {"driver": "ocdbt", "base": f"file://{(checkpoint / 'state').resolve()}"}
  return ts.open({"driver": "zarr", "kvstore": state, "path": name}).result().read().result()


def copies(pid: int, array: np.ndarray) -> list[int]:
  """Returns the addresses at which a process holds a float32 array, nearly as it was saved."""
  wanted = np.ascontiguousarray(array, np.float32).reshape(-1)
  largest = int(np.abs(wanted).argmax())
  looked_for = wanted.view(np.uint32)[largest] - np.uint32(DRIFT_PLACES)
  found = []
  for start, content in _memory(pid, wanted.nbytes):
    words = np.frombuffer(content[: len(content) // 4 * 4], np.uint32)
    beginnings = max(0, words.size - wanted.size + 1)
    likely = words[largest : largest + beginnings] - looked_for <= 2 * DRIFT_PLACES
    for index in np.flatnonzero(likely):
      if near(words[index : index + wanted.size].tobytes(), wanted):
        found.append(start + 4 * int(index))
  return found


def near(content: bytes, array: np.ndarray) -> bool:
  """Tells whether bytes are a float32 array, nearly as it was saved."""
  return np.allclose(np.frombuffer(content, np.float32), array.reshape(-1), rtol=0, atol=DRIFT)


def _memory(pid: int, overlap: int) -> Iterator[tuple[int, bytes]]:
  """Yields (address, content) of what a process can write and no file holds, in pieces."""
  regions = []
  for line in pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines():
    ends, permissions, _, _, inode, *name = line.split()
    if permissions.startswith("rw") and inode == "0" and not (name and name[0].startswith("[v")):
      regions.append([int(end, 16) for end in ends.split("-")])
  with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
    for start, end in regions:
      for piece in range(start, end, PIECE_BYTES):
        with contextlib.suppress(OSError):  # given back meanwhile
          memory.seek(piece)
          yield piece, memory.read(min(PIECE_BYTES + overlap, end - piece))


def flip(pid: int, address: int, bit: int) -> None:
  """Flips a bit of a word of 32 bits; the process stands still meanwhile."""
  os.kill(pid, signal.SIGSTOP)
  try:
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
      memory.seek(address + bit // 8)
      [byte] = memory.read(1)
      memory.seek(address + bit // 8)
      memory.write(bytes([byte ^ 1 << bit % 8]))
  finally:
    os.kill(pid, signal.SIGCONT)


def read(pid: int, address: int, size: int) -> bytes:
  """Returns what a process holds at an address."""
  with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
    memory.seek(address)
    return memory.read(size)
