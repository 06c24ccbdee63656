"""Generation with a trained decoder: prefill of the prompts, then one token per step and row.

Prefill reads prompts, each once for all rows that continue it; decode reads each row's last token.
The next token is drawn on the devices. Settings are arguments, so another temperature or seed needs
no compilation.

The token that ends a document ends a row. A prompt and its new tokens together are at most
`data.sequence_length`: rotary positions have no limit, but the model has been trained on those
alone.

The next token is sampled by temperature, top-k and top-p, the same on every mesh.
"""

import codecs
import collections
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from inference.request import Prompt, Request, TextSpec, as_bytes, check, text_spec
from input_pipeline.text.tokenizer import ByteTokenizer, Tokenizer
from models import MODELS, model_spec
from partitioning import rules
from partitioning.rules import Placement, axes_size, resolve
from processes.coordination import current
from training.setup import Job

# ------------------------------ the next token ------------------------------


def filter_logits(
  logits_BV: Float[Array, "B V"],
  *,
  temperature: Float[Array, ""],
  top_k: Int[Array, ""],
  top_p: Float[Array, ""],
) -> Float[Array, "B V"]:
  """Returns (logits - the largest) / temperature, with excluded tokens set to -inf.

  First the `top_k` likeliest are kept (0: all), then of these the smallest set of likeliest tokens
  whose renormalized probabilities reach `top_p` (1: all; arXiv:1904.09751). Tokens as likely as the
  last one kept are also kept, so no id is preferred.

  Args:
    logits_BV: -inf is allowed, though not throughout a row.
    temperature: above 0.
    top_k: 0 to V.
    top_p: above 0, at most 1.
  """
  dtype = logits_BV.dtype
  largest_B1 = jnp.max(logits_BV, axis=-1, keepdims=True)
  scaled_BV = (logits_BV - largest_B1) / temperature.astype(dtype)  # so nothing overflows to inf
  kept = functools.partial(_likeliest, top_k=top_k, top_p=top_p)
  # Sorting all tokens may take as long as a small model.
  return jax.lax.cond((top_k == 0) & (top_p >= 1), lambda x_BV: x_BV, kept, scaled_BV)


def _likeliest(
  scaled_BV: Float[Array, "B V"], top_k: Int[Array, ""], top_p: Float[Array, ""]
) -> Float[Array, "B V"]:
  dtype = scaled_BV.dtype
  sorted_BV = jnp.sort(scaled_BV, axis=-1, descending=True)
  ranks_V = jnp.arange(scaled_BV.shape[-1], dtype=top_k.dtype)
  kept_V = (top_k == 0) | (ranks_V < top_k)
  sorted_BV = jnp.where(kept_V[None], sorted_BV, -jnp.inf)
  probabilities_BV = jax.nn.softmax(sorted_BV, axis=-1)
  before_BV = jnp.cumsum(probabilities_BV, axis=-1) - probabilities_BV
  # A separate case: rounded sums reach 1 before the last token.
  kept_BV = kept_V[None] & ((before_BV < top_p.astype(dtype)) | (top_p >= 1))
  cutoff_B1 = jnp.min(jnp.where(kept_BV, sorted_BV, jnp.inf), axis=-1, keepdims=True)
  return jnp.where(scaled_BV >= cutoff_B1, scaled_BV, -jnp.inf)


def draw_token(
  logits_BV: Float[Array, "B V"], positions_B: Int[Array, " B"], settings: Mapping[str, Array]
) -> Int[Array, " B"]:
  """Returns each row's next token.

  A row's random keys are folded from (seed, number of the prompt, position), independent of the
  batch, padding and mesh.

  Args:
    logits_BV: of the tokens that may be drawn.
    positions_B: int32, of the tokens to draw.
    settings: as `Sampler` passes them.
  """

  def noise(number: Array, position: Array) -> Array:
    key = jax.random.fold_in(jax.random.key(settings["seed"]), number)
    key = jax.random.fold_in(key, position)
    return jax.random.gumbel(key, logits_BV.shape[1:], logits_BV.dtype)

  temperature = settings["temperature"]
  kept_BV = filter_logits(
    logits_BV,
    temperature=jnp.maximum(temperature, jnp.finfo(temperature.dtype).tiny),
    top_k=settings["top_k"],
    top_p=settings["top_p"],
  )
  # Gumbel-max: the argmax of logit + Gumbel noise is a sample of the softmax (arXiv:1411.0030, 2).
  noisy_BV = kept_BV + jax.vmap(noise)(settings["numbers"], positions_B)
  return jax.lax.argmax(jnp.where(temperature == 0, logits_BV, noisy_BV), 1, jnp.int32)


def token_log_probabilities(
  logits_BV: Float[Array, "B V"], drawn_B: Int[Array, " B"], temperature: Float[Array, ""]
) -> Float[Array, " B"]:
  """Returns log softmax(logits / temperature) of a token of each row, over all tokens.

  That of what the model gives, whatever top-k and top-p have left to be drawn. Where the
  temperature is 0, of the logits as they are.
  """
  divisor = jnp.where(temperature == 0, 1, temperature).astype(logits_BV.dtype)
  log_probabilities_BV = jax.nn.log_softmax(logits_BV / divisor, axis=-1)
  return jnp.take_along_axis(log_probabilities_BV, drawn_B[:, None], axis=-1)[:, 0]


# ------------------------------ text as it is drawn ------------------------------

# Escaped when printed: a model's bytes may be control sequences of a terminal.
_CONTROLS = {
  code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"
}


class Row:
  """The generated bytes of one prompt, and their text.

  Attributes:
    drawn: the bytes, up to the end of a stop text; where these are hidden, up to its beginning.
    done: True once a token or a stop text has ended the row.
  """

  def __init__(
    self,
    prompt: bytes,
    stop: Sequence[bytes],
    tokenizer: Tokenizer | None = None,
    stop_tokens: Sequence[int] = (),
    *,
    hidden: bool = False,
  ):
    """Starts behind a prompt, which may end within a character; by default, tokens are bytes.

    Args:
      prompt: the bytes before.
      stop: texts that end the row.
      tokenizer: of the tokens.
      stop_tokens: that end the row besides the tokenizer's own.
      hidden: stop texts are no part of the row; what may begin one is held back.
    """
    self.drawn = bytearray()
    self.done = False
    self._begun, self._hidden, self._shown = bool(prompt), hidden, 0
    self._stop = tuple(stop)
    self._tokenizer = tokenizer or ByteTokenizer()
    self._ends = {self._tokenizer.end, *stop_tokens}
    self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
    self._decoder.decode(prompt)

  def add(self, token: int) -> str:
    """Takes the next token and returns the text that is complete by now, often empty."""
    if token in self._ends:
      return self.end()
    # Only in front of a text is a token that begins a word without its space.
    new = self._tokenizer.token_bytes(token) if self._begun else self._tokenizer.decode([token])
    self._begun, before = True, len(self.drawn)
    self.drawn += new
    if found := self._stopped(before):
      end, start = found
      del self.drawn[start if self._hidden else end :]
      return self.end()
    shown, self._shown = self._shown, len(self.drawn) - self._held()
    return self._decoder.decode(bytes(self.drawn[shown : self._shown]))

  def _stopped(self, before: int) -> tuple[int, int] | None:
    """Returns end and start of the first stop text that bytes from `before` on complete."""
    places = []
    for stop in self._stop:
      found = self.drawn.find(stop, max(0, before - len(stop) + 1))
      if found >= 0:
        places.append((found + len(stop), found))
    return min(places, default=None)

  def _held(self) -> int:
    """Returns how many of the last bytes may begin a hidden stop text."""
    parts = (stop[:size] for stop in self._stop for size in range(1, len(stop)))
    return max((len(x) for x in parts if self._hidden and self.drawn.endswith(x)), default=0)

  def end(self) -> str:
    """Ends the row; returns the rest of its text, with a mark if it ends within a character."""
    self.done = True
    return self._decoder.decode(bytes(self.drawn[self._shown :]), final=True)


class Pace:
  """How fast tokens are generated.

  Attributes:
    tokens: so far.
  """

  def __init__(self, clock: Callable[[], float] = time.monotonic):
    """Starts when the prompt is given; `clock` is in seconds."""
    self.tokens, self._beside = 0, 0
    self._clock = clock
    self._began = self._first = self._last = clock()

  def tick(self, count: int = 1) -> None:
    """Counts tokens that have just been generated, at the same time."""
    self._last = self._clock()
    if not self.tokens:
      self._first, self._beside = self._last, count
    self.tokens += count

  @property
  def rate(self) -> float:
    """Returns tokens per second, of all from when the prompt was given."""
    return self.tokens / max(self._last - self._began, 1e-9)

  def text(self) -> str:
    """Returns `64 tokens, 31.2 tokens/s; the first after 0.12 s`; the rate is of the others."""
    if not self.tokens:
      return "no tokens"
    later, seconds = self.tokens - self._beside, self._last - self._first
    rate = f", {later / seconds:,.1f} tokens/s" if later and seconds > 0 else ""
    s = "s" * (self.tokens != 1)
    return f"{self.tokens:,} token{s}{rate}; the first after {self._first - self._began:.2f} s"


class Printer:
  r"""Prints prompts and their continuations as they are generated; the `write` of a `Sampler`.

  The text of a single prompt appears byte by byte; of several, in complete lines with their number.
  Control characters are shown as `\x1b`.
  """

  def __init__(self, prompts: Sequence[str | bytes], stream: TextIO | None = None):
    """Prints the prompts to `stream` (by default stdout); of several, all but their last line."""
    self._stream = stream or sys.stdout
    self._lines = [""] * len(prompts)
    for number, prompt in enumerate(prompts):
      decoder = codecs.getincrementaldecoder("utf-8")("replace")  # leaves the torn end to `Row`
      self(number, decoder.decode(as_bytes(prompt)))

  def __call__(self, number: int, text: str) -> None:
    """Prints the text of one prompt, its number counted from 0."""
    if len(self._lines) > 1:
      whole, newline, self._lines[number] = (self._lines[number] + text).rpartition("\n")
      lines = whole.split("\n") if newline else []
      text = "".join(f"[{number + 1}] {line}\n" for line in lines)
    text = text.translate(_CONTROLS)
    encoding = self._stream.encoding or "utf-8"
    self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    self._stream.flush()

  def close(self) -> None:
    """Ends the last line of each."""
    if len(self._lines) == 1:
      self(0, "\n")
    for number, line in enumerate(self._lines):
      if len(self._lines) > 1 and line:
        self(number, "\n")


# ------------------------------ whole texts ------------------------------

Write = Callable[[int, str], None]  # (number of the prompt, counted from 0; new text)
# An eighth of the rows is refilled at a time, or a sixteenth where the next prompt has been read.
_REFILLS, _REFILLS_OF_READ = 8, 16


@dataclasses.dataclass(frozen=True)
class TrainedModel:
  """A model that reads and draws texts.

  Attributes:
    job: whose mesh, batch size and sequence length are used.
    params: the parameters, placed as the job's.
    variables: the model's other variables, where it has any.
  """

  job: Job
  params: Any
  variables: Any = None

  @property
  def given(self) -> "Given":
    """Returns parameters and variables."""
    return self.params, self.variables or {}

  @functools.cached_property
  def spec(self) -> TextSpec:
    """Returns what it reads and draws."""
    return text_spec(self.job.config)


Given = tuple[Any, Any]  # parameters, placed as a job's, and the model's other variables or {}
Take = Callable[[int, int, float], bool]  # (number of the prompt, token, log p) -> goes it on?
Before = Callable[[int, int], bool]  # (prompts that were begun, of how many) -> go on?
Tokens = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Prompts:
  """Prompts that have been read.

  Attributes:
    places: of each part of the rows, a prompt's place among those of its part.
    sizes: (R, T), as many prompts for each part, and the slots of each.
    read: logits [R, V] behind the prompts, and their cache.
  """

  places: list[dict[Tokens, int]]
  sizes: tuple[int, int]
  read: tuple[jax.Array, Any]


class TokenSampler:
  """Continues prompts of token ids in rows that decode together, compiled for a job.

  A row whose text has ended takes the next prompt. A text is a function of the seed, its number and
  the parameters: the rows beside it, their order and the padding have no part in it.

  Attributes:
    rows: B, those that decode together: a multiple of the parts that the batch axes make.
    slots: S, the most tokens of a row.
    activations: dim name -> mesh axes, of a single token.
    placements: `cache/keys`, ...: of the cache, for `partitioning.rules`.
    empty_cache, decode: compiled programs.
    pace: of the last call, over all prompts.
  """

  def __init__(
    self, job: Job, *, rows: int, slots: int, widths: Sequence[int] = (), choices: int = 0
  ):
    """Compiles decode; prefill and filling of rows where their sizes are first used.

    Args:
      job: whose model and mesh are used.
      rows: at least so many; the batch axes may make them more.
      slots: of the cache of a row.
      widths: tokens to which prompts are padded, in rising order.
      choices: the token ids below may be drawn; 0: those that the tokenizer has.
    """
    self.job, self.spec = job, text_spec(job.config)
    self._model, self._model_spec = MODELS[self.spec.model], model_spec(job.config)
    # The only difference from training: a single token cannot be split over `context`, whose
    # devices repeat the work, nor the residual over `tensor`.
    alone = {job.legend[letter].name: () for letter in ("R", "T")}
    self.activations = {**job.config.partitioning.activations, **alone}
    self._parts = axes_size(self.activations[job.legend["B"].name], job.devices.sizes)
    self.rows = -(-rows // self._parts) * self._parts
    self.slots, self._widths, self._choices = slots, widths, choices or self.spec.drawable
    self.placements = self._place()
    self.pace = Pace()
    self._programs: dict[tuple, Callable] = {}
    self.empty_cache, self.decode = self._compile()

  def run(
    self,
    given: Given,
    prompts: Sequence[np.ndarray],
    request: Request,
    take: Take,
    before: Before | None = None,
    numbers: Sequence[int] | None = None,
  ) -> bool:
    """Continues each prompt for as long as `take` says; returns whether `before` let it finish.

    Rows are refilled several at a time, which costs a part of a step of decode. Prompts that were
    read are kept while the next prompt is one of them: of a group of answers each is read once or
    twice. They take no more memory than the prefill that read them. On accelerators the next step
    runs while one is read. On simulated devices at most one is in flight: more can deadlock in a
    rendezvous.

    Args:
      given: the parameters, placed as the job's, and the model's other variables.
      prompts: the token ids of each.
      request: the settings of the draws.
      take: called with each token, its prompt's number and its log-probability, prompt by prompt
        in the order of the rows.
      before: called before each prefill; False stops.
      numbers: of the prompts in the draws; by default from 0.
    """
    numbers = range(len(prompts)) if numbers is None else numbers
    self.pace, late = Pace(), 0 if self.job.devices.simulated else 1
    waiting, owners_B = collections.deque(range(len(prompts))), np.full(self.rows, -1)
    settings, numbers_B = self._put(self._settings(request)), np.zeros(self.rows, np.int32)
    cache, drawn_B1 = self.empty_cache(), self._put(np.zeros((self.rows, 1), np.int32))
    ones_B = self._put(np.ones(self.rows, np.int32))
    going, unread = [True] * len(prompts), collections.deque()
    texts, known = [tuple(one.tolist()) for one in prompts], None
    while waiting or (owners_B >= 0).any():
      free = np.flatnonzero(owners_B < 0)
      least = -(-self.rows // (_REFILLS_OF_READ if known else _REFILLS))
      if waiting and len(free) >= min(len(waiting), least):
        if before is not None and not before(len(prompts) - len(waiting), len(prompts)):
          return False
        filled = {row: waiting.popleft() for row in free[: len(waiting)].tolist()}
        owners_B[[*filled]] = [*filled.values()]
        numbers_B[[*filled]] = [numbers[own] for own in filled.values()]
        settings = {**settings, "numbers": self._put(numbers_B)}
        chosen = {row: texts[own] for row, own in filled.items()}
        if not known or (source_B := self._source(known, chosen)) is None:
          known = None  # freed before others are read
          known = self._prefill(given, chosen)
          source_B = self._source(known, chosen)
        inputs = *known.read, self._put(source_B), drawn_B1, cache, settings
        out = self._run_compiled(self._fill, known.sizes, inputs, self._drawn, donate_argnums=4)
        if not waiting or not any(texts[waiting[0]] in part for part in known.places):
          known = None
        read_B = np.where(source_B >= 0, owners_B, -1)
      else:
        out = self.decode(given[0], drawn_B1, ones_B, cache, settings, given[1])
        read_B = owners_B.copy()
      drawn_B1, _, cache = out
      unread.append((read_B, *out[:2]))
      while len(unread) > late:
        self._read_out(*unread.popleft(), owners_B, going, take)
    return True

  def _read_out(
    self,
    read_B: np.ndarray,
    drawn_B1: jax.Array,
    log_probabilities_B: jax.Array,
    owners_B: np.ndarray,
    going: list[bool],
    take: Take,
  ) -> None:
    """Gives what was drawn to those who still go on; frees the rows of those who do not."""
    drawn, probable = np.asarray(drawn_B1)[:, 0].tolist(), np.asarray(log_probabilities_B).tolist()
    owners = [(row, own) for row, own in enumerate(read_B.tolist()) if own >= 0 and going[own]]
    self.pace.tick(len(owners))
    for row, own in owners:
      going[own] = take(own, drawn[row], probable[row])
      if not going[own]:
        owners_B[row] = -1

  def _source(self, known: _Prompts, prompts: Mapping[int, Tokens]) -> np.ndarray | None:
    """Returns of each row the place of its prompt, -1: it has none; None if one was not read."""
    source_B, each = np.full(self.rows, -1, np.int32), self.rows // self._parts
    for row, tokens in prompts.items():
      part = known.places[row // each]
      if tokens not in part:
        return None
      source_B[row] = part[tokens]
    return source_B

  def _prefill(self, given: Given, prompts: Mapping[int, Tokens]) -> _Prompts:
    """Reads prompts (row -> tokens): of equal ones in a part of the rows, one."""
    places, each = [{} for _ in range(self._parts)], self.rows // self._parts
    for row, tokens in prompts.items():
      places[row // each].setdefault(tokens, len(places[row // each]))
    longest, most = max(map(len, prompts.values())), max(map(len, places))
    count = min(each, 1 << (most - 1).bit_length())  # a power of two, so that programs are few
    width = min(next(one for one in self._widths if one >= longest), self.slots)
    tokens_RT = np.full((self._parts * count, width), self.spec.tokenizer.end, np.int32)
    counts_R = np.ones(self._parts * count, np.int32)
    for part, found in enumerate(places):
      for tokens, number in found.items():
        place = part * count + number
        tokens_RT[place, : len(tokens)], counts_R[place] = tokens, len(tokens)
    inputs = given[0], *self._put((tokens_RT, counts_R)), given[1]
    sizes = tokens_RT.shape

    def out() -> Any:
      batch = self.placements["cache/lengths"].spec
      return NamedSharding(self.job.mesh, PartitionSpec(*batch, None)), self._sharded_cache(*sizes)

    read = self._run_compiled(self._read_prompts, sizes, inputs, out)
    return _Prompts(
      places, sizes, jax.block_until_ready(read) if self.job.devices.simulated else read
    )

  def _run_compiled(
    self, function: Callable, sizes: tuple, given: tuple, out: Callable[[], Any], **jit: Any
  ) -> Any:
    """Runs a function of placed arrays, which is compiled where the sizes are first used."""
    if (function, sizes) not in self._programs:
      jit = {"activations": self.activations, "out_shardings": out(), **jit}
      self._programs[function, sizes] = self.job.compile(function, *given, **jit).function
    return self._programs[function, sizes](*given)

  # ------------------------------ programs ------------------------------

  def _settings(self, request: Request) -> dict[str, np.ndarray | np.generic]:
    return {
      # As wide as the trainer has it, which divides the logits of the loss by it.
      "temperature": jax.dtypes.canonicalize_dtype(np.float64).type(request.temperature),
      "top_k": np.int32(request.top_k),
      "top_p": np.float32(request.top_p),
      "seed": np.uint32(request.seed),
      "numbers": np.arange(self.rows, dtype=np.int32),
    }

  def _put(self, tree: Any) -> Any:
    return jax.device_put(tree, self._replicated())

  def _replicated(self) -> NamedSharding:
    return NamedSharding(self.job.mesh, PartitionSpec())

  def _empty_cache(self, rows: int = 0, slots: int = 0) -> Any:
    return self._model.empty_cache(self._model_spec, rows or self.rows, slots or self.slots)

  def _place(self) -> dict[str, Placement]:
    """Returns how the cache is sharded: as the activations of the same letters."""
    legend, parameters = self.job.legend, self.job.config.partitioning.parameters
    split = {legend[x].name: parameters[legend[x].name] for x in "Ly" if x in legend}
    if "Z" in legend:  # one cache has its layers and those with experts
      legend = legend | {x: dataclasses.replace(legend[x], size=None) for x in "Ly"}
      split[legend["L"].name] = parameters[legend["Z"].name]
    table = {**split, **self.activations}
    placements = {}
    for name, array in jax.eval_shape(self._empty_cache).items():
      letters = self._model.CACHE[name]
      found = resolve(letters, array.shape, legend, table, self.job.devices.sizes)
      assert not found.failures, found.failures  # checked with the job's activations
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

  def _compile(self) -> tuple[Callable, Callable]:
    """Returns the programs of an empty cache and of decode."""
    cache = self._sharded_cache()
    return self.job.compile(self._empty_cache, out_shardings=cache).function, self._program(1)

  def _sharded_cache(self, *sizes: int) -> Any:
    empty = jax.eval_shape(functools.partial(self._empty_cache, *sizes))
    return rules.shardings(empty, self.placements, self.job.mesh, "cache/")

  def _program(self, width: int) -> Callable:
    """Compiles reading so many tokens of each row, behind those in its cache."""
    state, placed, whole = self.job.state, self.job.state_shardings, self._replicated()
    cache, (*_, sharded) = jax.eval_shape(self._empty_cache), self._drawn()
    tokens_BT = np.zeros((self.rows, width), np.int32)
    given = tokens_BT, tokens_BT[:, 0], cache, self._settings(Request(()))
    return self.job.compile(
      self._read,
      *(state.params, *given, state.variables),
      activations=self.activations,
      in_shardings=(placed.params, whole, whole, sharded, whole, placed.variables),
      donate_argnums=3,
      out_shardings=self._drawn(),
    ).function

  def _drawn(self) -> tuple[NamedSharding, NamedSharding, Any]:
    """Returns the shardings of tokens, of their log-probabilities and of the cache of the rows."""
    return self._replicated(), self._replicated(), self._sharded_cache()

  def _read(
    self, params, tokens_BT, counts_B, cache, settings, variables
  ) -> tuple[jax.Array, jax.Array, Any]:
    """Reads tokens into a cache and draws the next one of each row, [B, 1], with log p [B]."""
    model = self.job.program.module(params, variables)
    logits_BV, cache = model.extend(tokens_BT, counts_B, cache)
    return *self._draw(logits_BV, cache, settings), cache

  def _read_prompts(self, params, tokens_RT, counts_R, variables) -> tuple[jax.Array, Any]:
    """Returns the logits [R, V] behind prompts, as many for each part of the rows; their cache."""
    model = self.job.program.module(params, variables)
    return model.extend(tokens_RT, counts_R, self._empty_cache(*tokens_RT.shape))

  def _fill(
    self, logits_RV, new, source_B, drawn_B1, cache, settings
  ) -> tuple[jax.Array, jax.Array, Any]:
    """Puts prompts that were read into rows, and draws as `_read`; other rows are unchanged.

    Args:
      logits_RV: behind the prompts.
      new: their cache, as `_read_prompts` gives it.
      source_B: of each row, the place of its prompt among those of its part; -1: it has no new one.
      drawn_B1: the tokens that rows have drawn last.
      cache: of the rows.
      settings: of the draws.
    """
    for name, old in cache.items():
      letters = self._model.CACHE[name]
      found = self._spread(new[name], source_B, letters.index("B"))
      kept = jax.lax.slice(old, [0] * old.ndim, found.shape)  # the first slots
      is_new = (source_B >= 0).reshape([-1 if letter == "B" else 1 for letter in letters])
      found = jnp.where(is_new, found, kept)
      cache[name] = jax.lax.dynamic_update_slice(old, found, [0] * old.ndim)
    drawn, log_probabilities_B = self._draw(self._spread(logits_RV, source_B, 0), cache, settings)
    return jnp.where(source_B[:, None] >= 0, drawn, drawn_B1), log_probabilities_B, cache

  def _spread(self, x: jax.Array, source_B: jax.Array, axis: int) -> jax.Array:
    """Returns an array of prompts as one of rows, part by part, so that no device needs another."""
    parts, shape = self._parts, x.shape
    x = x.reshape(*shape[:axis], parts, -1, *shape[axis + 1 :])
    one = functools.partial(jnp.take, axis=axis, mode="clip")
    found = jax.vmap(one, (axis, 0), axis)(x, source_B.reshape(parts, -1))
    return found.reshape(*shape[:axis], self.rows, *shape[axis + 1 :])

  def _draw(self, logits_BV, cache, settings) -> tuple[jax.Array, jax.Array]:
    # Each device draws for its own rows, and needs all of their logits.
    batch = self.placements["cache/lengths"].spec
    logits_BV = jax.lax.with_sharding_constraint(logits_BV, PartitionSpec(*batch, None))
    drawn_B = draw_token(logits_BV[:, : self._choices], cache["lengths"], settings)
    of_drawn_B = token_log_probabilities(logits_BV, drawn_B, settings["temperature"])
    return drawn_B[:, None], of_drawn_B


class Sampler(TokenSampler):
  """Continues the texts of a request, as they are drawn; compiled for its sizes."""

  def __init__(self, job: Job, request: Request):
    """Checks the request and compiles for its sizes.

    Args:
      job: whose model and mesh are used.
      request: the largest one.

    Raises:
      ValueError: as `check`.
    """
    spec = text_spec(job.config)
    check(spec, request)
    longest = max(map(len, spec.encoded(request.prompts)))
    slots = longest + request.max_new_tokens
    super().__init__(job, rows=len(request.prompts), slots=slots, widths=[longest])

  def __call__(
    self, params: Any, request: Request, write: Write | None = None, variables: Any = None
  ) -> list[bytes]:
    """Returns the generated bytes of each prompt, without the end of the document.

    Args:
      params: the parameters, placed as the job's.
      request: the one that the sampler was made for, or a smaller one.
      write: called with text as it is generated, in complete characters.
      variables: the model's other variables, where it has any.
    """
    prompts = self.spec.encoded(request.prompts)
    texts = Texts(self.spec, [request] * len(prompts), request.prompts, write)
    self.run((params, variables or {}), prompts, request, texts.take)
    return texts.drawn()


class Texts:
  """The texts of prompts as they are drawn; `take` is that of `TokenSampler.run`."""

  def __init__(
    self,
    spec: TextSpec,
    requests: Sequence[Request],
    prompts: Sequence[Prompt],
    write: Write | None = None,
  ):
    """Begins behind the prompts, each of which has a request with what ends it."""
    self._write = write or (lambda number, text: None)
    self._left = [request.max_new_tokens for request in requests]
    coder = spec.tokenizer
    self._rows = [
      Row(
        coder.decode(prompt) if isinstance(prompt, tuple) else as_bytes(prompt),
        [as_bytes(stop) for stop in request.stop],
        coder,
        request.stop_tokens,
      )
      for request, prompt in zip(requests, prompts, strict=True)
    ]

  def take(self, number: int, token: int, _: float) -> bool:
    """Adds a token to a text; returns whether it goes on."""
    row = self._rows[number]
    text = row.add(token)
    self._left[number] -= 1
    if not self._left[number] and not row.done:
      text += row.end()
    if text:
      self._write(number, text)
    return not row.done

  def drawn(self) -> list[bytes]:
    """Returns the bytes of each."""
    return [bytes(row.drawn) for row in self._rows]


def show(
  model: TrainedModel, request: Request, sampler: Sampler | None = None, *, pace: bool = False
) -> list[bytes]:
  """Prints the prompts and their continuations, as they are generated; returns the continuations.

  Args:
    model: the model.
    request: the prompts.
    sampler: one that was compiled for the request; by default one is compiled.
    pace: also print how fast, to standard error.
  """
  sampler = sampler or Sampler(model.job, request)
  if not current().first:  # all compute, process 0 prints
    return sampler(model.params, request, variables=model.variables)
  printer = Printer([*map(model.spec.shown, request.prompts)])
  drawn = sampler(model.params, request, printer, model.variables)
  printer.close()
  if pace:
    print(f"[{sampler.pace.text()}]", file=sys.stderr, flush=True)
  return drawn


# ------------------------------ many prompts ------------------------------

_NARROWEST = 32  # tokens; narrower programs save less than they take to compile


def doubled(length: int) -> list[int]:
  """Returns a length, a half of it, a quarter ..., the shortest first."""
  found = [length]
  while found[-1] % 2 == 0 and found[-1] // 2 >= _NARROWEST:
    found.append(found[-1] // 2)
  return found[::-1]


def fitted(tokens: np.ndarray, length: int, max_new_tokens: int, **more: Any) -> Request:
  """Returns a request for one prompt, cut on the left so that all fits a row; greedy by default.

  Args:
    tokens: of the prompt, at least one.
    length: of a row, in tokens.
    max_new_tokens: the most tokens drawn.
    **more: further fields of the request; what is drawn ends before the first text of `stop`.

  Raises:
    ValueError: no token of the prompt would be left.
  """
  fits = length - max_new_tokens
  if fits < 1:
    raise ValueError(
      f"max_new_tokens={max_new_tokens} leaves no place for a prompt in a row of "
      f"data.sequence_length={length}; raise that, or generate fewer tokens"
    )
  prompt = tuple(tokens[-fits:].tolist())
  return Request((prompt,), max_new_tokens, **{"temperature": 0.0, **more})


class BatchGenerator:
  """Continues prompts of any lengths, `data.global_batch_size` at a time."""

  def __init__(self, job: Job):
    """Compiles nothing yet."""
    self._job, self._samplers = job, {}
    self.spec = text_spec(job.config)

  def __call__(
    self, given: Given, requests: Sequence[Request], before: Before | None = None
  ) -> list[str] | None:
    """Returns the text drawn after each prompt; None if it was stopped.

    All processes call it with the same requests. Programs are compiled when sizes are first used.

    Args:
      given: parameters and variables, as `TokenSampler.run` takes them.
      requests: of `fitted`.
      before: called with how many prompts are done, and of how many; False stops.
    """
    texts, begun = [""] * len(requests), 0
    for settings, numbers in self._alike(requests):
      chosen = [requests[number] for number in numbers]
      prompts = [np.array(request.prompts[0], np.uint32) for request in chosen]
      taken = Texts(self.spec, chosen, [request.prompts[0] for request in chosen])
      tick = before and (lambda done, _, begun=begun: before(begun + done, len(requests)))
      if not self._sampler(chosen).run(given, prompts, settings, taken.take, tick, numbers):
        return None
      begun += len(chosen)
      for number, found in zip(numbers, taken.drawn(), strict=True):
        texts[number] = before_first(found.decode(errors="replace"), requests[number].stop)
    return texts

  def _alike(self, requests: Sequence[Request]) -> Iterator[tuple[Request, list[int]]]:
    """Yields settings of draws, and the numbers of the prompts with them, the longest first."""
    groups: dict[Request, list[int]] = {}
    for number in sorted(range(len(requests)), key=lambda one: -len(requests[one].prompts[0])):
      settings = dataclasses.replace(requests[number], prompts=(), stop=(), max_new_tokens=1)
      groups.setdefault(settings, []).append(number)
    yield from groups.items()

  def _sampler(self, requests: Sequence[Request]) -> TokenSampler:
    """Returns a sampler whose rows have room for each of them."""
    length, most = self.spec.sequence_length, self._job.config.data.global_batch_size
    slots = max(len(request.prompts[0]) + request.max_new_tokens for request in requests)
    rows, slots = min(most, len(requests)), next(one for one in doubled(length) if one >= slots)
    if (rows, slots) not in self._samplers:
      made = TokenSampler(self._job, rows=rows, slots=slots, widths=doubled(length))
      self._samplers[rows, slots] = made
    return self._samplers[rows, slots]


def before_first(text: str, stop: Sequence[str]) -> str:
  """Returns a text without the first of these and what follows."""
  for one in stop:
    text = text.partition(one)[0]
  return text
