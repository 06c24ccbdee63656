"""What is stored of a teacher beside the rows that a student trains on: its likeliest tokens.

`prepare --teacher=` runs the teacher over the rows of the training split, and stores of each slot
the ids of the K likeliest tokens and their log-probabilities at `distillation.temperature`, and
that of all other tokens together. It is a shard of the store (`input_pipeline.store`) of which each
row is a document of bytes: ids of the smallest width, then floating-point numbers, both [T, K + 1].
A row is found by its number, so order, batches, packing, resume and mesh have no part in it.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from input_pipeline import catalog, shard_writer, store
from input_pipeline.batches import TrainingBatches
from input_pipeline.source import BadRecords, Source, UnreadableError
from models.distillation import REST, likeliest
from models.spec import STORED_TEACHER
from partitioning.rules import named_leaves
from processes.coordination import current
from training.base_parameters import Base, ParameterReader
from training.checkpointing.integrity import TEACHER
from training.setup import Job

KEY = "distillation.teacher"
DTYPES = ("float16", "float32")
_ABOUT = "teacher"  # in shard.json
_BYTES = 256  # what the store takes for token ids
_IDS, _LOG_P = STORED_TEACHER


@dataclasses.dataclass(frozen=True)
class About:
  """What is stored.

  Attributes:
    teacher: where it was, a run or a model folder.
    digest: of its parameters, see `ParameterReader.digest`.
    rows: the fingerprint of the rows that it read.
    top: K, tokens of each slot.
    temperature: that its logits were divided by.
    vocabulary_size: of the teacher, and of the student.
    separate_documents: whether it read the documents of a row apart.
    dtype: of the log-probabilities, one of DTYPES.
  """

  teacher: str
  digest: str
  rows: str
  top: int
  temperature: float
  vocabulary_size: int
  separate_documents: bool
  dtype: str

  @property
  def base(self) -> Base:
    """Returns what a run's record says of it."""
    return Base(self.teacher, None, f"{self.dtype}, the {self.top} likeliest tokens", self.digest)

  @property
  def name(self) -> str:
    """Returns the name of its folder: nothing of it depends on where the teacher is."""
    facts = repr(dataclasses.astuple(self)[1:])
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


def is_stored(location: str) -> bool:
  """Returns whether a folder has what is stored of a teacher."""
  return bool(location) and store.is_there(epath.Path(location))


def about(location: str) -> About:
  """Returns what a folder has.

  Raises:
    ValueError: it is damaged, or a shard of something else.
  """
  shard = store.Shard.open(epath.Path(location))
  try:
    found = About(**shard.manifest[_ABOUT])
    kinds = ((field.type, getattr(found, field.name)) for field in dataclasses.fields(About))
    if not all(type(value) is kind for kind, value in kinds) or found.dtype not in DTYPES:
      raise ValueError("its values are of other kinds")
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(f"{location} is not what `prepare --teacher=` stores ({error})") from error
  return found


# ------------------------------ reading ------------------------------


def attached(source: Source, location: str) -> Source:
  """Returns rows of the training split with what is stored of a teacher.

  Raises:
    ValueError: it was stored for other rows.
  """
  known, documents = about(location), store.Documents([store.Shard.open(epath.Path(location))])
  if known.rows != source.fingerprint or len(documents) != len(source):
    raise ValueError(
      f"{KEY}={location}: it has {len(documents):,} rows with the digest {known.rows[:12]}, and "
      f"those of {source.name} are {len(source):,} with {source.fingerprint[:12]}; what rows "
      f"follow from (files, tokenizer, data.sequence_length, data.packing, seed) must be the same; "
      f"set it back, or run prepare --teacher={known.teacher} again"
    )
  [length], _ = source.fields["tokens"]
  shape, first = (length, known.top + 1), documents.first_record
  ids = known.vocabulary_size + 1  # REST is stored as the id after the last
  kinds = shard_writer.token_type(ids), np.dtype(known.dtype).newbyteorder("<")
  ends = int(np.prod(shape)) * kinds[0].itemsize
  records_of_row = int(first[1]) if len(documents) else 0

  def read(numbers: np.ndarray) -> dict[str, np.ndarray]:
    numbers = np.asarray(numbers, np.int64)
    records = (first[numbers][:, None] + np.arange(records_of_row)).ravel()
    try:
      content = documents.read(records)[0].reshape(len(numbers), -1)
    except store.RecordError as error:
      record, why = next(iter(error.records.items()))
      text = f"{KEY}={location}: {documents.place(record)} cannot be read ({why}); prepare it again"
      raise UnreadableError(text, {}) from error
    parts = content[:, :ends], content[:, ends:]
    ids, log_p = (
      np.ascontiguousarray(part).view(kind).reshape(len(numbers), *shape)
      for part, kind in zip(parts, kinds, strict=True)
    )
    ids = ids.astype(np.int32)
    ids[..., -1] = REST
    return {**source.read(numbers), _IDS: ids, _LOG_P: log_p.astype(np.float32)}

  return _with_fields(source, known.top, read)


def unattached(source: Source, location: str) -> Source:
  """Returns rows of the evaluation split with zeros in place of a teacher; nothing reads them."""
  top = about(location).top

  def read(numbers: np.ndarray) -> dict[str, np.ndarray]:
    rows = source.read(numbers)
    shape = (*rows["tokens"].shape, top + 1)
    return {**rows, **{name: np.zeros(shape, x) for name, (_, x) in STORED_TEACHER.items()}}

  return _with_fields(source, top, read)


def _with_fields(source: Source, top: int, read: Callable) -> Source:
  [length], _ = source.fields["tokens"]
  more = {name: ((length, top + 1), np.dtype(x)) for name, (_, x) in STORED_TEACHER.items()}
  return dataclasses.replace(source, fields={**source.fields, **more}, read=read)


# ------------------------------ writing ------------------------------


def stored(
  teacher: Job,
  params: Any,
  variables: Any,
  source: Source,
  data: Any,
  *,
  location: str,
  top: int,
  temperature: float,
  dtype: str,
  tick: Callable = store.no_tick,
) -> store.Shard:
  """Runs a teacher over rows, and stores its likeliest tokens, unless that has been done.

  Args:
    teacher: a job whose model it is, on the devices that compute.
    params: its parameters.
    variables: its other variables.
    source: the rows of the training split.
    data: the config's section `data`.
    location: where the teacher is.
    top: tokens of each slot.
    temperature: divides its logits.
    dtype: of the log-probabilities, one of DTYPES.
    tick: is called after each batch, with what is counted and how many.

  Raises:
    ValueError: `top` or `dtype` is none that there is, or the folder cannot be written.
  """
  model = teacher.config.model
  if dtype not in DTYPES:
    raise ValueError(f"--dtype={dtype}: log-probabilities are stored as {' or '.join(DTYPES)}")
  if not 1 <= top <= model.vocabulary_size:
    raise ValueError(f"--teacher_top={top}: 1 to model.vocabulary_size={model.vocabulary_size}")
  if current().count > 1:
    raise ValueError("--teacher: one process stores the rows, on the devices that it has")
  digest = ParameterReader(teacher, KEY).digest(named_leaves(params))
  facts = source.fingerprint, top, temperature, model.vocabulary_size, model.separate_documents
  known = About(location, digest, *facts, dtype)
  folder = catalog.data_folder(data) / "prepared" / "teachers" / known.name
  if store.is_there(folder):
    return store.Shard.open(folder)
  rows = _rows(teacher, params, variables, source, known)

  def fill(shard: shard_writer.ShardWriter) -> None:
    for number, row in enumerate(rows):
      content = np.frombuffer(row, np.uint8)
      shard.add(content, len(content), number)
      tick("rows", number + 1)

  with shard_writer.writing_to(folder):
    folder.parent.mkdir(parents=True, exist_ok=True)
    shard_writer.write_shard(folder, _BYTES, {_ABOUT: dataclasses.asdict(known)}, fill)
  return store.Shard.open(folder)


def _rows(
  teacher: Job, params: Any, variables: Any, source: Source, known: About
) -> Iterator[bytes]:
  """Yields what is stored of each row, in their order."""
  size = min(teacher.config.data.global_batch_size, len(source))
  # Rows of a mixture in the order of their numbers too, and those that cannot be read as zeros.
  source = dataclasses.replace(source, parts=(), stages=(), bad=BadRecords())
  batches = TrainingBatches(source, global_batch_size=size, seed=0, shuffle=False)

  def found(params: Any, batch: Any, variables: Any) -> Any:
    model = teacher.program.module(params, variables)
    return likeliest(model, batch, known.top, known.temperature)

  placed, shardings = teacher.state_shardings, teacher.batch_shardings
  compiled = teacher.compile(
    found,
    *(teacher.state.params, batches.abstract, teacher.state.variables),
    in_shardings=(placed.params, shardings, placed.variables),
    out_shardings=NamedSharding(teacher.mesh, PartitionSpec()),
  ).function
  kind = shard_writer.token_type(known.vocabulary_size + 1)
  for step in range(-(-len(source) // size)):
    batch = batches.batch(step, shardings)
    ids, log_p, places = jax.device_get(compiled(params, batch, variables))
    ids = np.where(ids == REST, known.vocabulary_size, ids)
    order = np.argsort(places, axis=1)[..., None]
    with np.errstate(over="ignore"):  # what is below the least number has no probability
      arrays = ids.astype(kind), log_p.astype(np.dtype(known.dtype).newbyteorder("<"))
    ids, log_p = (np.take_along_axis(array, order, axis=1) for array in arrays)
    for row in range(min(size, len(source) - step * size)):
      yield ids[row].tobytes() + log_p[row].tobytes()


def size_text(shard: store.Shard) -> str:
  """Returns `1,234 rows, 12.3 MiB`."""
  size = shard.manifest["sizes"][store.TOKENS]
  return f"{shard.manifest['documents']:,} rows, {size / 2**20:,.1f} MiB"


def require_same(location: str, known: Base | None, workdir: Any) -> dict[str, Any]:
  """Returns what a run's record says of a stored teacher.

  Args:
    location: of the stored rows.
    known: of the run's record; None of a run that begins.
    workdir: of the run, for messages.

  Raises:
    ValueError: the run has begun with another one.
  """
  found = about(location).base
  if known is not None and (known.digest, known.dtype) != (found.digest, found.dtype):
    shown = [f"{x.dtype} of {x.location} (digest {x.digest[:12]})" for x in (known, found)]
    raise ValueError(
      f"{KEY}={location}: {workdir} has been trained with {shown[0]}, and this is {shown[1]}; "
      f"set it back, or start a new run with checkpoint.initialize_from={workdir}"
    )
  return found.record(TEACHER)
