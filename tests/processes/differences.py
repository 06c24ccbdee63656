"""What one of two processes may have otherwise, and what is said of it."""

import dataclasses
import importlib.metadata
import os
import pathlib
import shutil
from collections.abc import Callable, Sequence
from typing import Any

from tests.processes.command_lines import MLP
from tests.processes.starting import ROOT, Ended

REFUSED_SECONDS = 15  # where each process has a processor


@dataclasses.dataclass(frozen=True)
class Kind:
  """A difference.

  Attributes:
    said: key -> the value of the others and that of the one, as they are printed; None where only
      the key is known beforehand. WORKDIR stands for the workdir.
    more: further arguments of the one.
    variables: of the one.
    makes: from a folder to what else `start` needs for the one: `variables` or `tree`.
  """

  said: dict[str, tuple[str, str] | None]
  more: tuple[str, ...] = ()
  variables: dict[str, str] = dataclasses.field(default_factory=dict)
  makes: Callable[[pathlib.Path], dict[str, Any]] | None = None


def other_code(changed: str) -> Kind:
  """Returns the kind that has another byte in a file of the project."""

  def tree(folder: pathlib.Path) -> dict[str, Any]:
    ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", "tests", "runs", ".*_cache")
    shutil.copytree(ROOT, folder / "tree", ignore=ignored)
    with (folder / "tree" / changed).open("a") as file:
      file.write("# changed\n")
    return {"tree": folder / "tree"}

  return Kind({"code": None}, makes=tree)


def other_library(name: str) -> Kind:
  """Returns the kind for which another version of a library is installed, as its metadata says."""

  def variables(folder: pathlib.Path) -> dict[str, Any]:
    site = folder / "site" / f"{name.replace('-', '_')}-0.0.7.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.0.7\n")
    return {"variables": {"PYTHONPATH": str(site.parent)}}

  real = importlib.metadata.version(name)
  return Kind({f"versions.{name}": (f'"{real}"', '"0.0.7"')}, makes=variables)


def _other_rows(folder: pathlib.Path) -> dict[str, Any]:
  """Makes another `digits` of the same version, as another release of scikit-learn makes it."""
  data, default = folder / "data", "~/tensorflow_datasets"
  real = pathlib.Path(os.environ.get("TFDS_DATA_DIR", default)).expanduser()
  [kind] = (real / "prepared" / "text").glob("bytes-image-label-*")
  shutil.copytree(
    kind, data / "prepared" / "text" / kind.name, ignore=shutil.ignore_patterns("*.lock")
  )
  for manifest in data.glob("prepared/text/*/digits-*/shard.json"):
    text = manifest.read_text()
    digest = text.split('"digest": "')[1][:64]
    manifest.write_text(text.replace(digest, digest[::-1]))
  return {"variables": {"TFDS_DATA_DIR": str(data)}}


KINDS = {
  # ------------------------------ those of the plan ------------------------------
  "batch shape": Kind(
    {"config.data.global_batch_size": ("12", "24")}, ("--config.data.global_batch_size=24",)
  ),
  "config key": Kind(
    {"config.optimizer.learning_rate": ("null", "0.5")}, ("--config.optimizer.learning_rate=0.5",)
  ),
  "dtype": Kind(
    {"config.training.compute_dtype": ("null", '"bfloat16"')},
    ("--config.training.compute_dtype=bfloat16",),
  ),
  "seed": Kind({"config.seed": ("0", "7")}, ("--config.seed=7",)),
  "code of a model": other_code("models/mlp.py"),
  "mesh": Kind(
    {"config.mesh.data": ("4", "2"), "config.mesh.tensor": ("1", "2")},
    ("--config.mesh.data=2", "--config.mesh.tensor=2"),
  ),
  "library: optax": other_library("optax"),
  "rows of the data": Kind({"data, train": None}, makes=_other_rows),
  "workdir by name": Kind(
    {"workdir": ('"WORKDIR"', '"WORKDIR/other"')}, ("--workdir=WORKDIR/other",)
  ),
  "the compiler's flags": Kind(
    {"XLA_FLAGS": None}, variables={"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}
  ),
  # ------------------------------ others ------------------------------
  "table": Kind(
    {"config.partitioning.parameters.model": ('["fsdp"]', "[]")},
    ("--config.partitioning.parameters.model=()",),
  ),
  "flag": Kind({"accept_changes": ("[]", '["seed"]')}, ("--accept_changes=seed",)),
  "JAX's flags": Kind({"JAX_ENABLE_X64": None}, variables={"JAX_ENABLE_X64": "1"}),
  "verb": Kind({"verb": ('"train"', '"evaluate"')}, ("evaluate",)),
  "split of the data": Kind(
    {"config.data.train_split": ('"train"', '"train[:50%]"')},
    ("--config.data.train_split=train[:50%]",),
  ),
  "code of the checkpoints": other_code("training/checkpointing/checkpointer.py"),
  "code of the processes": other_code("processes/coordination.py"),
  "library: grain": other_library("grain"),
  "library: array-record": other_library("array-record"),
}


def tried(start, kind: Kind, folder: pathlib.Path, one: int = 1) -> list[Ended]:
  """Starts two processes that differ so, and checks that both refuse, and why.

  Args:
    start: as `starting.start`.
    kind: the difference.
    folder: an empty one, for what it takes.
    one: the process that has it, 0 or 1.
  """
  workdir, made = folder / "run", kind.makes(folder) if kind.makes else {}
  ended = start(
    2,
    *MLP,
    f"--workdir={workdir}",
    more={one: [argument.replace("WORKDIR", str(workdir)) for argument in kind.more]},
    environments={one: {**kind.variables, **made.get("variables", {})}},
    **({"trees": {one: made["tree"]}} if "tree" in made else {}),
  )
  check(ended, [text.replace("WORKDIR", str(workdir)) for text in _texts(kind, one)], workdir)
  return ended


def _texts(kind: Kind, one: int) -> list[str]:
  texts = [" on process 0; "]
  for key, values in kind.said.items():
    if values is None:
      texts.append(f"{key}: ")
      continue
    first, second = values if one == 1 else values[::-1]
    texts.append(f"{key}: {first} on process 0; {second} on process 1")
  return texts


def check(ended: Sequence[Ended], texts: Sequence[str], workdir: pathlib.Path) -> None:
  """Checks a refusal: by all, in time, with these texts, and with nothing changed."""
  assert [process.code for process in ended] == [2, 2], ended
  said = "".join(process.err for process in ended)
  assert "Traceback" not in said
  for text in texts:
    assert text in said, f"{text!r} is not said: {said}"
  assert not workdir.exists()
  seconds = max(process.seconds for process in ended)
  share = min(1.0, os.cpu_count() / max(1.0, os.getloadavg()[0]))
  assert share * seconds < REFUSED_SECONDS, f"{seconds:.1f} s, with {share:.2f} of a processor"
