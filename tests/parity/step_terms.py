"""What a step of the decoder sends, as terms: one for each kind of collective and cause."""

from tests.parity.update_terms import Term

KERNELS = "L * W + 2 * V * D / t"
TERMS = (
  Term(
    "all-gather",
    ("fsdp",),
    "m * 2 * 7 * L",
    "m * 2 * L * W",
    "The seven kernels of each layer, inside the scan over layers, and again in its backward pass, "
    "because gathered kernels are not saved.",
    only="not kept",
  ),
  Term(
    "all-gather",
    ("fsdp",),
    "m * 7 * L",
    "m * L * W",
    "With partitioning.reshard_after_forward=False: once, since they are saved.",
    only="kept",
  ),
  Term(
    "all-gather",
    ("fsdp",),
    "2",
    "2 * V * D / t",
    "Embedding and unembedding, once. The gradient of a lookup does not read the table, the "
    "gradient of the logits follows them immediately, and XLA hoists both out of the loop over "
    "microbatches.",
    of_all=True,
  ),
  Term(
    "all-gather",
    ("fsdp",),
    "m * 2 * L + 1",
    "(m * 2 * L + 1) * D",
    "The scales of the norms, D numbers each, which are saved for the backward pass.",
  ),
  Term(
    "reduce-scatter",
    ("fsdp",),
    "m * (7 * L + 2)",
    f"m * ({KERNELS})",
    "The gradients of the kernels: the transpose of each all-gather.",
  ),
  Term(
    "all-reduce",
    ("data",),
    "m * (7 * L + 2)",
    f"m * ({KERNELS}) / f",
    "The gradients of the kernels; each device reduces those of its own shard.",
    only="not once",
  ),
  Term(
    "all-reduce",
    ("data",),
    "7 + 2",
    f"({KERNELS}) / f",
    "Where microbatches are added up before the reduction over data: the sums of the gradients of "
    "the kernels, those of all layers as one array.",
    only="once",
  ),
  Term(
    "all-reduce",
    ("data", "fsdp"),
    "m * (2 * L + 1)",
    "m * (2 * L + 1) * D",
    "The full gradients of the scales. From constraints alone XLA emits no reduce-scatter.",
    only="not once",
  ),
  Term(
    "all-reduce",
    ("fsdp",),
    "m * (2 * L + 1)",
    "m * (2 * L + 1) * D",
    "In the same case: the full gradients of the scales of each microbatch.",
    only="once",
  ),
  Term(
    "all-reduce",
    ("data",),
    "2 + 1",
    "(2 * L + 1) * D / f",
    "In the same case: their sums, sharded as the scales are.",
    only="once",
  ),
  Term(
    "all-reduce",
    ("data", "fsdp"),
    "m * 2",
    "m * 2",
    "Two scalars: the sum of the losses and the sum of the weights.",
    only="not once",
    of_all=True,
  ),
  Term(
    "all-reduce",
    ("fsdp",),
    "m * 2",
    "m * 2",
    "In the same case: the two scalars of each microbatch.",
    only="once",
    of_all=True,
  ),
  Term(
    "all-reduce",
    ("data",),
    "2",
    "2",
    "In the same case: their sums.",
    only="once",
    of_all=True,
  ),
  Term(
    "all-reduce",
    ("tensor",),
    "m * (4 * L + 2)",
    "m * (4 * L + 2) * b * T * D",
    "Forward: the partial sums of the embedding and of both blocks of a layer. Backward: the "
    "gradients of the inputs of both blocks and of the logits, each summed over its uses first.",
    only="not sequence_parallel",
  ),
  Term(
    "reduce-scatter",
    ("tensor",),
    "m * (4 * L + 2)",
    "m * (4 * L + 2) * b * T * D",
    "The same sums; each device keeps its part of the sequence.",
    only="sequence_parallel and not collective_matmul",
  ),
  Term(
    "reduce-scatter",
    ("tensor",),
    "m",
    "m * b * T * D",
    "With collective matmuls: of the embedding alone.",
    only="collective_matmul",
  ),
  Term(
    "all-gather",
    ("tensor",),
    "m * (6 * L + 2)",
    "m * (6 * L + 2) * b * T * D",
    "The inputs of both blocks and of the logits, and the gradients of the outputs of embedding "
    "and blocks. Inputs of blocks are saved sharded and gathered again in the backward pass.",
    only="sequence_parallel and not collective_matmul",
  ),
  Term(
    "all-gather",
    ("tensor",),
    "m",
    "m * b * T * D",
    "With collective matmuls: the gradient of the embedding's output.",
    only="collective_matmul",
  ),
  Term(
    "collective-permute",
    ("tensor",),
    "m * (10 * L + 2) * (t - 1) * h",
    "m * (10 * L + 2) * (t - 1) / t * b * T * D",
    "The other gathers and scatters as rings: t - 1 times a device passes on its part of the "
    "sequence, in h halves, one for each direction. h is 1 where t is 2, or the part is odd.",
    only="collective_matmul",
  ),
  Term(
    "all-reduce",
    ("tensor",),
    "m * (2 * L + 1)",
    "m * (2 * L + 1) * D",
    "The gradients of the scales, to which each part of the sequence contributes.",
    only="sequence_parallel",
  ),
  Term(
    "all-reduce",
    ("tensor",),
    "m * 3",
    "m * 3 * b * T",
    "Vocabulary-parallel cross-entropy: the largest logit, the sum of exponentials and the "
    "target's logit of each token.",
    of_all=True,
  ),
  Term(
    "all-reduce",
    ("tensor",),
    "m * 2 * L",
    "m * 2 * L * b * T * H",
    "Where tensor does not divide the key/value heads: the gradients of the keys and values that "
    "the query heads of one group share, one head in each group of t / K devices.",
    only="k == K and t > 1",
  ),
  Term(
    "all-gather",
    ("tensor",),
    "m * 2 * L",
    "m * 2 * L * b * T * K * H",
    "In the same case: from these, the gradients of all keys and values on each device.",
    only="k == K and t > 1",
  ),
  Term(
    "all-reduce",
    ("tensor",),
    "m * 2 * L",
    "m * 2 * L * D * K * H",
    "In the same case: the gradients of the replicated key and value kernels, divided by t, since "
    "shard_map does not know that they are equal.",
    only="k == K and t > 1",
  ),
  Term(
    "all-reduce",
    ("context",),
    "m * (9 * L + 5)",
    f"m * (({KERNELS}) / f + (2 * L + 1) * D + 2)",
    "All gradients and the two scalars, summed over the parts of the sequence as well. XLA reduces "
    "over one sharded dim after the other.",
  ),
  Term(
    "all-gather",
    ("context",),
    "m * 3",
    "m * 3 * b * T * c",
    "The zigzag order of ring attention: tokens, targets and weights of whole rows, from which "
    "each device takes an early and a late piece.",
    only="ring",
    of_all=True,
  ),
  Term(
    "collective-permute",
    ("context",),
    "m * L * (6 * (c - 1) + 2)",
    "m * L * (6 * (c - 1) + 2) * b * T * k * H",
    "Ring attention: keys and values are passed to the next device c - 1 times, and again in the "
    "backward pass, with their gradients, which take one more hop back to their own device.",
    only="ring",
  ),
  Term(
    "all-gather",
    ("context",),
    "m * L * 2",
    "m * L * 2 * b * T * c * k * H",
    "Instead of a ring: the keys and values of whole rows.",
    only="not ring",
  ),
  Term(
    "all-reduce",
    ("context",),
    "m * L * 2",
    "m * L * 2 * b * T * c * N * H / t",
    "Instead of a ring: their gradients, summed before those of a group's query heads are added.",
    only="not ring",
  ),
  Term(
    "all-gather",
    ("data",),
    "7 + 2 + 3",
    f"({KERNELS} + (2 * L + 1) * D) / f",
    "ZeRO-1: each device updates its part of every parameter and gathers the other parts.",
    only="zero_1",
  ),
)
NORM = (
  "The gradient norm: a scalar for each parameter and each of its dims that is sharded while the "
  "squares are summed. Replicas are sharded for that along the first dim that their number divides."
)
