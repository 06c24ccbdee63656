r"""Everything worth measuring on one GPU in one command, most informative first.

  python -m benchmarks.gpu_report [--minutes=9] [--out=gpu_report] [--torch_python=PYTHON]
    [--gpu_parts=device,...] [--small]

Each part is a process of its own with a limit of its own. What it prints is the file PART.txt in
--out, a line of JSON for each number; results.json and index.html are written again after every
part, so that a cut loses nothing. A part that fails or runs out of
time is reported as such, and the exit code is 1. `--small` shrinks all of it for a CPU: it shows
that the command works, and says nothing about speed.

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
import importlib.metadata
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jinja2
from absl import app, flags

from benchmarks import gpu, timing
from models import fused_attention
from models.attention import DEFAULT_TILES
from partitioning.constraints import activation_layout
from partitioning.mesh import make_mesh
from partitioning.mesh_sizes import AXES
from partitioning.parallel.attention_blocks import Blocks, Scores

ROOT = pathlib.Path(__file__).parents[1]
_MINUTES = flags.DEFINE_float("minutes", 9.0, "For all parts together.", 0.1)
_OUT = flags.DEFINE_string("out", "gpu_report", "Folder of a file for each part.")
_PARTS = flags.DEFINE_list("gpu_parts", None, "Of PARTS; by default all.")
_PART = flags.DEFINE_string("gpu_part", None, "Runs this part in this process.")
SMALL = flags.FLAGS["small"]

MODEL = "configs/single.py:model=gpt2_124m,data=python_source"
RUN = ("--config.metrics.report=false", "--config.metrics.tensorboard=false")
SHRUNK = [
  f"--config.{key}={value}"
  for key, value in {
    **{"model.layers": 2, "model.model_size": 64, "model.heads": 2, "model.kv_heads": 2},
    **{"model.head_size": 32, "model.feedforward_size": 96, "model.vocabulary_size": 512},
    **{"data.sequence_length": 64, "model.max_positions": 64, "data.global_batch_size": 4},
  }.items()
]


def show(**row: Any) -> None:
  """Prints a line of numbers as JSON."""
  print(json.dumps(row), flush=True)


def shown(row: dict[str, Any], measure: Callable[[], dict[str, float]]) -> None:
  """Prints a row with what is measured, or why the device or the compiler refuses it."""
  try:
    show(**row, **measure())
  except Exception as error:  # a dtype, a kernel, an option, or too little memory
    show(**row, failed=f"{type(error).__name__}: {error}"[:300])


def application(*words: str) -> list[str]:
  """Returns the command of the application for the small decoder of the parts."""
  return [sys.executable, "main.py", *words, *(SHRUNK if SMALL.value else [])]


def run(command: Sequence[str]) -> str:
  """Returns what a command prints; raises RuntimeError with its last lines where it fails."""
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  if done.returncode:
    raise RuntimeError(
      f"{' '.join(command)}: {done.returncode}\n{(done.stdout + done.stderr)[-2000:]}"
    )
  return done.stdout


# ------------------------------ parts in a process of their own ------------------------------


def device() -> None:
  """Prints what is measured on."""
  one, smi = jax.devices()[0], shutil.which("nvidia-smi")
  driver = "--query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit"
  said = run([smi, driver, "--format=csv,noheader"]).strip() if smi else ""
  versions = {x: importlib.metadata.version(x) for x in ("jax", "jaxlib", "flax", "optax")}
  show(device=one.device_kind, platform=one.platform, cores=os.cpu_count(), smi=said, **versions)


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


def matmuls() -> None:
  """Prints TFLOP/s by shape and dtype: of the forward pass and of both of the backward pass."""
  for name, (m, k, n) in shapes_of_matmuls():
    shapes = {"x": (m, k), "w": (k, n), "dy": (m, n)}
    passes = {"x w": ((1,), (0,), "x", "w")}
    if name != "square":
      passes |= {"xT dy": ((0,), (0,), "x", "dy"), "dy wT": ((1,), (1,), "dy", "w")}
    eight_bit = jax.devices()[0].platform == "gpu" and name == "square"
    for dtype in ["bfloat16", *(["float8_e4m3fn"] if eight_bit else [])]:
      keys = jax.random.split(jax.random.key(0), 3)
      arrays = {
        array: jax.random.normal(key, shape, jnp.bfloat16).astype(dtype)
        for key, (array, shape) in zip(keys, shapes.items(), strict=True)
      }
      for title, (left, right, a, b) in passes.items():
        dims = (left, right), ((), ())
        multiply = functools.partial(
          jax.lax.dot_general, dimension_numbers=dims, preferred_element_type=jnp.bfloat16
        )
        row = {"of": name, "shape": f"{m}x{k}x{n}", "dtype": dtype, "matmul": title}
        pair = arrays[a], arrays[b]
        shown(row, functools.partial(_matmul, jax.jit(multiply), pair, 2 * m * k * n))


def _matmul(multiply: Callable, pair: tuple[jax.Array, jax.Array], flops: int) -> dict[str, float]:
  """Returns the milliseconds and TFLOP/s of a matmul, which is repeated for some 20 TFLOP."""
  often = 1 if SMALL.value else max(1, round(2e13 / flops))
  seconds = timing.best_seconds(lambda: [multiply(*pair) for _ in range(often)][-1], 3) / often
  return {"ms": 1e3 * seconds, "tflops": flops / seconds / 1e12}


def attention() -> None:
  """Prints milliseconds of forward and backward of each kernel that the device has."""
  there = jax.devices()[0]
  sizes = [(8, 1024, 12, 64), (4, 2048, 32, 64), (2, 4096, 32, 128), (1, 8192, 32, 128)]
  sizes = [(2, 128, 2, 32)] if SMALL.value else [*sizes, (1, 32_768, 8, 128)]
  for rows, length, heads, size in sizes:
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (rows, length, heads, size)
    arrays = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]
    slots_BT = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length))
    how = Blocks(Scores(size**-0.5, jnp.float32), *DEFAULT_TILES.blockwise, complete=True)
    kernels = {"blockwise": functools.partial(_blockwise, how, slots_BT)}
    if 3 * 4 * rows * heads * length**2 <= 40e9:  # bytes of its scores
      kernels["jax.nn xla"] = functools.partial(
        jax.nn.dot_product_attention, is_causal=True, implementation="xla"
      )
    if there.platform == "gpu":
      kernels["cudnn"] = lambda *qkv, slots=slots_BT: fused_attention.cudnn_attention(*qkv, slots)
    flops = 3.5 * 2 * rows * heads * length**2 * size  # the causal half, forward and backward
    for name, kernel in kernels.items():
      row = {"kernel": name, "rows": rows, "tokens": length, "heads": heads, "head size": size}
      with jax.set_mesh(make_mesh(dict.fromkeys(AXES, 1), [there])), activation_layout({}, {}):
        shown(row, functools.partial(_kernel, kernel, arrays, flops))


def _blockwise(how: Blocks, slots_BT: jax.Array, *qkv: jax.Array) -> jax.Array:
  return fused_attention.attention(how, *qkv, slots_BT)


def _kernel(kernel: Callable, arrays: Sequence[jax.Array], flops: float) -> dict[str, float]:
  """Returns milliseconds of a kernel, forward and of both passes, and TFLOP/s of both."""
  gradients = jax.grad(lambda *qkv: jnp.sum(kernel(*qkv).astype(jnp.float32)), (0, 1, 2))
  forward, both = (
    timing.best_seconds(functools.partial(jax.jit(one), *arrays), 5) for one in (kernel, gradients)
  )
  return {"forward ms": 1e3 * forward, "both ms": 1e3 * both, "tflops": flops / both / 1e12}


def whole_run() -> None:
  """Prints what a run says of its steps and evaluations; some of each come between others."""
  with tempfile.TemporaryDirectory() as name:
    words = [f"--config={MODEL}", "--config.training.steps=60", "--config.metrics.every_steps=10"]
    words += ["--config.checkpoint.every_steps=25", "--config.evaluation.every_steps=25"]
    said = run(application(*words, "--config.evaluation.final_steps=2", f"--workdir={name}/run"))
  print("\n".join(x for x in said.splitlines() if x.startswith(("step", "evaluation"))))


def resume() -> None:
  """Prints whether steps 4 to 6 have the same bits when the run begins at step 3 again."""
  with tempfile.TemporaryDirectory() as name:
    first, again = pathlib.Path(name, "first"), pathlib.Path(name, "again")
    words = [f"--config={MODEL}", "--config.training.steps=6", "--config.checkpoint.every_steps=3"]
    words += ["--config.metrics.every_steps=1", "--config.evaluation.final_steps=1", *RUN]
    run(application(*words, f"--workdir={first}"))
    shutil.copytree(first, again)
    shutil.rmtree(again / "checkpoints" / "6")
    run(application(*words, f"--workdir={again}"))
    numbers = []
    for folder in (first, again):
      lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
      numbers.append([(x["step"], x["loss"], x["grad_norm"]) for x in lines if "loss" in x])
  show(**{"same to the bit": numbers[0] == numbers[1] and len(numbers[0]) == 6})


def start() -> None:
  """Prints the seconds of a command of two steps, with a cold and a warm compilation cache."""
  with tempfile.TemporaryDirectory() as folder:
    for name in ("cold", "warm"):
      words = [f"--config={MODEL}", "--config.training.steps=2", f"--workdir={folder}/{name}", *RUN]
      words += [f"--config.compilation_cache_dir={folder}/cache"]
      began = time.monotonic()
      said = run(application(*words, "--config.evaluation.final_steps=1"))
      first = [line.strip() for line in said.splitlines() if "first step finished" in line]
      show(cache=name, whole_command_s=time.monotonic() - began, first_step=first[-1])


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


def alone(model: str, overrides: dict[str, Any]) -> dict[str, float]:
  """Returns what our side measures of a model with other keys."""
  told = gpu.job(model)
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


def variants() -> None:
  """Prints speeds of our side alone with other keys."""
  for model, keys in VARIANTS:
    less = {key: min(value, 2) if key == UNROLL else value for key, value in keys.items()}
    given = less if SMALL.value else keys
    shown({"model": model, **keys}, functools.partial(alone, model, given))


def plan() -> None:
  """Prints the predicted step of llama_1b on one of this device."""
  kind = jax.devices()[0].device_kind.lower()
  chip = next((name for name in ("h200", "h100", "b200", "a100") if name in kind), "h100")
  with tempfile.TemporaryDirectory() as folder:
    overrides = gpu.job("llama_1b")["overrides"]
    values = [f"--config.{key}={value}" for key, value in overrides.items() if value != ()]
    config = "--config=configs/single.py:model=llama3_2_1b,data=python_source"
    words = [config, *values, f"--topology={chip}:1", f"--workdir={folder}/plan"]
    run([sys.executable, "main.py", "plan", *words])
    found = json.loads(pathlib.Path(folder, "plan", "plan.json").read_text())
  kept = ("step_seconds", "peak_bytes_per_device", "mfu", "tokens_per_second_per_device")
  show(chip=chip, **{key: found[key] for key in kept})


def compare() -> None:
  """Prints what `compare` says of two microbatches beside one, in float64."""
  words = ["compare", "--config=configs/single.py", "--against=configs/single.py"]
  said = run([sys.executable, "main.py", *words, "--config.training.gradient_accumulation_steps=2"])
  print("\n".join(said.splitlines()[-6:]))


OWN = {
  one.__name__: one
  for one in (device, matmuls, attention, whole_run, resume, start, variants, plan, compare)
}
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


def measure(command: Sequence[str], file: pathlib.Path, seconds: float) -> int | str:
  """Writes what a part prints to a file; returns its exit code, or after how long it was cut."""
  with file.open("w") as said:
    process = subprocess.Popen(
      command, cwd=ROOT, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
      return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
      process.wait()
      return f"cut after {seconds:.0f} s"


PAGE = jinja2.Environment(autoescape=True).from_string("""<!doctype html><meta charset="utf-8">
<title>One GPU, measured</title><style>
body { font: 15px/1.5 system-ui; max-width: 60em; margin: 2em auto; padding: 0 1em }
td, th { padding: .1em .8em; text-align: right } pre { overflow-x: auto }
</style><h1>One GPU, measured</h1>
{% for name, part in results.items() %}<h2>{{ name }}</h2><p>exit {{ part.exit }}</p>
{% if part.rows %}<table><tr>{% for title in part.titles %}<th>{{ title }}</th>{% endfor %}</tr>
{% for row in part.rows %}<tr>{% for title in part.titles %}<td>
{%- if row[title] is float %}{{ "%.4g" % row[title] }}{% else %}{{ row[title] }}{% endif -%}
</td>{% endfor %}</tr>{% endfor %}</table>{% endif %}
<pre>{{ part.text | join("\n") }}</pre>{% endfor %}
""")


def write(folder: pathlib.Path, codes: dict[str, int | str]) -> None:
  """Writes results.json and index.html of what the parts have printed; codes: how each ended."""
  results = {}
  for name, code in codes.items():
    lines = (folder / f"{name}.txt").read_text().splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
    text = [line for line in lines if not line.startswith("{")][-40:]
    titles = [*dict.fromkeys(key for row in rows for key in row)]
    results[name] = {"exit": code, "titles": titles, "rows": rows, "text": text}
  (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")
  (folder / "index.html").write_text(PAGE.render(results=results))


def main(argv: list[str]) -> int:
  """Runs the parts; returns the exit code."""
  del argv
  if _PART.value:
    OWN[_PART.value]()
    return 0
  wanted = _PARTS.value or [*PARTS]
  if unknown := [name for name in wanted if name not in PARTS]:
    raise app.UsageError(f"--gpu_parts={unknown[0]}: one of {', '.join(PARTS)}")
  folder = pathlib.Path(_OUT.value)
  folder.mkdir(parents=True, exist_ok=True)
  until, codes = time.monotonic() + 60 * _MINUTES.value, {}
  for name in wanted:
    left = until - time.monotonic()
    if left < 5:
      print(f"{name}: no time left", flush=True)
      break
    file, began = folder / f"{name}.txt", time.monotonic()
    codes[name] = measure(command_of(name), file, min(PARTS[name], left))
    write(folder, codes)
    print(f"{name}: exit {codes[name]}, {time.monotonic() - began:.0f} s, {file}", flush=True)
  return 0 if [*codes.values()] == [0] * len(wanted) else 1


if __name__ == "__main__":
  app.run(main)
