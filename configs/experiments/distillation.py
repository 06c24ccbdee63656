"""A decoder on Python's standard library, beside one of the same size that has a teacher as well.

python main.py --config=configs/experiments/distillation.py:teacher \
    --workdir=runs/distillation_teacher
python main.py --config=configs/experiments/distillation.py:alone \
    --workdir=runs/distillation_alone
python main.py --config=configs/experiments/distillation.py:taught \
    --workdir=runs/distillation_taught

`alone` and `taught` have 0.18 M parameters, the teacher 0.66 M. In nats per byte, on 768 rows of
the evaluation split: 1.710 of the teacher; 1.796 alone and 1.744 taught, in the mean of seeds 0, 1
and 2 (docs/fine_tuning.md). The steps took 141, 30 and 48 s on one simulated device, on two shared
x86-64 cores.
"""

from ml_collections import ConfigDict

from configs import base

TEACHER = "runs/distillation_teacher"


def get_config(argument: str | None = None) -> ConfigDict:
  """Returns the config of a run: teacher, alone (a quarter of its size), or taught (the same)."""
  run = base.variant(argument, "teacher", "alone", "taught")
  config = base.get_config("lm")
  config.data.global_batch_size = 8
  config.training.steps = 500
  config.evaluation.update(every_steps=0, final_steps=96)
  if run != "teacher":
    config.model.update(model_size=64, feedforward_size=192, heads=4, kv_heads=2)
    config.training.steps = 400
  if run == "taught":
    config.distillation.update(teacher=TEACHER, weight=0.9)
  return config
