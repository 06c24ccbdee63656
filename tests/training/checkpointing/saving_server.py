"""Saves steps without end, each time in a fork of a process that has imported everything.

Reads a folder per line from standard input, starts a fork that saves there, and answers with its
process id. The fork writes a line to standard output as each save begins, until it is killed.
"""

import os
import sys

import jax

jax.config.update("jax_num_cpu_devices", 8)

from tests.training.checkpointing.states import CONFIG, RECORD, counting_tree  # noqa: E402
from training.checkpointing.checkpointer import Checkpointer  # noqa: E402


def save_without_end(folder: str) -> None:
  """Saves the steps after the newest, every state donated to the next."""
  add = jax.jit(lambda tree: jax.tree.map(lambda x: x + x.dtype.type(1), tree), donate_argnums=0)
  with Checkpointer(folder, keep=2, keep_every_steps=5) as checkpointer:
    step = max(checkpointer.steps(), default=0) + 1
    tree = counting_tree(step)
    while True:
      os.write(1, b"saving\n")
      checkpointer.save(step, tree, config=CONFIG, record=RECORD)
      tree, step = add(tree), step + 1


if __name__ == "__main__":
  for line in sys.stdin:
    child = os.fork()
    if child == 0:
      save_without_end(line.strip())
    os.write(1, f"{child}\n".encode())
    os.waitpid(child, 0)
