"""Starts the process that makes a plan, with what the compiler for TPUs wants to be told."""

import os
import pathlib
import pickle
import subprocess
import sys
import tempfile

from etils import epath
from ml_collections import ConfigDict

from planning.hardware import overridden
from planning.topologies import parse
from training.reporting import replace_text

ROOT = pathlib.Path(__file__).resolve().parents[1]
# No TPU is looked for, and several compilers may be loaded at once.
ENVIRONMENT = {
  "JAX_PLATFORMS": "cpu",
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_ACCELERATOR_TYPE": "v5p-8",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def run(config: ConfigDict, topology: str, workdir: epath.Path, *, debug: bool) -> int:
  """Prints the plan, writes plan.json, and returns 0 (fits), 3 (does not), or 1 (failed).

  Raises:
    ValueError: what is asked for cannot be; nothing has been written.
    OSError: the workdir cannot be written to.
  """
  parse(topology, overridden(config.planning.constants)[0])  # before anything is waited for
  with tempfile.TemporaryDirectory() as folder:
    refusal, answer, said = (pathlib.Path(folder, name) for name in ("refusal", "json", "stderr"))
    request = {"config": config, "topology": topology, "debug": debug}
    request |= {"refusal": str(refusal), "json": str(answer)}
    with said.open("wb") as errors:
      done = subprocess.run(
        [sys.executable, "-m", "planning.worker"],
        input=pickle.dumps(request),
        stderr=None if debug else errors,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        check=False,
      )
    if done.returncode == 2:
      raise ValueError(refusal.read_text())
    if done.returncode not in (0, 3):
      sys.stderr.write(said.read_text(errors="replace"))
      return 1
    workdir.mkdir(parents=True, exist_ok=True)
    replace_text(workdir / "plan.json", answer.read_text())
  return done.returncode
