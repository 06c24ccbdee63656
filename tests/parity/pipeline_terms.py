"""What a step sends along `stage`: of the ticks, of chunks' parameters, of shared gradients."""

from partitioning.parallel import pipeline
from tests.helpers.jobs import make_job
from tests.parity.comparison import SEQUENCE_PARALLEL
from tests.parity.pipeline_cases import GPIPE, INTERLEAVED, LAYERS, mesh
from tests.parity.theory import Row, rows
from tests.parity.update_terms import Term
from training.pipelined import schedule_of
from training.setup import Job

_CHUNK = "(L * W / f + 2 * L * D / f) / (S * v)"
TERMS = (
  Term(
    "collective-permute",
    ("stage",),
    "2 * (M * v + S - 1)",
    "2 * (M * v + S - 1) * b * T * D",
    "Two permutes in each of M v + S - 1 ticks: outputs to the next stage, gradients of inputs to "
    "the one before, also those of the bubble. Of interleaved and 1F1B the two are of one tick but "
    "for the first and the last S v - 1.",
  ),
  Term(
    "collective-permute",
    ("stage",),
    "2 * r * 9",
    f"2 * r * {_CHUNK}",
    "Interleaved: the parameters of chunks to the stages that compute them, in r rounds, and their "
    "gradients back; once per step. In a round every stage sends one chunk.",
    only="v > 1",
  ),
  Term(
    "all-reduce",
    ("stage",),
    "3",
    "2 * V * D / (f * t) + D / f",
    "Gradients of what is not in layers: embedding, unembedding and the scale of the last norm; "
    "once per step.",
  ),
  Term("all-reduce", ("stage",), "1", "1", "The sum of the losses, which the last stage has."),
)
LETTERS = """\
- S stages, v chunks of each, M microbatches, r rounds; b rows of a microbatch on a device, T tokens
  of a row on a device between blocks; other letters as above."""
IN_EACH_TICK = {"training.pipeline_gather": "tick"}
STRATEGIES = {
  "data=2 x stage=4": {**LAYERS, **mesh(4, data=2, stage=4)},
  "stage=2 x fsdp=2 x tensor=2, interleaved, sequence-parallel": {
    **{**LAYERS, **mesh(4, stage=2, fsdp=2, tensor=2), **IN_EACH_TICK},
    **{**INTERLEAVED, **SEQUENCE_PARALLEL},
  },
  "stage=4 x fsdp=2, interleaved": {
    **{"model.layers": 8, **mesh(8, stage=4, fsdp=2), **IN_EACH_TICK},
    **INTERLEAVED,
  },
  "data=2 x stage=2, GPipe": {**LAYERS, **mesh(4, data=2, stage=2), **GPIPE},
}


def job_of(strategy: str) -> Job:
  """Returns the small job of one of `STRATEGIES`."""
  return make_job("single", "lm", **STRATEGIES[strategy])


def more_letters(job: Job) -> dict[str, int]:
  """Returns the sizes of `LETTERS`."""
  schedule = schedule_of(job.program.spec, job.devices.sizes)
  sizes, stages, chunks = job.devices.sizes, schedule.stages, schedule.chunks
  parts = sizes["data"] * sizes["fsdp"] * schedule.microbatches
  between = sizes["tensor"] if job.config.partitioning.sequence_parallel else 1
  rounds = pipeline.exchanges(stages, chunks)
  # A round in which every chunk stays where it is sends nothing.
  moving = [one for one in rounds if any(to != stage for stage, (_, to, _) in enumerate(one))]
  return {
    **{"S": stages, "v": chunks, "M": schedule.microbatches, "r": len(moving)},
    **{"b": job.config.data.global_batch_size // parts},
    "T": job.config.data.sequence_length // between,
  }


def theory(job: Job) -> dict[tuple[str, tuple[str, ...]], Row]:
  """Returns (kind, axes) -> Row of what is sent along `stage`, without the norm's scalars."""
  return rows(job, TERMS, {}, more_letters(job))
