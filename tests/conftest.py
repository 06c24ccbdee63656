"""Eight simulated CPU devices for every test, strict promotion, one compilation cache."""

import gc
import os
import pathlib
import tempfile
from collections.abc import Iterator

DEVICES = 8
gc.disable()  # until the tests are collected: what is imported stays

# Before anything imports jax: XLA reads NPROC when its backend starts. With fewer threads than
# devices that wait for one another, collectives on simulated devices deadlock.
os.environ["NPROC"] = str(4 * DEVICES)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as `runtime.devices` does, and why
# Instructions that name their lines of Python take a tenth of the time to trace and compile.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

from tests.helpers.compiling import OPTIONS  # noqa: E402

# For what is compiled here without a config. XLA reads it when its backend starts.
FLAGS = os.environ.get("XLA_FLAGS")
OURS = [f"--{name}={value}" for name, value in OPTIONS.items()]
os.environ["XLA_FLAGS"] = " ".join([*OURS, FLAGS or ""])

import jaxtyping  # noqa: E402

# Shapes in the models' signatures are checked while some of the tests run; see `_shapes`.
HOOK = jaxtyping.install_import_hook("models", "beartype.beartype")

import jax  # noqa: E402
import pytest  # noqa: E402

from tests.helpers.forks import Forks  # noqa: E402

jax.config.update("jax_num_cpu_devices", DEVICES)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.devices()
if FLAGS is None:  # what tests start finds the variable as it was
  del os.environ["XLA_FLAGS"]
else:
  os.environ["XLA_FLAGS"] = FLAGS
CACHE = pathlib.Path(tempfile.gettempdir()) / f"meshwright-tests-{os.getuid()}"
jax.config.update("jax_compilation_cache_dir", str(CACHE / "compilation"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)

# Data sets are prepared once, for all workers and runs on this machine.
os.environ.setdefault("TFDS_DATA_DIR", str(CACHE / "data"))


@pytest.fixture(scope="session", autouse=True)
def _eight_devices() -> None:
  """Too few devices is a failure, not a skip."""
  assert jax.device_count() == DEVICES, jax.devices()


ROOT = pathlib.Path(__file__).parent.parent
# Tests that call every function of the models, on one device and on meshes. In the others the
# check, a tenth of the time of a trace, would only repeat.
CHECK_SHAPES = ("models/", "inference/")


@pytest.fixture(scope="module", autouse=True)
def _shapes(request: pytest.FixtureRequest) -> None:
  """Checks the shapes in the models' signatures, in the tests of `CHECK_SHAPES`."""
  path = request.path.relative_to(ROOT / "tests").as_posix()
  jaxtyping.config.update("jaxtyping_disable", not path.startswith(CHECK_SHAPES))


# Files whose tests take long one by one: begun last, they would leave a worker alone with them.
LONG = (
  "faults/",
  "integration/",
  "processes/",
  "training/checkpointing/",
  "partitioning/parallel/",
)


def pytest_collection_modifyitems(items: list) -> None:
  """Puts the files with long tests first; `make test` keeps the order."""
  tests = ROOT / "tests"

  def place(item) -> int:
    path = item.path.relative_to(tests).as_posix()
    return next((i for i, long in enumerate(LONG) if path.startswith(long)), len(LONG))

  items.sort(key=place)


def pytest_collection_finish() -> None:
  """Leaves what was imported out of garbage collection, and collects less often.

  Tracing makes many objects and few cycles: by default it spends a seventh of its time on them.
  """
  gc.freeze()
  gc.set_threshold(20_000, 20, 20)
  gc.enable()


@pytest.fixture
def lines_of_python() -> Iterator[None]:
  """Has instructions name their lines of Python, as in a run."""
  limit = jax.config.jax_traceback_in_locations_limit
  jax.config.update("jax_traceback_in_locations_limit", 100)
  yield
  jax.config.update("jax_traceback_in_locations_limit", limit)


@pytest.fixture(scope="session")
def forks():
  """Returns what starts processes of the application without importing it again."""
  with Forks() as started:
    yield started


@pytest.fixture(scope="session")
def main(forks, tmp_path_factory):
  """Returns a function from arguments to (exit code, standard output, standard error)."""
  environment = {key: value for key, value in os.environ.items() if key != "NPROC"}
  folder = tmp_path_factory.mktemp("main")

  def run(*arguments: str) -> tuple[int, str, str]:
    out, err = folder / "out", folder / "err"
    for file in (out, err):
      file.unlink(missing_ok=True)
    code = forks.start(["main.py", *arguments], out=out, err=err, environment=environment).wait()
    return code, *(file.read_bytes().decode(errors="surrogateescape") for file in (out, err))

  return run
