"""The verbs: what each does and takes; help, shell completion and the session read it."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Verb:
  """A verb; the module of its name in this package runs it.

  Attributes:
    summary: one line.
    text: more, for its own help.
    examples: what follows `python main.py` on a command line.
    config: whether it takes a config: required (without one, the default), optional or none.
    words: how words after the verb are called in its usage; "": it takes none.
    alone: it is one process, without a run: its module has `run(*words)`, not `prepare(watch)`.
    jax: whether it imports JAX.
  """

  summary: str
  text: str = ""
  examples: tuple[str, ...] = ()
  config: str = "required"
  words: str = ""
  alone: bool = False
  jax: bool = True


_DP4_TP2 = "configs/dp4_tp2"
VERBS = {
  "train": Verb(
    "train, evaluating on the evaluation split (the default)",
    "The same command again resumes a run that was stopped. The workdir holds the finalized "
    "config, the layout, metrics and checkpoints.",
    (
      f"train {_DP4_TP2}",
      f"train {_DP4_TP2} training.steps=400 --workdir=runs/longer",
      "train runs/longer training.steps=800",
    ),
  ),
  "prepare": Verb(
    "prepare the data that train would; needs no devices",
    "Text is tokenized once. Prints tokens, rows, padding and epochs. --train_tokenizer=N trains a "
    "byte-level BPE of N tokens on data.files first. --teacher=DIR runs a model over the rows, on "
    "the config's devices, and stores its likeliest tokens for distillation.teacher.",
    ("prepare configs/dp4_tp2:model=lm,data=text data.files=my/*.txt",),
    alone=True,
    jax=False,
  ),
  "evaluate": Verb(
    "evaluate a checkpoint on the evaluation split",
    "The checkpoint may come from another mesh. --tasks=FILE.jsonl scores multiple-choice and "
    "exact-match tasks instead.",
    (
      "evaluate runs/dp4_tp2_lm",
      "evaluate runs/dp4_tp2_lm/checkpoints/100",
      "evaluate configs/fsdp8 --checkpoint=runs/dp4_tp2_lm",
    ),
  ),
  "sample": Verb(
    "continue prompts with a checkpoint's model",
    "Continues --prompt=TEXT (repeatable) or the lines of --prompt_file=FILE. Without these, in a "
    "terminal, it asks for texts and continues each as it is generated. --chat has a conversation "
    "by the tokenizer's chat template.",
    ("sample runs/dp4_tp2_lm --prompt='def '", "sample runs/dp4_tp2_lm --temperature=0"),
  ),
  "export": Verb(
    "write a checkpoint's model for transformers and vLLM",
    "Writes the folder --to. --merge adds LoRA's adapters to the kernels, --dtype=bfloat16 rounds "
    "the weights.",
    ("export runs/dp4_tp2_lm --to=exported", "export configs/single:model=hf --to=exported"),
  ),
  "eject": Verb(
    "write a dense decoder's run as one file of JAX",
    "--to=FILE.py is examples/one_file.py with the config's sizes, mesh and optimizer: 600 lines "
    "that need jax, optax and numpy, to copy and edit. Its losses are those of the run. What it "
    "cannot do (experts, adapters, stages, other optimizers) is refused.",
    (f"eject {_DP4_TP2} --to=train_mine.py",),
    alone=True,
    jax=False,
  ),
  "layout": Verb(
    "print how every array is sharded",
    "--against=CONFIG compares two strategies, --html=FILE writes a page with drawings and what "
    "each mesh axis costs.",
    (f"layout {_DP4_TP2}", f"layout {_DP4_TP2} --against=configs/fsdp8 --html=layout.html"),
  ),
  "compare": Verb(
    "check that two configs train alike",
    "Compares every raw gradient and three steps, in float64 where the hardware has it. --set "
    "key=value sets a key on both sides. Exit code 3: they differ.",
    (f"compare {_DP4_TP2} --against=configs/single",),
  ),
  "coordcheck": Verb(
    "check that activations are as large at every width",
    "So learning rates transfer (model.base_width). --widths=64,128,256 trains the model at these "
    "widths for --steps=5 steps. Exit code 3: sizes depend on the width.",
    ("coordcheck configs/single model.base_width=128",),
  ),
  "replay": Verb(
    "compute a step again, and find its first bad number",
    "Starts from the newest checkpoint before --step, or the first step, trains up to it on the "
    "same rows, and records its activations. Names the first array that is not finite, the rows "
    "that cause it and the largest gradients; prints the sizes of activations and gradients, and "
    "compares the loss with the logged one. Changes nothing in the workdir. Exit code 3: a bad "
    "number, or another loss.",
    ("replay runs/dp4_tp2_lm --step=37",),
  ),
  "plan": Verb(
    "predict memory, communication and step time on a pod",
    "Compiles the train step ahead of time for --topology=v5p:4x4x4, v5p-128, h100:8 or the "
    "devices at hand. Exit code 3: it does not fit.",
    ("plan configs/fsdp:llama3_8b --topology=v5p-128",),
    alone=True,
  ),
  "search": Verb(
    "find the fastest settings on a pod, or on the devices at hand",
    "Looks among meshes, rematerialization, microbatches, chunks of the loss and gathered kernels: "
    "by formula, the best with the compiler for --topology=v5p-128 (several: v5p-128,v6e-256). "
    "On attached devices the best are run for a few steps. The batch size stays as it is, unless "
    "--global_batch_sizes=64,128 lists others; --axes=data,fsdp limits the mesh, "
    "memory_limit_gib=N the memory, --compilations=N what is compiled. Stopped, the same "
    "command goes on. Exit code 3: nothing fits.",
    (
      "search configs/fsdp:llama3_8b --topology=v5p-128",
      "search configs/fsdp:llama3_8b --topology=v5p-128,v6e-256 --price=v5p=4.2 --price=v6e=2.7",
      f"search {_DP4_TP2}",
    ),
    alone=True,
  ),
  "sweep": Verb(
    "make many runs of a config, and see what each key does",
    "--axes='optimizer.learning_rate=0.001,0.002;seed=0,1,2' is a grid; a file has a line of "
    "KEY=VALUE words for each run, a FILE.py runs(); --random=N draws N settings. Each run has a "
    "workdir and a process of its own, --parallel=N at a time; the same command goes on, and skips "
    "what is done. --halving stops settings that are worse, --hours=N ends in time, --slurm prints "
    "an array. Prints the best and the effect of each axis beside the spread of seeds; writes "
    "sweep.html and sweep.csv. Exit code 1: a run has failed, 3: it would again.",
    (
      f"sweep {_DP4_TP2} --axes='optimizer.learning_rate=0.001,0.002;seed=0,1,2' --parallel=2",
      f"sweep {_DP4_TP2} --axes='optimizer.learning_rate=1e-4..1e-2' --random=8 --halving",
    ),
    alone=True,
    jax=False,
  ),
  "forecast": Verb(
    "predict what a large run will have learned, from small ones",
    "Trains a ladder of small runs (--widths, --flops; with muP, after a coordinate check; an "
    "ordinary sweep, which the same command resumes), fits a scaling law to their bits per byte, "
    "and says with 90 % intervals what --budget='$2000 on v6e-64' or '2e9 tokens' buys: size, "
    "loss, mesh, time, memory, cost, failures. --axes='seed=0,1' varies more, --served_tokens=N "
    "weighs serving. Writes forecast.html and forecast.json. Exit code 3: activations depend on "
    "the width, or nothing fits.",
    (
      "forecast configs/single:lm --budget='$2000 on v6e-64' --price=v6e=2.7",
      "forecast configs/single:lm --budget='4e6 tokens' --widths=32,64,96 --flops=5e10,2e11",
    ),
    alone=True,
    jax=False,
  ),
  "config": Verb(
    "print the finalized config, and where each value comes from",
    "Each key with its value, unit and origin (default, recipe, file, override, derived "
    "or platform); first what is not the recipe's, or with --changed that alone. KEY or SECTION: "
    "of these alone, with their meanings. The config is checked as train would check it. "
    "--topology derives it for other devices, --json prints JSON.",
    (
      f"config {_DP4_TP2}",
      f"config {_DP4_TP2} model.depth=6 --changed",
      f"config training optimizer.learning_rate {_DP4_TP2}",
      "config partitioning configs/fsdp:llama3_8b --topology=v5p-128",
    ),
    words="[KEY ...]",
    alone=True,
    jax=False,
  ),
  "doctor": Verb(
    "check this installation: devices, versions, folders, links",
    "Packages beside the lock files, limits of the system, the coordinator's port, the workdir and "
    "the caches (written, read, renamed), clocks, devices and their memory, and the bandwidth of "
    "each mesh axis beside the data sheet. --config checks its mesh, workdir and layout, too. "
    "Several processes are checked together. Exit code 3: something is wrong.",
    ("doctor", f"doctor {_DP4_TP2}", "doctor --workdir=gs://BUCKET/runs/first"),
    config="optional",
    alone=True,
    jax=False,
  ),
  "report": Verb(
    "write the page of a run, or of several with a table and their curves",
    "Writes RUN/run.html, as training does; RUN is a workdir. Of several, a pattern or a folder of "
    "runs it prints a table, the best first, and writes a page of it, with curves, links and the "
    "config keys that differ. --html=FILE names the file. --workdir=RUN --against=RUN names them, "
    "too.",
    ("report runs/dp4_tp2_lm", "report runs/", "report runs/one runs/two --html=runs.html"),
    config="none",
    words="RUN ...",
    alone=True,
    jax=False,
  ),
  "check": Verb(
    "check a train step of any JAX program",
    "FILE.py defines program(mesh), from the sizes of the mesh axes to a checks.Program. It is "
    "compiled and run on simulated devices on each --mesh (or its MESHES): what is replicated, "
    "whether the numbers are the same on every mesh, its collectives, which positions see which, "
    "and what must not change them. --only=equality,leaks runs some of the checks; --json=FILE and "
    "--html=FILE write the findings. Exit code 3: something is wrong.",
    ("check step.py --mesh=1 --mesh=data=2,tensor=4", "check step.py --html=check.html"),
    config="none",
    words="FILE.py",
    alone=True,
  ),
  "completion": Verb(
    "print the completion for bash, zsh or fish",
    "Completes verbs, flags, config files with their recipes, config keys and their values. For "
    "each new shell: `source <(python main.py completion bash)` in ~/.bashrc (zsh: after compinit "
    "in ~/.zshrc), `python main.py completion fish | source` in config.fish; with the full path of "
    "main.py there.",
    ("completion bash", "completion zsh", "completion fish"),
    config="none",
    words="SHELL",
    alone=True,
    jax=False,
  ),
  "tour": Verb(
    "see what sharding does, by small examples",
    "--chapter=NAME shows one chapter.",
    ("tour", "tour --chapter=collectives"),
    config="none",
    alone=True,
  ),
}
