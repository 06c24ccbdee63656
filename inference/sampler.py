"""Text from a trained decoder: prompts read at once, then one token per step for every row.

Two programs are compiled per `Sampler`: one reads the prompts (prefill), one reads the token
drawn last (decode). Both draw the next token on the devices. Settings are arguments of theirs,
so another temperature or seed compiles nothing.

The token that ends a document ends a row. A prompt and its new tokens together are at most
`data.sequence_length`: rotary positions have no limit, but the model has been trained on those
alone.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from inference.request import Request, check, drawable, encoded, tokenizer_of
from inference.sample_token import draw
from inference.text_stream import Printer, Row, as_bytes
from models import MODELS
from partitioning import shardings
from partitioning.dims import axes_size, resolve
from partitioning.rules import Placement
from processes.coordination import current
from training.setup import Job

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
    self.tokenizer = tokenizer_of(job.config)
    self.prompt_tokens = max(map(len, encoded(job.config, request)))
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
    prompts = encoded(self.job.config, request)
    self._check_size(request, prompts)
    stops = [as_bytes(stop) for stop in request.stop]
    rows = [Row(as_bytes(prompt), stops, self.tokenizer) for prompt in request.prompts]
    left = set(range(len(rows)))
    for tokens_B in itertools.islice(
      self._drawn(params, variables, request, prompts), request.max_new_tokens
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

    On accelerators the next step is under way while one is read. On simulated devices one is
    in flight at most: more can deadlock in a rendezvous.
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
