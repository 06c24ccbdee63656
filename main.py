"""Trains a model over a device mesh: `python main.py train configs/dp4_tp2`.

python main.py [VERB] [configs/STRATEGY[:RECIPE] | RUN] [key=value ...] [--workdir=DIR] [--flag=...]

VERB    train (default), prepare, evaluate, sample, export, layout, compare, plan, ...; --help lists
        them, and `help VERB` says more of one
RUN     the workdir of a run, whose config is taken
RECIPE  lm (default), mlp, mlp_tutorial, vit; or model=NAME,data=NAME

The same command again resumes a run that was stopped.

On several machines, or as several processes on one, every process runs the same command; see
docs/running.md.

Exit codes: 0 done; 1 failed; 2 refused before anything started or was changed, or another run has
taken over the workdir; 3 compare: they differ, coordcheck: sizes depend on the width, replay: a
bad number or another loss, plan, search, forecast: nothing fits, check, doctor: something is wrong;
75 stopped by SIGTERM or Ctrl-C after saving; 130 by a second Ctrl-C, without saving.
"""

import gc

from processes import preemption

if __name__ == "__main__":  # the imports below take seconds, in which Ctrl-C must work, too
  preemption.begin()
  gc.set_threshold(100_000)  # what imports and traces make is kept: looking for garbage took 0.4 s

from absl import app

from commands.flags import parse_flags
from commands.session import main

if __name__ == "__main__":
  app.run(preemption.ending(main), flags_parser=parse_flags)
