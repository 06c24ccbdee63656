"""Text from a trained decoder: prompts read at once, then one token per step for every row.

Two programs are compiled per `Sampler`: one reads the prompts (prefill), one reads the token
drawn last (decode). Both draw the next token on the devices. Settings are arguments of theirs,
so another temperature or seed compiles nothing.

Tokens are bytes. Byte 0, the end of a document in the prepared data, ends a row; an empty prompt
starts behind one. A prompt and its new tokens together are at most `data.sequence_length`:
rotary positions have no limit, but the model has been trained on those alone.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from inference.sample_token import draw
from inference.text_stream import END, Printer, Row, as_bytes
from models import MODELS, Generator
from partitioning import shardings
from partitioning.dims import axes_size, resolve
from partitioning.rules import Placement
from processes.coordination import current
from training.setup import Job
from training.tasks import TASKS

BYTES = 256

Write = Callable[[int, str], None]  # (number of the prompt, counted from 0; new text)


OPENING = "def "  # what the end of a training run continues


@dataclasses.dataclass(frozen=True)
class Request:
  """What is asked for.

  Attributes:
    prompts: texts, or bytes that need not be complete characters; one may be empty.
    max_new_tokens: the most tokens (bytes) drawn per prompt.
    temperature: divides the logits; 0 takes the likeliest token.
    top_k: draws among the k likeliest; 0 is off.
    top_p: draws among the fewest likeliest that together have this probability; 1 is off.
    seed: of the draws, which depend on (seed, number of the prompt, position) alone.
    stop: texts; a row ends as soon as what was drawn ends with one of them.
  """

  prompts: tuple[str | bytes, ...]
  max_new_tokens: int = 64
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  seed: int = 0
  stop: tuple[str | bytes, ...] = ()

  @property
  def tokens(self) -> list[bytes]:
    """Returns each prompt's tokens, at least one."""
    return [as_bytes(prompt) or bytes([END]) for prompt in self.prompts]


# ------------------------------ what is refused ------------------------------


def check(config: ConfigDict, request: Request) -> None:
  """Finds what cannot be sampled, before anything is read or compiled.

  Args:
    config: finalized and checked.
    request: what is asked for.

  Raises:
    ValueError: with all that is wrong, a line each.
  """
  if not isinstance(MODELS[config.model.name], Generator):
    raise ValueError(
      f"model.name={config.model.name!r} has no next token to draw; sample takes a transformer, "
      f"such as --config=FILE:lm"
    )
  wrong = [*_settings(config, request), *_prompts(config, request)]
  if wrong:
    raise ValueError("the sampling is refused:\n" + "\n".join(f"  {line}" for line in wrong))


def _settings(config: ConfigDict, request: Request) -> Iterator[str]:
  choices = drawable(config)
  if request.max_new_tokens < 1:
    yield f"max_new_tokens={request.max_new_tokens}: at least 1"
  if not 0 <= request.temperature < math.inf:
    yield f"temperature={request.temperature}: 0 (the likeliest token) or more, and finite"
  if not 0 <= request.top_k <= choices:
    yield f"top_k={request.top_k}: 0 (off) to {choices}, the number of tokens there are"
  if not 0 < request.top_p <= 1:
    yield f"top_p={request.top_p}: above 0 and at most 1 (off)"
  if not 0 <= request.seed < 2**32:
    yield f"seed={request.seed}: 0 or more and below 2**32"
  if any(not stop for stop in request.stop):
    yield "stop: an empty text would end every row at once; leave it out"


def _prompts(config: ConfigDict, request: Request) -> Iterator[str]:
  if not request.prompts:
    yield "no prompt; give at least one (an empty one starts a document)"
  limit, new, choices = config.data.sequence_length, request.max_new_tokens, drawable(config)
  for number, tokens in enumerate(request.tokens, 1):
    length = len(tokens)
    if new >= 1 and length + new > limit:
      shorter = [f"shorten the prompt to {limit - new}"] if new < limit else []
      fewer = [f"set max_new_tokens={limit - length}"] if length < limit else []
      ways = ", ".join([*shorter, *fewer, "or raise data.sequence_length for this command"])
      yield (
        f"prompt {number} is {length} tokens (bytes) long, with max_new_tokens={new} together "
        f"{length + new}; the limit is data.sequence_length={limit}, the positions that the model "
        f"was trained on; {ways} (rotary positions have no limit, but longer texts are untrained)"
      )
    if max(tokens) >= choices:
      place = next(i for i, token in enumerate(tokens) if token >= choices)
      yield (
        f"prompt {number} holds byte {tokens[place]} at place {place}; the model knows tokens "
        f"below model.vocabulary_size={choices}"
      )


def drawable(config: ConfigDict) -> int:
  """Returns how many token ids may be drawn: bytes, without the padding of the vocabulary."""
  return min(config.model.vocabulary_size, BYTES)


# ------------------------------ many tokens ------------------------------


class Sampler:
  """Prefill and decode, compiled for a job and for the sizes of a request.

  Attributes:
    rows: B, the prompts and as many dummy rows as the batch axes need.
    prompt_tokens: T of the prefill, the longest prompt.
    max_new_tokens: the most tokens drawn per row.
    placements: `cache/keys`, ...: of the cache, for `partitioning.shardings`.
    seconds: that compiling took.
  """

  def __init__(self, job: Job, request: Request):
    """Checks the request and compiles for its sizes.

    Raises:
      ValueError: as `check`.
    """
    check(job.config, request)
    self.job = job
    self._model = MODELS[job.config.model.name]
    # The one difference from training: one token cannot be split over `context`, whose
    # devices all do the same, nor the residual over `tensor`.
    alone = {job.legend[letter].name: () for letter in ("R", "T")}
    self._table = {**job.config.partitioning.activations, **alone}
    parts = axes_size(self._table[job.legend["B"].name], job.devices.sizes)
    self.rows = -(-len(request.prompts) // parts) * parts
    self.prompt_tokens = max(map(len, request.tokens))
    self.max_new_tokens = request.max_new_tokens
    self.placements = self._place()
    self.prefill, self.decode, self.seconds = self._compile()

  def __call__(
    self, params: Any, request: Request, write: Write | None = None, variables: Any = None
  ) -> list[bytes]:
    """Returns what was drawn for each prompt, without the end of the document.

    Args:
      params: the parameters, placed as the job's.
      request: the one that the sampler was made for, or a smaller one.
      write: is called with text as it comes, in complete characters.
      variables: the model's other variables, where it has any.

    Raises:
      ValueError: as `check`; or a request larger than the sampler was compiled for.
    """
    check(self.job.config, request)
    self._check_size(request)
    rows = [Row(tokens, [as_bytes(stop) for stop in request.stop]) for tokens in request.tokens]
    left = set(range(len(rows)))
    for tokens_B in itertools.islice(
      self._drawn(params, variables, request), request.max_new_tokens
    ):
      for number in sorted(left):
        text = rows[number].add(int(tokens_B[number]))
        if text and write is not None:
          write(number, text)
        if rows[number].done:
          left.remove(number)
      if not left:
        break
    for number in sorted(left):
      if (text := rows[number].end()) and write is not None:
        write(number, text)
    return [bytes(row.drawn) for row in rows]

  def _check_size(self, request: Request) -> None:
    """Raises where a request is larger than the compiled programs."""
    sizes = {
      "prompts": (len(request.prompts), self.rows),
      "tokens in the longest prompt": (max(map(len, request.tokens)), self.prompt_tokens),
      "max_new_tokens": (request.max_new_tokens, self.max_new_tokens),
    }
    if wrong := [f"{name}={n} of {most}" for name, (n, most) in sizes.items() if n > most]:
      raise ValueError(
        f"this sampler was compiled for a smaller request: {', '.join(wrong)}; make another"
      )

  def _drawn(self, params: Any, variables: Any, request: Request) -> Iterator[np.ndarray]:
    """Yields the tokens of each step, [B].

    On accelerators the next step is under way while one is read. On simulated devices one is
    in flight at most: more can deadlock in a rendezvous.
    """
    tokens_BT = np.full((self.rows, self.prompt_tokens), END, np.int32)
    counts_B = np.ones(self.rows, np.int32)
    for row, tokens in enumerate(request.tokens):
      tokens_BT[row, : len(tokens)] = list(tokens)
      counts_B[row] = len(tokens)
    tokens_BT, counts_B, settings = self._put((tokens_BT, counts_B, self._settings(request)))
    more = [variables] if variables else []
    tokens_B, cache = self.prefill(params, tokens_BT, counts_B, settings, *more)
    shardings.check_placed(cache, self.placements, self.job.mesh, "cache/")
    for _ in range(self.max_new_tokens - 1):
      if self.job.devices.simulated:
        yield np.asarray(tokens_B)
      following_B, cache = self.decode(params, tokens_B, cache, settings, *more)
      if not self.job.devices.simulated:
        yield np.asarray(tokens_B)
      tokens_B = following_B
    yield np.asarray(tokens_B)

  def _settings(self, request: Request) -> dict[str, np.ndarray | np.generic]:
    return {
      "temperature": np.float32(request.temperature),
      "top_k": np.int32(request.top_k),
      "top_p": np.float32(request.top_p),
      "seed": np.uint32(request.seed),
      "numbers": np.arange(self.rows, dtype=np.int32),
    }

  def _put(self, tree: Any) -> Any:
    return jax.device_put(tree, NamedSharding(self.job.mesh, PartitionSpec()))

  def _empty_cache(self) -> Any:
    slots = self.prompt_tokens + self.max_new_tokens
    return self._model.empty_cache(self.job.config, self.rows, slots)

  def _place(self) -> dict[str, Placement]:
    """Returns how the cache is sharded: as the activations of the same letters."""
    table = {self.job.legend["L"].name: (), **self._table}
    placements = {}
    for name, array in vars(jax.eval_shape(self._empty_cache)).items():
      letters = self._model.CACHE[name]
      if array is None:  # documents are not kept apart
        continue
      found = resolve(letters, array.shape, self.job.legend, table, self.job.devices.sizes)
      assert not found.failures, found.failures  # judged with the job's activations
      placements[f"cache/{name}"] = Placement(
        f"cache/{name}",
        array.shape,
        array.dtype,
        letters,
        "activations",
        found.spec,
        found.notes,
      )
    return placements

  def _compile(self) -> tuple[Callable, Callable, float]:
    """Compiles prefill and decode, each once; returns both, and the seconds that it took."""
    whole = NamedSharding(self.job.mesh, PartitionSpec())
    params, cache = self.job.state.params, jax.eval_shape(self._empty_cache)
    params_lie = self.job.state_shardings.params
    variables = [self.job.state.variables] if self.job.state.variables else []
    variables_lie = [self.job.state_shardings.variables] if variables else []
    cache_lies = shardings.shardings(cache, self.placements, self.job.mesh, "cache/")
    tokens_BT = np.zeros((self.rows, self.prompt_tokens), np.int32)
    settings = self._settings(Request(()))
    prefill = self.job.compile(
      self._prefill,
      params,
      tokens_BT,
      tokens_BT[:, 0],
      settings,
      *variables,
      activations=self._table,
      in_shardings=(params_lie, whole, whole, whole, *variables_lie),
      out_shardings=(whole, cache_lies),
    )
    decode = self.job.compile(
      self._decode,
      params,
      tokens_BT[:, 0],
      cache,
      settings,
      *variables,
      activations=self._table,
      in_shardings=(params_lie, whole, cache_lies, whole, *variables_lie),
      donate_argnums=2,
      out_shardings=(whole, cache_lies),
    )
    return prefill.function, decode.function, prefill.seconds + decode.seconds

  def _prefill(
    self, params, tokens_BT, counts_B, settings, variables=None
  ) -> tuple[jax.Array, Any]:
    model = self.job.program.module(params, variables)
    return self._next(model, tokens_BT, counts_B, self._empty_cache(), settings)

  def _decode(self, params, tokens_B, cache, settings, variables=None) -> tuple[jax.Array, Any]:
    model = self.job.program.module(params, variables)
    return self._next(model, tokens_B[:, None], jnp.ones_like(tokens_B), cache, settings)

  def _next(self, model, tokens_BT, counts_B, cache, settings) -> tuple[jax.Array, Any]:
    """Reads tokens and draws the next of each row."""
    logits_BV, cache = model.extend(tokens_BT, counts_B, cache)
    # Each device draws for its own rows, and needs all of their logits.
    batch = self.placements["cache/lengths"].spec
    logits_BV = jax.lax.with_sharding_constraint(logits_BV, PartitionSpec(*batch, None))
    return draw(logits_BV[:, : drawable(self.job.config)], cache.lengths, settings), cache


def show(job: Job, params: Any, request: Request, variables: Any = None) -> None:
  """Prints the prompts and what the model draws after them, as it comes."""
  sampler = Sampler(job, request)
  if not current().first:  # all compute, process 0 prints
    sampler(params, request, variables=variables)
    return
  printer = Printer(request.prompts)
  sampler(params, request, printer, variables)
  printer.close()


def check_first_words(config: ConfigDict) -> None:
  """Raises ValueError where a run could not draw what `evaluation.sample_tokens` asks for."""
  try:
    if request := first_words(config):
      check(config, request)
  except ValueError as error:
    tokens = config.evaluation.sample_tokens
    raise ValueError(f"evaluation.sample_tokens={tokens} (0 turns it off): {error}") from error


def first_words(config: ConfigDict) -> Request | None:
  """Returns what a run ends with: a short continuation, or None where there is no text to draw."""
  room = config.data.sequence_length - len(OPENING)
  tokens = min(config.evaluation.sample_tokens, room)
  if not TASKS[config.task].of_tokens or tokens < 1:
    return None
  return Request((OPENING,), max_new_tokens=tokens, temperature=0.8)
