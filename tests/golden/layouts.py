"""Golden layout tables: the shipped recipes under the main strategies, at their shipped sizes.

  python -m tests.golden.layouts --write

writes tests/golden/layout/RECIPE-STRATEGY.txt, what `layout` prints for a CPU, without compiling
anything. `test_layouts.py` compares. A change of a rule, a table, a parameter's name or a recipe's
size shows there as a diff of the layouts: read it before it is written.
"""

import importlib
import pathlib
import sys

from configs.schema import finalize, validate
from reports.layout_text import job_text
from runtime import devices
from runtime.devices import Devices
from training.setup import prepare

FOLDER = pathlib.Path(__file__).parent / "layout"
COMMAND = "python -m tests.golden.layouts --write"

RECIPES = ("lm", "mlp", "mlp_tutorial")
# Name -> file of configs/, and what is set beside it.
STRATEGIES = {
  **{name: (name, {}) for name in ("dp8", "fsdp8", "tp8", "dp4_tp2", "dp2_fsdp2_tp2")},
  "data4_fsdp2": ("single", {"mesh.data": 4, "mesh.fsdp": 2}),
}
# Tables that only the language model is tried with.
MORE = {
  "lm-dp8-zero_1": ("dp8", {"partitioning.optimizer.model": ("fsdp", "data")}),
  "lm-dp4_tp2-sequence_parallel": ("dp4_tp2", {"partitioning.sequence_parallel": True}),
}
CASES = {
  f"{recipe}-{name}": (recipe, *case) for recipe in RECIPES for name, case in STRATEGIES.items()
}
CASES.update({name: ("lm", *case) for name, case in MORE.items()})


def text(case: str) -> str:
  """Returns the layout of one of `CASES`."""
  recipe, strategy, overrides = CASES[case]
  config = importlib.import_module(f"configs.{strategy}").get_config(recipe)
  # The memory of this machine must not decide.
  for key, value in {"memory_limit_gib": 1024.0, **overrides}.items():
    config.update_from_flattened_dict({key: value})
  config = finalize.finalize(config, "cpu")
  sizes = config.mesh.to_dict()
  validate.check(config, sizes)
  return job_text(prepare(config, Devices("cpu", True, sizes))) + "\n"


def main() -> None:
  """Writes the files, with --write; else says which differ."""
  devices.start({"data": 8}, simulate=True)
  wanted = {FOLDER / f"{case}.txt": text(case) for case in CASES}
  found = {path: path.read_text() for path in FOLDER.glob("*.txt")}
  for path in sorted(wanted.keys() | found.keys()):
    if wanted.get(path) == found.get(path):
      continue
    print(path.name, "differs" if path in wanted else "is no case")
    if "--write" in sys.argv[1:]:
      FOLDER.mkdir(exist_ok=True)
      path.write_text(wanted[path]) if path in wanted else path.unlink()


if __name__ == "__main__":
  main()
