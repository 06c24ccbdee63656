r"""Everything worth measuring on one GPU in one command, most informative first.

  python -m benchmarks.gpu_report [--minutes=9] [--out=gpu_report] [--torch_python=PYTHON]
    [--gpu_parts=device,...] [--small]

Each part is a process of its own with a limit of its own; results.json and index.html in --out are
written again after every part, so that a cut loses nothing. A part that fails or runs out of time
is reported as such, and the exit code is 1. `--small` shrinks all of it for a CPU: it shows that
the command works, and says nothing about speed.

  device     device, driver, versions
  whole_run  a run as people start it, with evaluations, checkpoints and TensorBoard's file
  gpt2_124m  train step beside torch.compile in bfloat16 (benchmarks/gpu.py)
  llama_1b   likewise
  plan       the predicted step and memory of llama_1b, to hold beside what was measured
  matmuls    TFLOP/s of matmuls by shape and dtype, for the planner's constants
  attention  forward and backward of each kernel over lengths and sizes of heads
  variants   both models with other keys and compiler options, 8-bit matmuls among them
  resume     a run from step 3 again: the same losses to the bit?
  start      seconds to the first step, with a cold and a warm compilation cache
  compare    two microbatches beside one, in float64
"""

import contextlib
import functools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jinja2
from absl import app, flags

from benchmarks import gpu, timing

ROOT = pathlib.Path(__file__).parents[1]
_MINUTES = flags.DEFINE_float("minutes", 9.0, "For all parts together.", 0.1)
_OUT = flags.DEFINE_string("out", "gpu_report", "Folder of results.json and index.html.")
_PARTS = flags.DEFINE_list("gpu_parts", None, "Of PARTS; by default all.")
_PART = flags.DEFINE_string("gpu_part", None, "Runs this part in this process, and prints JSON.")
SMALL = flags.FLAGS["small"]

MODEL = "configs/single.py:model=gpt2_124m,data=python_source"
RUN = ("--config.metrics.report=false", "--config.metrics.tensorboard=false")
SHRUNK = (
  *("--config.model.layers=2", "--config.model.model_size=64", "--config.model.heads=2"),
  *(
    "--config.model.kv_heads=2",
    "--config.model.head_size=32",
    "--config.model.feedforward_size=96",
  ),
  *("--config.data.sequence_length=64", "--config.model.max_positions=64"),
  *("--config.model.vocabulary_size=512", "--config.data.global_batch_size=4"),
)


def application(*words: str) -> list[str]:
  """Returns the command of the application for the small decoder of the parts."""
  return [sys.executable, "main.py", *words, *(SHRUNK if SMALL.value else ())]


def run(command: Sequence[str]) -> str:
  """Returns what a command prints; raises RuntimeError with its last lines where it fails."""
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  if done.returncode:
    raise RuntimeError(
      f"{' '.join(command)}: {done.returncode}\n{(done.stdout + done.stderr)[-2000:]}"
    )
  return done.stdout


# ------------------------------ parts in a process of their own ------------------------------


def device() -> dict[str, Any]:
  """Returns what is measured on."""
  import importlib.metadata

  import jax

  one = jax.devices()[0]
  smi = shutil.which("nvidia-smi")
  driver = "--query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit"
  return {
    "device": one.device_kind,
    "platform": one.platform,
    "nvidia-smi": run([smi, driver, "--format=csv,noheader"]).strip() if smi else "",
    "cores": os.cpu_count(),
    **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")},
  }


def shapes_of_matmuls() -> list[tuple[str, tuple[int, int, int]]]:
  """Returns what each is and (rows, inputs, outputs) of the matmuls of both models."""
  if SMALL.value:
    return [("square", (128, 128, 128)), ("mlp", (128, 64, 256))]
  square = [("square", (n, n, n)) for n in (2048, 4096, 8192)]
  llama = [
    ("llama_1b gate", (16_384, 2048, 8192)),
    ("llama_1b down", (16_384, 8192, 2048)),
    ("llama_1b query", (16_384, 2048, 2048)),
    ("llama_1b key", (16_384, 2048, 512)),
    ("llama_1b a chunk of the logits", (16_384, 2048, 8016)),
  ]
  return [
    *(*square, *llama),
    ("gpt2_124m up", (32_768, 768, 3072)),
    ("gpt2_124m query", (32_768, 768, 768)),
    ("gpt2_124m logits", (32_768, 768, 50_304)),
  ]


def matmuls() -> list[dict[str, Any]]:
  """Returns TFLOP/s by shape and dtype: of the forward pass and of both of the backward pass."""
  import jax
  import jax.numpy as jnp

  gpu_there = jax.devices()[0].platform == "gpu"
  found = []
  for name, (m, k, n) in shapes_of_matmuls():
    dims = {"x": (m, k), "w": (k, n), "dy": (m, n)}
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = {
      one: jax.random.normal(key, shape, jnp.bfloat16)
      for key, (one, shape) in zip(keys, dims.items(), strict=True)
    }
    passes = {"x w": (((1,), (0,)), "x", "w")}
    if name != "square":
      passes |= {"xT dy": (((0,), (0,)), "x", "dy"), "dy wT": (((1,), (1,)), "dy", "w")}
    dtypes = ["bfloat16", *(["float8_e4m3fn"] if gpu_there and name == "square" else [])]
    for dtype in dtypes:
      for title, (contracted, a, b) in passes.items():
        row = {"of": name, "shape": f"{m}x{k}x{n}", "dtype": dtype, "matmul": title}
        often = max(1, round(2e13 / (2 * m * k * n))) if not SMALL.value else 1

        def multiply(a, b, contracted=contracted):
          dims = (contracted, ((), ()))
          return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.bfloat16)

        pair = [arrays[one].astype(dtype) for one in (a, b)]
        compiled = jax.jit(multiply)

        def repeated(compiled=compiled, pair=pair, often=often):
          for _ in range(often):
            out = compiled(*pair)
          return out

        try:
          seconds = timing.best_seconds(repeated, 3) / often
        except Exception as error:  # a dtype that the device does not multiply
          found.append({**row, "failed": str(error)[:200]})
          continue
        found.append({**row, "ms": 1e3 * seconds, "tflops": 2 * m * k * n / seconds / 1e12})
  return found


def attention() -> list[dict[str, Any]]:
  """Returns milliseconds of forward and backward of each kernel that the device has."""
  import jax
  import jax.numpy as jnp

  from models import fused_attention
  from models.attention import DEFAULT_TILES
  from partitioning.constraints import activation_layout
  from partitioning.mesh import make_mesh
  from partitioning.mesh_sizes import AXES
  from partitioning.parallel.attention_blocks import Blocks, Scores

  there = jax.devices()[0]
  sizes = (
    [(2, 128, 2, 32)]
    if SMALL.value
    else [
      *((8, 1024, 12, 64), (4, 2048, 32, 64), (2, 4096, 32, 128), (1, 8192, 32, 128)),
      (1, 32_768, 8, 128),
    ]
  )
  found = []
  for rows, length, heads, size in sizes:
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (rows, length, heads, size)
    q, k, v = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys)
    slots_BT = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length))
    scores = Scores(size**-0.5, jnp.float32)
    blocks = Blocks(scores, *DEFAULT_TILES.blockwise, complete=True)
    kernels = {
      "blockwise": lambda q, k, v, slots=slots_BT, how=blocks: fused_attention.attention(
        how, q, k, v, slots
      ),
      "jax.nn xla": lambda q, k, v: jax.nn.dot_product_attention(
        q, k, v, is_causal=True, implementation="xla"
      ),
    }
    if there.platform == "gpu":
      kernels["cudnn"] = lambda q, k, v, slots=slots_BT: fused_attention.cudnn_attention(
        q, k, v, slots
      )
    for name, function in kernels.items():
      row = {"kernel": name, "rows": rows, "tokens": length, "heads": heads, "head size": size}
      scores = 4 * rows * heads * length**2
      if name == "jax.nn xla" and 3 * scores > 40e9:
        continue
      gradients = jax.grad(lambda *x, f=function: jnp.sum(f(*x).astype(jnp.float32)), (0, 1, 2))
      mesh = make_mesh(dict.fromkeys(AXES, 1), [there])
      try:
        with jax.set_mesh(mesh), activation_layout({}, {}):
          arrays = q, k, v
          forward, both = (
            timing.best_seconds(functools.partial(jax.jit(one), *arrays), 5)
            for one in (function, gradients)
          )
      except Exception as error:  # whatever a kernel refuses on this device
        found.append({**row, "failed": f"{type(error).__name__}: {error}"[:200]})
        continue
      flops = 3.5 * 2 * rows * heads * length**2 * size  # the causal half, forward and backward
      found.append(
        {**row, "forward ms": 1e3 * forward, "both ms": 1e3 * both, "tflops": flops / both / 1e12}
      )
  return found


def whole_run() -> dict[str, Any]:
  """Returns what a run says of its steps and evaluations; some of each come between others."""
  with tempfile.TemporaryDirectory() as name:
    words = [f"--config={MODEL}", "--config.training.steps=60", "--config.metrics.every_steps=10"]
    words += ["--config.checkpoint.every_steps=25", "--config.evaluation.every_steps=25"]
    said = run(application(*words, "--config.evaluation.final_steps=2", f"--workdir={name}/run"))
  return {"said": [line for line in said.splitlines() if line.startswith(("step", "evaluation"))]}


def resume() -> dict[str, Any]:
  """Returns whether steps 4 to 6 have the same bits when the run begins at step 3 again."""
  with tempfile.TemporaryDirectory() as name:
    first, again = pathlib.Path(name, "first"), pathlib.Path(name, "again")
    words = [f"--config={MODEL}", "--config.training.steps=6", "--config.checkpoint.every_steps=3"]
    words += ["--config.metrics.every_steps=1", "--config.evaluation.final_steps=1", *RUN]
    run(application(*words, f"--workdir={first}"))
    shutil.copytree(first, again)
    shutil.rmtree(again / "checkpoints" / "6")
    said = run(application(*words, f"--workdir={again}"))

    def numbers(folder: pathlib.Path) -> list[tuple[Any, ...]]:
      lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
      return [(x["step"], x["loss"], x["grad_norm"]) for x in lines if "loss" in x]

    same = numbers(first) == numbers(again) and len(numbers(first)) == 6
  return {"same to the bit": same, "said": [line for line in said.splitlines() if "step 3" in line]}


def start() -> dict[str, Any]:
  """Returns the seconds of a command of two steps, with a cold and a warm compilation cache."""
  found = {}
  with tempfile.TemporaryDirectory() as cache:
    for name in ("cold", "warm"):
      with tempfile.TemporaryDirectory() as workdir:
        words = [f"--config={MODEL}", "--config.training.steps=2", f"--workdir={workdir}/run", *RUN]
        words += [f"--config.compilation_cache_dir={cache}", "--config.evaluation.final_steps=1"]
        began = time.monotonic()
        said = run(application(*words))
        found[f"{name}: whole command, s"] = time.monotonic() - began
        first = [line for line in said.splitlines() if "first step finished" in line]
        found[f"{name}: first step"] = first[-1].strip() if first else ""
  return found


# (model, other keys): what is tried beside what `finalize` chooses, most informative first.
KEPT, CHUNKS, UNROLL = "training.rematerialization", "training.loss_chunks", "training.scan_unroll"
OPTIONS = "compiler_options"
VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
  ("gpt2_124m", {OPTIONS: "xla_gpu_experimental_enable_fusion_autotuner=true"}),
  ("gpt2_124m", {CHUNKS: 4}),
  ("gpt2_124m", {OPTIONS: "xla_gpu_experimental_enable_triton_heroless_priority_fusion=true"}),
  ("llama_1b", {CHUNKS: 4}),
  ("llama_1b", {UNROLL: 4}),
  ("llama_1b", {UNROLL: 1}),
  ("llama_1b", {KEPT: "none"}),
  ("gpt2_124m", {UNROLL: 1}),
  ("llama_1b", {"training.matmul_dtype": "float8"}),
)


def alone(model: str, overrides: dict[str, Any]) -> dict[str, Any]:
  """Returns what our side measures of a model with other keys."""
  told = gpu.job(model, "")
  told["overrides"] = {**told["overrides"], **overrides}
  steps, began = 2 if SMALL.value else 10, time.monotonic()
  side = gpu.Side(told)
  side.run(2)
  compiled = time.monotonic() - began
  runs = [side.run(steps) for _ in range(2)]
  facts = side.facts()
  rate = steps / min(one["seconds"] for one in runs)
  mfu = facts["flops"][0] * rate / facts["peak_flops"] if facts["peak_flops"] else 0
  return {
    "ms": 1e3 / rate,
    "tokens/s": facts["rows"] * facts["sizes"]["length"] * rate,
    "MFU": mfu,
    "loss": runs[-1]["loss"],
    "temporaries GiB": side.temporary_bytes() / 2**30,
    "to the first step, s": compiled,
  }


def variants() -> list[dict[str, Any]]:
  """Returns speeds of our side alone with other keys; each is printed at once."""
  found = []
  for model, keys in VARIANTS:
    row: dict[str, Any] = {"model": model, **keys}
    if SMALL.value:
      keys = {key: min(value, 2) if key == UNROLL else value for key, value in keys.items()}
    try:
      row |= alone(model, keys)
    except Exception as error:  # an option that this compiler does not have, or too little memory
      row["failed"] = f"{type(error).__name__}: {error}"[:300]
    print(" ", json.dumps(row), flush=True)
    found.append(row)
  return found


def plan() -> dict[str, Any]:
  """Returns the predicted step of llama_1b on one of this device."""
  kind = device()["device"].lower()
  chip = next((name for name in ("h200", "h100", "b200", "a100") if name in kind), "h100")
  with tempfile.TemporaryDirectory() as folder:
    overrides = gpu.job("llama_1b", folder)["overrides"]
    values = [f"--config.{key}={value}" for key, value in overrides.items() if value != ()]
    config = "--config=configs/single.py:model=llama3_2_1b,data=python_source"
    words = [config, *values, f"--topology={chip}:1", f"--workdir={folder}/plan"]
    run([sys.executable, "main.py", "plan", *words])
    found = json.loads(pathlib.Path(folder, "plan", "plan.json").read_text())
  kept = ("step_seconds", "peak_bytes_per_device", "mfu", "tokens_per_second_per_device")
  return {"chip": chip, **{key: found[key] for key in kept}}


def compare() -> dict[str, Any]:
  """Returns what `compare` says of two microbatches beside one, in float64."""
  words = ["compare", "--config=configs/single.py", "--against=configs/single.py"]
  said = run([sys.executable, "main.py", *words, "--config.training.gradient_accumulation_steps=2"])
  return {"said": said.splitlines()[-6:]}


OWN = (device, matmuls, attention, whole_run, resume, start, variants, plan, compare)
# In the order in which they run -> the most seconds that they take.
PARTS = {
  **{"device": 30, "whole_run": 90, "gpt2_124m": 170, "llama_1b": 210, "plan": 60, "matmuls": 90},
  **{"attention": 90, "variants": 300, "resume": 90, "start": 90, "compare": 90},
}


def command_of(part: str) -> list[str]:
  """Returns the command that runs a part."""
  small = ["--small"] if SMALL.value else []
  if part not in gpu.MODELS:
    return [sys.executable, "-m", "benchmarks.gpu_report", f"--gpu_part={part}", *small]
  small += ["--notorch_compile"] if SMALL.value else []
  beside = [f"--gpu_models={part}", f"--torch_python={gpu.PYTHON.value}", "--turns=3"]
  beside += [f"--trace={_OUT.value}/trace"]
  return [sys.executable, "-m", "benchmarks.gpu", *beside, *small]


# ------------------------------ the report ------------------------------


def measure(command: list[str], seconds: float) -> dict[str, Any]:
  """Returns what a part prints within a time; its processes end with it."""
  began = time.monotonic()
  process = subprocess.Popen(
    command,
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    start_new_session=True,
  )
  try:
    said, _ = process.communicate(timeout=seconds)
    code: int | str = process.returncode
  except subprocess.TimeoutExpired:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)
    said, _ = process.communicate()
    code = f"cut after {seconds:.0f} s"
  lines = said.splitlines()
  whole = code == 0 and lines and lines[-1].startswith(("{", "["))
  found = json.loads(lines.pop()) if whole else None
  return {
    "command": " ".join(command[1:]),
    "exit": code,
    "seconds": time.monotonic() - began,
    "result": found,
    "text": lines[-40:],
  }


PAGE = """<!doctype html><meta charset="utf-8"><title>One GPU, measured</title><style>
body { font: 15px/1.5 system-ui; max-width: 60em; margin: 2em auto; padding: 0 1em }
td, th { padding: .1em .8em; text-align: right } pre { overflow-x: auto }
</style><h1>One GPU, measured</h1>
{% for name, one in results.items() %}<h2>{{ name }}</h2>
<p>{{ one.command }}: exit {{ one.exit }}, {{ "%.0f" % one.seconds }} s</p>
{% if one.result is mapping %}<pre>{{ one.result | tojson(2) }}</pre>{% elif one.result %}<table>
<tr>{% for title in one.titles %}<th>{{ title }}</th>{% endfor %}</tr>
{% for row in one.result %}<tr>{% for title in one.titles %}<td>{{ row[title] | cell }}</td>
{% endfor %}</tr>{% endfor %}</table>{% endif %}
{% if one.text %}<pre>{{ one.text | join("\n") }}</pre>{% endif %}{% endfor %}
"""


def write(folder: pathlib.Path, results: dict[str, dict[str, Any]]) -> None:
  """Writes results.json and index.html."""
  (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")
  environment = jinja2.Environment(autoescape=True)
  environment.filters["cell"] = number
  shown = {
    name: {**one, "titles": list(dict.fromkeys(key for row in one["result"] for key in row))}
    if isinstance(one["result"], list)
    else one
    for name, one in results.items()
  }
  (folder / "index.html").write_text(environment.from_string(PAGE).render(results=shown))


def number(value: Any) -> str:
  """Returns a cell's text."""
  return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(argv: list[str]) -> int:
  """Runs the parts; returns the exit code."""
  del argv
  if _PART.value:
    part = next((one for one in OWN if one.__name__ == _PART.value), None)
    if part is None:
      raise app.UsageError(
        f"--gpu_part={_PART.value}: one of {', '.join(one.__name__ for one in OWN)}"
      )
    print(json.dumps(part()), flush=True)
    return 0
  wanted = _PARTS.value or [*PARTS]
  if unknown := [name for name in wanted if name not in PARTS]:
    raise app.UsageError(f"--gpu_parts={unknown[0]}: one of {', '.join(PARTS)}")
  folder = pathlib.Path(_OUT.value)
  folder.mkdir(parents=True, exist_ok=True)
  until, results = time.monotonic() + 60 * _MINUTES.value, {}
  for name in wanted:
    left = until - time.monotonic()
    if left < 5:
      print(f"{name}: no time left", flush=True)
      break
    results[name] = measure(command_of(name), min(PARTS[name], left))
    write(folder, results)
    print(f"{name}: exit {results[name]['exit']}, {results[name]['seconds']:.0f} s", flush=True)
  print(f"wrote {folder / 'results.json'} and {folder / 'index.html'}")
  return 0 if [one["exit"] for one in results.values()] == [0] * len(wanted) else 1


if __name__ == "__main__":
  app.run(main)
