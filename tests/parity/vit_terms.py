"""What a step of the vision transformer sends, as terms; `theory.py` computes them."""

from collections.abc import Mapping

from tests.parity.comparison import SEQUENCE_PARALLEL
from tests.parity.update_terms import Term
from training.setup import Job

# Title -> file of configs/, and what is set beside it.
STRATEGIES: Mapping[str, tuple[str, dict[str, object]]] = {
  "dp8": ("dp8", {}),
  "fsdp8": ("fsdp8", {}),
  "data=4 x fsdp=2 (HSDP)": ("single", {"mesh.data": 4, "mesh.fsdp": 2}),
  "tp8": ("tp8", {}),
  "dp2_fsdp2_tp2": ("dp2_fsdp2_tp2", {}),
  "dp2_fsdp2_tp2, sequence-parallel": ("dp2_fsdp2_tp2", SEQUENCE_PARALLEL),
}
LETTERS = """\
- T patches of an image, X numbers of a patch, O classes; L, D, F, d, f, t and b as above;
- W numbers in the kernels of a layer, as `tensor` splits them: (4 D D + 2 D F) / t;
- p patches of which a device has the gradients of their positions: T / t with sequence parallelism,
  else T."""
VECTORS = "6 * L + 3"
TERMS = (
  Term(
    "all-gather",
    ("fsdp",),
    "2 * 6 * L",
    "2 * L * W",
    "The six kernels of each layer, in both passes.",
  ),
  Term(
    "all-gather",
    ("fsdp",),
    VECTORS,
    f"({VECTORS}) * D",
    "Scales and biases of the norms, and the biases of embedded patches and of what is added to "
    "the residual, which are saved for the backward pass.",
  ),
  Term(
    "all-gather",
    ("fsdp",),
    "3",
    "(X + T + O) * D",
    "The kernels of patches and classes, and the positions: once.",
  ),
  Term("reduce-scatter", ("fsdp",), "6 * L", "L * W", "The gradients of the layers' kernels."),
  Term(
    "all-reduce",
    ("data",),
    "6 * L",
    "L * W / f",
    "The same gradients; each device reduces those of its own shard.",
  ),
  Term(
    "all-reduce",
    ("data", "fsdp"),
    f"{VECTORS} + 3 + 4 * L + 1",
    f"({VECTORS}) * D + (X + p + O) * D + L * (3 * D + F) / t + O",
    "The full gradients of the vectors; of the kernels outside of the layers and the positions, "
    "which constraints alone shard; and of the other biases.",
  ),
  Term(
    "all-reduce",
    ("data", "fsdp"),
    "2",
    "2",
    "The sum of the losses and the sum of the weights.",
  ),
  Term(
    "all-reduce",
    ("tensor",),
    "4 * L",
    "4 * L * b * T * D",
    "Forward: the partial sums of both blocks of a layer. Backward: the gradients of their inputs.",
    only="not sequence_parallel",
  ),
  Term(
    "reduce-scatter",
    ("tensor",),
    "4 * L",
    "4 * L * b * T * D",
    "The same sums; each device keeps its part of the patches.",
    only="sequence_parallel",
  ),
  Term(
    "all-gather",
    ("tensor",),
    "6 * L + 1",
    "6 * L * b * T * D + T * D",
    "The inputs of both blocks, in both passes, and the gradients of their outputs; once, each "
    "device's part of the gradient of the positions.",
    only="sequence_parallel",
  ),
  Term(
    "all-reduce",
    ("tensor",),
    f"1 + {VECTORS} + 1",
    f"b * D + ({VECTORS}) * D + X * D",
    "The mean over the patches; gradients of vectors and of the kernel of patches, to which each "
    "part of the patches contributes.",
    only="sequence_parallel",
  ),
)


def letters(job: Job) -> dict[str, int]:
  """Returns the sizes that the formulas speak of; `LETTERS` says which is which."""
  model, sizes = job.config.model, job.devices.sizes
  d, f, t = (sizes[axis] for axis in ("data", "fsdp", "tensor"))
  D, F, T = model.model_size, model.feedforward_size, (model.image_size // model.patch_size) ** 2
  split = job.config.partitioning.sequence_parallel and t > 1
  return {
    **{"L": model.layers, "D": D, "F": F, "O": model.output_size},
    **{"X": model.patch_size**2 * model.channels, "T": T, "p": T // t if split else T},
    **{"d": d, "f": f, "t": t, "m": 1, "b": job.config.data.global_batch_size // (d * f)},
    "W": (4 * D * D + 2 * D * F) // t,
    "sequence_parallel": split,
  }
