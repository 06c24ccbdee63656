"""Log-likelihoods of continuations, in batches on the mesh.

Each continuation is a row: its context, cut on the left where both do not fit, and the
continuation, whose tokens alone have weight. Rows are sorted by length, and a batch is as wide as
its longest row needs: `data.sequence_length`, or that divided by 2, 4, 8 ... So few programs are
compiled, and short rows are not padded to the longest.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from inference.sampler import Given, doubled
from input_pipeline.text.tokenizer import Tokenizer
from models import MODELS, Scoring
from partitioning.rules import axes_size, resolve
from training.setup import Job

_DTYPES = {"tokens": "int32", "targets": "int32", "weights": "float32", "segments": "int32"}


@dataclasses.dataclass(frozen=True)
class Continuation:
  """Tokens of which the last are scored.

  Attributes:
    tokens: uint32 [N], context and continuation; the context has at least one token.
    scored: how many of the last tokens are the continuation, 1 to N - 1.
  """

  tokens: np.ndarray
  scored: int


@dataclasses.dataclass(frozen=True)
class Score:
  """What the model gives a continuation.

  Attributes:
    log_likelihood: sum of log p(token), in nats.
    greedy: whether each of its tokens is the model's first choice.
    truncated: how many tokens of the context were cut off.
  """

  log_likelihood: float
  greedy: bool
  truncated: int


class Scorer:
  """Scores continuations; programs are compiled when a width is first used."""

  def __init__(self, job: Job):
    """Compiles nothing yet.

    Raises:
      ValueError: the model cannot score rows.
    """
    check_model(job.config.model.name)
    self._job, data = job, job.config.data
    self._rows, self._length = data.global_batch_size, data.sequence_length
    self._widths = [width for width in doubled(self._length) if self._sharded(width) is not None]
    self._compiled: dict[int, tuple[Any, NamedSharding]] = {}

  def __call__(
    self,
    given: Given,
    continuations: Sequence[Continuation],
    before: Callable[[int, int], bool] | None = None,
  ) -> list[Score] | None:
    """Returns the score of each, in their order; None if it was stopped.

    All processes call it with the same continuations.

    Args:
      given: the parameters, placed as the job's, and the model's other variables.
      continuations: at most `data.sequence_length` tokens of each are scored.
      before: called before each batch with its number, from 0, and their count; False stops.
    """
    scores: list[Score | None] = [None] * len(continuations)
    batches = self._batches(continuations)
    for number, (width, rows) in enumerate(batches):
      if before is not None and not before(number, len(batches)):
        return None
      found = jax.device_get(self._run(given, width, [continuations[row] for row in rows]))
      for place, row in enumerate(rows):
        one = continuations[row]
        scores[row] = Score(
          float(found["log_likelihood"][place]),
          round(float(found["likeliest"][place])) == one.scored,
          max(0, len(one.tokens) - 1 - self._length),
        )
    return scores

  def _batches(self, continuations: Sequence[Continuation]) -> list[tuple[int, list[int]]]:
    """Returns (width, numbers of the rows) of each batch: the longest rows first."""
    sizes = [min(len(one.tokens) - 1, self._length) for one in continuations]
    order = sorted(range(len(sizes)), key=lambda row: -sizes[row])
    found = []
    for start in range(0, len(order), self._rows):
      rows = order[start : start + self._rows]
      found.append((min(width for width in self._widths if width >= sizes[rows[0]]), rows))
    return found

  def _run(self, given: Given, width: int, rows: Sequence[Continuation]) -> Any:
    arrays = {name: np.zeros((self._rows, width), dtype) for name, dtype in _DTYPES.items()}
    for place, one in enumerate(rows):
      tokens = one.tokens[-(self._length + 1) :].astype(np.int32)
      last = len(tokens) - 1
      assert 1 <= one.scored <= last, (one.scored, last)
      arrays["tokens"][place, :last], arrays["targets"][place, :last] = tokens[:-1], tokens[1:]
      arrays["weights"][place, last - one.scored : last] = 1
    if width not in self._compiled:
      self._compiled[width] = self._program(width)
    function, sharding = self._compiled[width]
    batch = {
      name: jax.make_array_from_callback(array.shape, sharding, array.__getitem__)
      for name, array in arrays.items()
    }
    return function(given[0], batch, given[1])

  def _program(self, width: int) -> tuple[Any, NamedSharding]:
    """Returns the program for rows of this width, and the sharding of its batches."""
    job, spec = self._job, self._sharded(width)
    assert spec is not None, width
    sharding = NamedSharding(job.mesh, spec)
    abstract = {
      name: jax.ShapeDtypeStruct((self._rows, width), dtype) for name, dtype in _DTYPES.items()
    }
    placed = job.state_shardings
    compiled = job.compile(
      lambda params, batch, variables: job.program.module(params, variables).row_scores(batch),
      *(job.state.params, abstract, job.state.variables),
      in_shardings=(placed.params, sharding, placed.variables),
      out_shardings=NamedSharding(job.mesh, PartitionSpec()),
    )
    return compiled.function, sharding

  def _sharded(self, width: int) -> PartitionSpec | None:
    """Returns how rows of this width are sharded; None where they cannot be, as the job's are."""
    legend, sizes = self._job.legend, self._job.devices.sizes
    table = self._job.config.partitioning.activations
    parts = max(axes_size(table[legend[letter].name], sizes) for letter in ("T", "R"))
    multiple = 2 * parts if parts > 1 else 1  # a ring takes two pieces of each part
    if width != self._length and width % multiple:
      return None
    found = resolve("BT", (self._rows, width), legend, table, sizes)
    return None if found.failures else found.spec


def check_model(name: str) -> None:
  """Raises ValueError for a model, by its name, that cannot score rows of tokens."""
  build = MODELS[name].build
  if isinstance(build, type) and not isinstance(build, Scoring):
    raise ValueError(
      f"model.name={name!r} gives texts no log-likelihood; this takes a transformer, "
      f"such as --config=FILE:lm (a registered model needs row_scores, see models.Scoring)"
    )


# ------------------------------ texts as continuations ------------------------------


def pair(
  encoder: Tokenizer, context: str, text: str, *, begin: bool, length: int, written: bool = False
) -> Continuation:
  """Returns a text after a context as tokens, divided as lm-evaluation-harness divides them.

  Spaces at the end of the context belong to the continuation, and its tokens are those by which the
  tokens of both together exceed the tokens of the context: what a tokenizer joins across the border
  is scored with the continuation.

  Args:
    encoder: the tokenizer.
    context: may be empty: the continuation then begins a document.
    text: the continuation.
    begin: whether the token that begins a document comes first; it does before an empty context.
    length: the most tokens that are scored.
    written: a chat template has written the context: special tokens are read by their names, and
      none is added.

  Raises:
    ValueError: the continuation is empty or longer than `length`, or a text is not valid.
  """
  bare = context.rstrip()
  text, context = context[len(bare) :] + text, bare
  if written:
    together, before = (encoder.encode_template(one)[0] for one in (context + text, context))
  else:
    together, before = encoder.encode([context + text, context])
  first = [encoder.start] if (begin and not written) or not len(before) else []
  return _checked(np.array([*first, *together], np.uint32), len(together) - len(before), length)


def after(encoder: Tokenizer, tokens: np.ndarray, text: str, *, length: int) -> Continuation:
  """Returns a text after tokens, such as those that a chat template has written."""
  [ids] = encoder.encode([text])
  return _checked(np.concatenate([tokens, ids]), len(ids), length)


def _checked(tokens: np.ndarray, scored: int, length: int) -> Continuation:
  if scored < 1:
    raise ValueError("it adds no token to the context; there is nothing to score")
  if scored > length:
    raise ValueError(
      f"it has {scored:,} tokens, and a row has data.sequence_length={length:,}; raise that, or "
      f"shorten the text"
    )
  return Continuation(tokens, scored)


def windows(encoder: Tokenizer, text: str, length: int) -> Iterator[Continuation]:
  """Yields the parts of a text, each token of which is scored once.

  The first begins a document; each later one has one token of context, and the last as many as fit
  (as in lm-evaluation-harness, with a context of 1).

  Args:
    encoder: the tokenizer.
    text: may be longer than a row.
    length: the most tokens of a row.
  """
  [ids] = encoder.encode([text])
  tokens = np.concatenate([np.array([encoder.start], np.uint32), ids])
  for start in range(0, len(ids), length):
    stop = min(start + length, len(ids))
    yield Continuation(tokens[max(0, stop - length) : stop + 1], stop - start)
