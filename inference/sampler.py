"""Text generation with a trained decoder: prefill of the prompts, then one token per step and row.

Two programs are compiled per `Sampler`: prefill reads the prompts, decode the last token. Both draw
the next token on the devices. Settings are arguments, so another temperature or seed needs no
compilation.

The token that ends a document ends a row. A prompt and its new tokens together are at most
`data.sequence_length`: rotary positions have no limit, but the model has been trained on those
alone.

The next token is sampled by temperature, top-k and top-p, the same on every mesh.
"""

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from inference.request import Request, check, drawable, encoded, tokenizer_of
from inference.text_stream import Pace, Printer, Row, as_bytes
from models import MODELS, model_spec
from partitioning import shardings
from partitioning.dims import axes_size, resolve
from partitioning.rules import Placement
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
  sorted_BV = jnp.sort(scaled_BV, axis=-1, descending=True)
  ranks_V = jnp.arange(logits_BV.shape[-1], dtype=top_k.dtype)
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


# ------------------------------ whole texts ------------------------------

Write = Callable[[int, str], None]  # (number of the prompt, counted from 0; new text)


class Sampler:
  """Prefill and decode, compiled for a job and for the sizes of a request.

  Attributes:
    tokenizer: of the job's data.
    rows: B, the prompts and as many dummy rows as the batch axes need.
    prompt_tokens: T of the prefill, the longest prompt.
    max_new_tokens: the most tokens drawn per row.
    placements: `cache/keys`, ...: of the cache, for `partitioning.shardings`.
    seconds: that compiling took.
    pace: of the last call, over all prompts.
  """

  def __init__(self, job: Job, request: Request, prompt_tokens: int = 0, rows: int = 0):
    """Checks the request and compiles for its sizes.

    Args:
      job: whose model and mesh are used.
      request: the largest one.
      prompt_tokens: the most of a prompt; 0: as many as the longest of the request has.
      rows: the most prompts; 0: as many as the request has.

    Raises:
      ValueError: as `check`.
    """
    check(job.config, request)
    self.job = job
    self._model, self._spec = MODELS[job.config.model.name], model_spec(job.config)
    # The only difference from training: a single token cannot be split over `context`, whose
    # devices repeat the work, nor the residual over `tensor`.
    alone = {job.legend[letter].name: () for letter in ("R", "T")}
    self._table = {**job.config.partitioning.activations, **alone}
    parts = axes_size(self._table[job.legend["B"].name], job.devices.sizes)
    self.rows = -(-max(rows, len(request.prompts)) // parts) * parts
    self.tokenizer = tokenizer_of(job.config)
    self.prompt_tokens = max(prompt_tokens, *map(len, encoded(job.config, request)))
    self.max_new_tokens = request.max_new_tokens
    self.placements = self._place()
    self.pace = Pace()
    self.prefill, self.decode, self.seconds = self._compile()

  def __call__(
    self, params: Any, request: Request, write: Write | None = None, variables: Any = None
  ) -> list[bytes]:
    """Returns the generated bytes of each prompt, without the end of the document.

    Args:
      params: the parameters, placed as the job's.
      request: the one that the sampler was made for, or a smaller one.
      write: called with text as it is generated, in complete characters.
      variables: the model's other variables, where it has any.

    Raises:
      ValueError: as `check`; or a request larger than the sampler was compiled for.
    """
    check(self.job.config, request)
    prompts = encoded(self.job.config, request)
    self._check_size(request, prompts)
    stops = [as_bytes(stop) for stop in request.stop]
    rows = [
      Row(self._bytes_of(prompt), stops, self.tokenizer, request.stop_tokens)
      for prompt in request.prompts
    ]
    left = set(range(len(rows)))
    self.pace = Pace()
    for tokens_B in itertools.islice(
      self._drawn(params, variables, request, prompts), request.max_new_tokens
    ):
      self.pace.tick(len(left))
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

  def _bytes_of(self, prompt: str | bytes | tuple[int, ...]) -> bytes:
    return self.tokenizer.decode(prompt) if isinstance(prompt, tuple) else as_bytes(prompt)

  def _check_size(self, request: Request, prompts: Sequence[np.ndarray]) -> None:
    """Raises where a request is larger than the compiled programs."""
    sizes = {
      "prompts": (len(request.prompts), self.rows),
      "tokens in the longest prompt": (max(map(len, prompts)), self.prompt_tokens),
      "max_new_tokens": (request.max_new_tokens, self.max_new_tokens),
    }
    if wrong := [f"{name}={n} of {most}" for name, (n, most) in sizes.items() if n > most]:
      raise ValueError(
        f"this sampler was compiled for a smaller request: {', '.join(wrong)}; make another"
      )

  def _drawn(
    self, params: Any, variables: Any, request: Request, prompts: Sequence[np.ndarray]
  ) -> Iterator[np.ndarray]:
    """Yields the tokens of each step, [B].

    On accelerators the next step runs while one is read. On simulated devices at most one is in
    flight: more can deadlock in a rendezvous.
    """
    tokens_BT = np.full((self.rows, self.prompt_tokens), self.tokenizer.end, np.int32)
    counts_B = np.ones(self.rows, np.int32)
    for row, tokens in enumerate(prompts):
      tokens_BT[row, : len(tokens)] = tokens
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
    return jax.device_put(tree, self._replicated())

  def _replicated(self) -> NamedSharding:
    return NamedSharding(self.job.mesh, PartitionSpec())

  def _cache_shardings(self, cache: Any) -> Any:
    return shardings.shardings(cache, self.placements, self.job.mesh, "cache/")

  def _empty_cache(self) -> Any:
    slots = self.prompt_tokens + self.max_new_tokens
    return self._model.empty_cache(self._spec, self.rows, slots)

  def _place(self) -> dict[str, Placement]:
    """Returns how the cache is sharded: as the activations of the same letters."""
    layers = self.job.legend["L"].name
    table = {layers: self.job.config.partitioning.parameters[layers], **self._table}
    placements = {}
    for name, array in vars(jax.eval_shape(self._empty_cache)).items():
      letters = self._model.CACHE[name]
      if array is None:  # without intra-document masking
        continue
      found = resolve(letters, array.shape, self.job.legend, table, self.job.devices.sizes)
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

  def _compile(self) -> tuple[Callable, Callable, float]:
    """Compiles prefill and decode, each once; returns both, and the seconds that it took."""
    whole = self._replicated()
    params, cache = self.job.state.params, jax.eval_shape(self._empty_cache)
    params_lie = self.job.state_shardings.params
    variables = [self.job.state.variables] if self.job.state.variables else []
    variables_lie = [self.job.state_shardings.variables] if variables else []
    cache_lies = self._cache_shardings(cache)
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
    return draw_token(logits_BV[:, : drawable(self.job.config)], cache.lengths, settings), cache


def show(
  job: Job,
  params: Any,
  request: Request,
  variables: Any = None,
  sampler: Sampler | None = None,
  *,
  pace: bool = False,
) -> list[bytes]:
  """Prints the prompts and their continuations, as they are generated; returns the continuations.

  Args:
    job: whose model is used.
    params: its parameters.
    request: the prompts.
    variables: the model's other variables, where it has any.
    sampler: one that was compiled for the request; by default one is compiled.
    pace: also print how fast, to standard error.
  """
  sampler = sampler or Sampler(job, request)
  if not current().first:  # all compute, process 0 prints
    return sampler(params, request, variables=variables)
  printer = Printer(request.prompts)
  drawn = sampler(params, request, printer, variables)
  printer.close()
  if pace:
    print(f"[{sampler.pace.text()}]", file=sys.stderr, flush=True)
  return drawn
