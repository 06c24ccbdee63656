"""Trains a model over a device mesh: `python main.py --config=configs/dp4_tp2.py`.

python main.py [VERB] --config=configs/STRATEGY.py[:RECIPE] [--workdir=DIR] [--config.key=value ...]

VERB    train (default): train, evaluating on the evaluation split
        prepare: prepare the data that train would: text is tokenized, once; prints tokens, rows,
          padding, epochs; --train_tokenizer=N trains a tokenizer first. Needs no devices
        evaluate: a checkpoint on the evaluation split, on the mesh that the config names;
          --tasks=FILE.jsonl scores multiple-choice and exact-match tasks instead
        sample: continue --prompt=TEXT (repeatable) or the lines of --prompt_file=FILE; --chat has a
          conversation by the chat template
        export: write the model of a checkpoint to --to=FOLDER, which transformers and vLLM load;
          --merge adds LoRA's adapters to the kernels, --dtype=bfloat16 rounds the weights
        layout: print how every array is sharded; --against=CONFIG compares two strategies,
          --html=FILE writes it as a page with drawings and what each mesh axis costs
        compare: whether --config and --against train alike: every raw gradient and three steps,
          in float64 where the hardware has it; --set key=value sets a key on both sides
        coordcheck: whether activations are as large at every width, so that learning rates transfer
          (model.base_width); --widths=64,128,256 trains the model at these for --steps=5 steps
        plan: predict memory, communication and step time on --topology=v5p:4x4x4 or h100:8
        tour: see what sharding does, by small examples; --chapter=NAME shows one. Without a config
RECIPE  lm (default), mlp, mlp_tutorial; or model=NAME,data=NAME

The same command again resumes a run that was stopped.

On several machines, or as several processes on one, every process runs the same command; see
docs/running.md.

Exit codes: 0 done; 1 failed; 2 refused before anything started or was changed, or another run has
taken over the workdir; 3 compare: they differ, coordcheck: sizes depend on the width, plan: it does
not fit; 75 stopped by SIGTERM or Ctrl-C after saving; 130 by a second Ctrl-C, without saving.
"""

from processes import preemption

if __name__ == "__main__":  # the imports below take seconds, in which Ctrl-C must work, too
  preemption.begin()

from absl import app

from commands.flags import parse_flags
from commands.session import main

if __name__ == "__main__":
  app.run(preemption.ending(main), flags_parser=parse_flags)
