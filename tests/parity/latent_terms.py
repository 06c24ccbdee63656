"""What a decoder with latent attention sends, as terms; `theory.py` computes them.

Where queries have a latent vector too. Terms that do not differ from other attention's are those of
`theory.TERMS`; here are the others.
"""

from tests.parity.update_terms import Term
from training.setup import Job

KERNELS = "L * (A + B) + 2 * V * D / t"
OF_LATENTS = (
  Term(
    "all-gather",
    ("fsdp",),
    "m * 2 * 9 * L",
    "m * 2 * L * (A + B)",
    "The nine kernels of each layer, in both passes.",
  ),
  Term(
    "all-gather",
    ("fsdp",),
    "m * 4 * L + 1",
    "m * L * X + D",
    "The scales of the norms, X numbers in a layer, which are saved for the backward pass.",
  ),
  Term(
    "reduce-scatter",
    ("fsdp",),
    "m * (9 * L + 2)",
    f"m * ({KERNELS})",
    "The gradients of the kernels.",
  ),
  Term(
    "all-reduce",
    ("data",),
    "m * (6 * L + 2)",
    "m * (L * B + 2 * V * D / t) / f",
    "The gradients of the kernels that tensor splits, and of embedding and unembedding.",
    only="not once",
  ),
  Term(
    "all-reduce",
    ("data", "tensor"),
    "m * 3 * L",
    "m * L * A / f",
    "Those of the three down-projections, whose kernels tensor does not split: with sequence "
    "parallelism each device has the gradients of its tokens; without it they are equal, which "
    "shard_map does not know.",
    only="not once and f > 1",
  ),
  Term(
    "all-reduce",
    ("tensor",),
    "m * 3 * L",
    "m * L * A / f",
    "Of each microbatch, where data is summed over once.",
    only="once and f > 1",
  ),
  Term(
    "all-reduce",
    ("data",),
    "m * 3 * L",
    "m * L * A",
    "Where fsdp gathers nothing, the gradients of the down-projections.",
    only="not once and f == 1",
  ),
  Term(
    "all-reduce",
    ("tensor",),
    "m * 3 * L",
    "m * L * A",
    "In that case with sequence parallelism.",
    only="f == 1 and sequence_parallel",
  ),
  Term(
    "all-reduce",
    ("data",),
    "9 + 2",
    f"({KERNELS}) / f",
    "Where microbatches are added up before the reduction over data: the sums of the gradients.",
    only="once",
  ),
  Term(
    "all-reduce",
    ("data", "fsdp"),
    "m * (4 * L + 1)",
    "m * (L * X + D)",
    "The full gradients of the scales.",
    only="not once",
  ),
  Term(
    "all-reduce",
    ("fsdp",),
    "m * (4 * L + 1)",
    "m * (L * X + D)",
    "The same of each microbatch, where data is summed over once.",
    only="once",
  ),
  Term(
    "all-reduce",
    ("data",),
    "4 + 1",
    "(L * X + D) / f",
    "In the same case: their sums, sharded as the scales are.",
    only="once",
  ),
  Term(
    "all-reduce",
    ("tensor",),
    "m * (3 * L + 2)",
    "m * (3 * L + 2) * b * T * D",
    "Forward: the partial sums of the embedding and of both blocks. Backward: the gradients of the "
    "inputs of the MLP and of the logits.",
    only="not sequence_parallel",
  ),
  Term(
    "all-reduce",
    ("tensor",),
    "m * 3 * L",
    "m * L * b * T * (Q + C + I)",
    "Instead of the gradient of attention's input: those of the latent vectors and of the rotary "
    "key.",
    only="not sequence_parallel",
  ),
  Term(
    "all-reduce",
    ("tensor",),
    "m * L",
    "m * L * b * T * D",
    "Where fsdp gathers the down-projections, the gradient of attention's input all the same: the "
    "devices have equal ones, which shard_map does not know.",
    only="not sequence_parallel and f > 1",
  ),
  Term(
    "reduce-scatter",
    ("tensor",),
    "m * (3 * L + 2)",
    "m * (3 * L + 2) * b * T * D",
    "The same sums; each device keeps its part of the sequence.",
    only="sequence_parallel and not collective_matmul",
  ),
  Term(
    "reduce-scatter",
    ("tensor",),
    "m * 3 * L",
    "m * L * b * T * (Q + C + I)",
    "The gradients of the latent vectors and of the rotary key.",
    only="sequence_parallel and not collective_matmul",
  ),
  Term(
    "all-gather",
    ("tensor",),
    "m * (4 * L + 2)",
    "m * (4 * L + 2) * b * T * D",
    "The inputs of the MLP, in both passes, and of the logits; the gradients of the outputs of the "
    "embedding and of both blocks.",
    only="sequence_parallel and not collective_matmul",
  ),
  Term(
    "all-gather",
    ("tensor",),
    "m * 5 * L",
    "m * L * b * T * (2 * Q + 2 * C + I)",
    "Instead of attention's input: the latent vectors in both passes, and the rotary key.",
    only="sequence_parallel and not collective_matmul",
  ),
  Term(
    "reduce-scatter",
    ("tensor",),
    "m * (1 + L)",
    "m * b * T * (D + L * I)",
    "With collective matmuls: of the embedding and of the rotary keys alone.",
    only="collective_matmul",
  ),
  Term(
    "all-gather",
    ("tensor",),
    "m * (1 + L)",
    "m * b * T * (D + L * I)",
    "With collective matmuls: the same in the other direction.",
    only="collective_matmul",
  ),
  Term(
    "collective-permute",
    ("tensor",),
    "m * (13 * L + 2) * (t - 1) * h",
    "m * ((7 * L + 2) * D + 3 * L * (Q + C)) * b * T * (t - 1) / t",
    "The other gathers and scatters as rings.",
    only="collective_matmul",
  ),
  Term(
    "all-reduce",
    ("tensor",),
    "m * (4 * L + 1)",
    "m * (L * X + D)",
    "The gradients of the scales, to which each part of the sequence contributes.",
    only="sequence_parallel",
  ),
  Term(
    "all-reduce",
    ("context",),
    "m * (13 * L + 5)",
    f"m * (({KERNELS}) / f + L * X + D + 2)",
    "All gradients and the two scalars, summed over the parts of the sequence as well.",
  ),
  Term(
    "collective-permute",
    ("context",),
    "m * L * (6 * (c - 1) + 2)",
    "m * L * (3 * (c - 1) + 1) * b * T * k * (H + U)",
    "Ring attention: keys and values of all heads, and their gradients.",
    only="ring",
  ),
  Term(
    "all-gather",
    ("context",),
    "m * L * 2",
    "m * L * b * T * c * k * (H + U)",
    "Instead of a ring: the keys and values of whole rows.",
    only="not ring",
  ),
  Term(
    "all-reduce",
    ("context",),
    "m * L * 2",
    "m * L * b * T * c * k * (H + U)",
    "Instead of a ring: their gradients.",
    only="not ring",
  ),
  Term(
    "all-gather",
    ("data",),
    "9 + 2 + 5",
    f"({KERNELS} + L * X + D) / f",
    "ZeRO-1: each device updates its part of every parameter and gathers the other parts.",
    only="zero_1",
  ),
)
LETTERS = """\
- Q, C, I numbers of a token in its latent vector of queries, in that of keys and values, and in the
  rotary key; J of a head in both of its unrotated key and its value, U in its value;
- A numbers in the kernels of the down-projections of a layer, D (Q + C + I); B in its others, as
  `tensor` splits them, (Q N H + C N J + N U D + 3 D F) / t; X in the scales of its norms,
  2 D + Q + C."""


def letters(job: Job, t: int) -> dict[str, int]:
  """Returns the sizes that these formulas speak of besides `theory.letters`; {} of other models."""
  model = job.config.model
  if model.attention != "latent":
    return {}
  D, F, N, H, U = (
    model[name]
    for name in ("model_size", "feedforward_size", "heads", "head_size", "value_head_size")
  )
  Q, C, I = model.query_latent_size, model.latent_size, model.rotary_size
  J = H - I + U
  return {
    **{"Q": Q, "C": C, "I": I, "J": J, "U": U},
    "A": D * (Q + C + I),
    "B": (Q * N * H + C * N * J + N * U * D + 3 * D * F) // t,
    "X": 2 * D + Q + C,
  }
