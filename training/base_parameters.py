"""Parameters of runs and model folders: to start from without training them, and to evaluate.

A run with `checkpoint.initialize_from` and frozen parameters saves only those that it trains. The
record of its checkpoints says where the others are, and identifies them by a digest.
"""

import copy
import dataclasses
import fnmatch
import hashlib
import json
import os
from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np
from etils import epath, epy
from jax.sharding import NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from interop import hf_folder
from models import model_spec
from models.spec import TEACHER
from partitioning.rules import named_leaves, nested
from runtime.layer_kinds import QUANTIZED
from training import averages, run_record
from training.checkpointing import integrity, reading
from training.checkpointing.consensus import Together
from training.checkpointing.integrity import BASE, PARAMETERS, VARIABLES, Verified, warn_once
from training.metrics.console import Waiting
from training.replica_check import content_digests
from training.setup import Job
from training.state import State, merged, split, without_teacher

with epy.lazy_imports():  # of a quantized base
  from interop import safetensors_file
  from training import quantized_base

ADAPTERS = "*/lora_*"  # their names
_PREFIX = f"{PARAMETERS}/"
_KEY, _TEACHER_KEY = "checkpoint.initialize_from", "distillation.teacher"
_SHOWN = 12  # characters of a digest in a message


@dataclasses.dataclass(frozen=True)
class Base:
  """Where the frozen parameters of a run are, and which they are.

  Attributes:
    folder: of checkpoints, or of a model.
    step: of the checkpoint; None if the folder has no steps.
    dtype: in which the run holds them; of a teacher that is not in memory, what is stored of it.
    digest: of their content in this dtype, see `digest`.
  """

  folder: str
  step: int | None
  dtype: str
  digest: str

  @classmethod
  def of(cls, record: Mapping[str, Any], key: str = BASE) -> "Base | None":
    """Returns what a checkpoint's record says; None where the checkpoint has all parameters."""
    return cls(**record[key]) if key in record else None

  @classmethod
  def of_step(cls, location: str, step: int) -> "Base | None":
    """Returns what the record of a step says that has been read; see `of`."""
    folder, _ = reading.parse_location(location)
    return cls.of(reading.read_json(folder / str(step), integrity.RECORD))

  def record(self, key: str = BASE) -> dict[str, Any]:
    """Returns its part of a checkpoint's record."""
    return {key: dataclasses.asdict(self)}

  @property
  def stored(self) -> bool:
    """Returns whether it is a teacher that is not in memory (`training.teacher_rows`)."""
    return " " in self.dtype

  @property
  def location(self) -> str:
    """Returns `FOLDER/STEP`, or the folder of a model."""
    return self.folder if self.step is None else os.path.join(self.folder, str(self.step))


@dataclasses.dataclass(frozen=True)
class ParameterReader:
  """Reads parameters of a job's model that are elsewhere: in a run, a model folder or an adapter's.

  Attributes:
    job: whose model and mesh they are for; its `checkpoint.initialize_from`, where it is set, says
      where the base of a run is now.
    key: that names where they are, for messages.
  """

  job: Job
  key: str = _KEY

  @property
  def adapters(self) -> list[str]:
    """Returns the names of the adapters, which another run need not have."""
    return fnmatch.filter(named_leaves(self.job.state.params), ADAPTERS)

  def found_at_start(self, folder: epath.PathLike, step: int | None, state: State) -> Base | None:
    """Returns the base of a new run; None if the run trains all parameters, and saves them.

    Args:
      folder: from which its parameters were read, of checkpoints or of a model.
      step: likewise.
      state: the first one.
    """
    frozen = named_leaves(without_teacher(self.job.program.changing(state.params)[1]))
    if not frozen:
      return None
    dtype = self.job.config.training.frozen_dtype
    return Base(os.fspath(folder), step, dtype, self.digest(frozen))

  def initial_state(self, where: str, teacher: Any) -> tuple[State, epath.PathLike, int | None]:
    """Returns the initial state with other parameters, their folder and step.

    Adapters that are not there are drawn; nothing else of the other run is read.

    Args:
      where: `DIR[/STEP]` of another run, or a model folder.
      teacher: the branch of its parameters; {} without one.

    Raises:
      ValueError: there is no checkpoint, or its parameters have other names, shapes or dtypes.
    """
    wanted = named_leaves(without_teacher(self.job.placed_state.params))
    folder, step, arrays = self.read(where, wanted, optional=self.adapters)
    return self.job.initial_state({**nested(arrays), **teacher}), folder, step

  def teacher(self, known: Base | None, run: str) -> tuple[dict[str, Any], Base]:
    """Returns the branch of parameters that are the teacher's, and where they were found.

    Args:
      known: of the run's record; None of a run that begins.
      run: its folder, for messages.

    Raises:
      ValueError: there is no such model, or it is another one than the run has begun with.
    """
    job, where = self._of_teacher(), self.job.config.distillation.teacher
    wanted, reader = named_leaves(job.placed_state.params), ParameterReader(job, _TEACHER_KEY)
    if known is not None:
      arrays, base = reader._frozen(known, wanted, where, run)
    else:
      folder, step, arrays = reader.read(where, wanted)
      base = Base(os.fspath(folder), step, job.config.training.frozen_dtype, reader.digest(arrays))
    return {TEACHER: nested(arrays)}, base

  def _of_teacher(self) -> Job:
    """Returns a job whose model is the teacher, to read its parameters by."""
    job, config = self.job, copy.deepcopy(self.job.config)
    with config.unlocked():
      config.model = ConfigDict(dict(config.distillation.model))
      config.distillation.update(teacher="", model=())
      config.lora.rank = 0
    prefix = f"{TEACHER}/"
    placed = {
      name.removeprefix(prefix): dataclasses.replace(one, name=name.removeprefix(prefix))
      for name, one in job.placements["parameters"].items()
      if name.startswith(prefix)
    }
    state = State(job.state.step, job.state.params[TEACHER], {}, {})
    placements = {**job.placements, "parameters": placed, "optimizer": {}}
    return dataclasses.replace(job, config=config, state=state, placements=placements)

  def digest(self, arrays: Mapping[str, jax.Array]) -> str:
    """Returns a digest of the names, shapes, dtypes and bits of parameters, in hexadecimal.

    SHA-256 of a line for each array with a 128-bit sum over its elements, mixed with their
    places, which the devices compute from their shards: no array is gathered, and every mesh gives
    the same.
    """
    names = sorted(arrays)
    compiled = self.job.compile(
      content_digests,
      [arrays[name] for name in names],
      out_shardings=NamedSharding(self.job.mesh, PartitionSpec()),
    ).function
    sums = np.asarray(compiled([arrays[name] for name in names]))
    lines = [
      f"{name} {arrays[name].dtype} {list(arrays[name].shape)} {row.tobytes().hex()}\n"
      for name, row in zip(names, sums.astype("<u4"), strict=True)
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()

  def completed(self, params: Any, base: Base | None, run: str) -> tuple[Any, Base | None]:
    """Returns all parameters of a run: its own, and the frozen ones, which are read from its base.

    Args:
      params: nested dict of the parameters that the run has saved.
      base: of the run's record; None: it has saved all.
      run: its folder, for messages.

    Returns:
      The parameters; the base, as it was found.

    Raises:
      ValueError: the base is missing, or is another one.
    """
    if base is None:
      return params, None
    own = named_leaves(params)
    placed = named_leaves(without_teacher(self.job.placed_state.params))
    wanted = {name: leaf for name, leaf in placed.items() if name not in own}
    where = self.job.config.checkpoint.initialize_from or base.folder
    arrays, base = self._frozen(base, wanted, where, run)
    return merged(params, nested(arrays)), base

  def _frozen(
    self, base: Base, wanted: Mapping[str, Any], where: str, run: str
  ) -> tuple[dict[str, jax.Array], Base]:
    """Reads the frozen parameters of a run, and compares their digest."""
    if base.dtype in QUANTIZED or self.job.config.training.frozen_dtype in QUANTIZED:
      self._require_same_quantization(base, run)
      stored = wanted
    else:
      dtype = np.dtype(base.dtype)
      stored = {
        name: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)
        for name, leaf in wanted.items()
      }
    try:
      folder, step, arrays = self.read(where, stored, step=base.step, optional=self.adapters)
    except (ValueError, OSError) as error:
      raise ValueError(
        f"{run} has saved the parameters that it trains; the others were those of "
        f"{base.location}, and cannot be read from {where}: {error}\n"
        f"if they have moved, give --config.{self.key}"
      ) from error
    if (found := self.digest(arrays)) != base.digest:
      raise ValueError(
        f"{run} was trained with other frozen parameters than those of {where}: their digest is "
        f"{found[:_SHOWN]}, and its record has {base.digest[:_SHOWN]}, of {base.location}; give "
        f"those, --config.{self.key}=DIR/STEP"
      )
    base = dataclasses.replace(base, folder=os.fspath(folder), step=step)
    return {name: x.astype(wanted[name].dtype) for name, x in arrays.items()}, base

  def _require_same_quantization(self, base: Base, run: str) -> None:
    if base.dtype != (own := self.job.config.training.frozen_dtype):
      raise ValueError(
        f"{run} was trained on frozen parameters in {base.dtype}, those of {base.location}, and "
        f"training.frozen_dtype={own} here would change what its adapters were trained on; set "
        f"training.frozen_dtype={base.dtype}"
      )

  def read(
    self,
    location: str,
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    *,
    step: int | None = None,
    optional: Collection[str] = (),
  ) -> tuple[epath.PathLike, int | None, dict[str, jax.Array]]:
    """Reads parameters of another run by their names; what it has not saved, from its own base.

    Args:
      location: `DIR[/STEP]`, or a model folder.
      wanted: name -> shape, dtype and sharding. A parameter is cast from or to bfloat16.
      step: which, if the location names none and it is there; by default the newest.
      optional: names that may be missing.

    Returns:
      The folder and the step; name -> array.

    Raises:
      ValueError: there is no checkpoint, or its parameters have other names, shapes or dtypes.
    """
    if hf_folder.is_adapter(location):
      return self._of_adapter(location, wanted)
    if hf_folder.is_model(location):
      return self._of_model_folder(location, wanted)
    folder, chosen = reading.parse_location(location)
    if chosen is None and step in integrity.steps(folder):
      chosen = step
    known = named_leaves(self.job.state.params).keys()
    kernels: dict[str, Any] = {}  # that are there before quantization

    def saved_part(checkpoint: Verified) -> dict[str, Any]:
      there = {
        name.removeprefix(_PREFIX): x
        for name, x in reading.stored_arrays(checkpoint.path).items()
        if name.startswith(_PREFIX)
      }
      partial = BASE in checkpoint.record
      others, whole = self._to_quantize(wanted, there)
      kernels.clear()
      kernels.update(whole)
      expected = {n: x for n, x in others.items() if n in there or not (partial or n in optional)}
      there = {
        name: _as_wanted(x, others.get(name))
        for name, x in there.items()
        if name in others or name in kernels or name not in known
      }
      reading.require_same(checkpoint.path, reading.differences(there, expected | kernels))
      self.require_same_adapters(checkpoint, ("alpha", "rs"))
      return {PARAMETERS: nested(expected)}

    found, tree = reading.restore_branches(
      *(folder, saved_part, chosen),
      verify=self.job.config.checkpoint.verify,
      warn=warn_once,
      together=self.job.consensus,
      compared=True,
    )
    arrays = named_leaves(tree[PARAMETERS]) | self._quantized(found, wanted, kernels)
    rest = {name: x for name, x in wanted.items() if name not in arrays}
    if rest and (base := Base.of(found.record)) is not None:
      more, _ = self._frozen(base, rest, base.folder, str(folder))
      arrays |= more
    return folder, found.step, arrays

  def _to_quantize(
    self, wanted: Mapping[str, jax.ShapeDtypeStruct], there: Mapping[str, Any]
  ) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what is wanted as it is there; and the kernels that are there before quantization."""
    if self.job.config.training.frozen_dtype not in QUANTIZED:
      return dict(wanted), {}
    spec, (others, kernels) = model_spec(self.job.config), quantized_base.split_parts(wanted)
    found = {}
    for name, parts in kernels.items():
      if name in there:
        kind = spec.format_of(name)
        found[name] = quantized_base.whole_kernel(kind, parts, there[name].dtype)
      else:
        others |= {name.removesuffix("kernel") + part: leaf for part, leaf in parts.items()}
    return others, found

  def _quantized(
    self, checkpoint: Verified, wanted: Mapping[str, Any], kernels: Mapping[str, Any]
  ) -> dict[str, jax.Array]:
    """Reads the kernels that a run has not quantized, one at a time, and quantizes them."""
    arrays, spec = {}, model_spec(self.job.config)
    for name, leaf in kernels.items():
      tree = reading.read_arrays(
        dataclasses.replace(checkpoint, large=()),  # which have been verified
        {PARAMETERS: nested({name: leaf})},
        branches=(PARAMETERS,),
        together=self.job.consensus,
        compared=True,
      )
      [kernel] = jax.tree.leaves(tree)
      parts = quantized_base.split_parts(wanted)[1][name]
      shard = quantized_base.of_array(kernel)
      arrays |= quantized_base.quantize(spec.format_of(name), name, parts, shard)
    return arrays

  def _of_model_folder(
    self, location: str, wanted: Mapping[str, jax.ShapeDtypeStruct]
  ) -> tuple[str, None, dict[str, jax.Array]]:
    """Reads what a model folder has of these parameters; adapters are in none."""
    from interop import read_weights  # of runs that begin with a model folder alone

    spec = model_spec(self.job.config)
    source = read_weights.open_folder(location, spec, self.key)
    there = {name: leaf for name, leaf in wanted.items() if name in source.parts}
    place = location if "://" in location else str(source.folder)
    arrays = read_weights.read(source, there)
    if self.job.config.training.frozen_dtype in QUANTIZED:
      with safetensors_file.Reader() as reader:
        for name, parts in quantized_base.split_parts(wanted)[1].items():
          shard = read_weights.shards_of(reader, source, name)
          arrays |= quantized_base.quantize(spec.format_of(name), name, parts, shard)
    return place, None, arrays

  def _of_adapter(
    self, location: str, wanted: Mapping[str, jax.ShapeDtypeStruct]
  ) -> tuple[str, None, dict[str, jax.Array]]:
    """Reads adapters from a folder, and the other parameters from `model.folder`, their base."""
    from interop import peft_adapter  # as read_weights

    config = self.job.config
    if not (base := config.model.get("folder")):
      raise ValueError(
        f"{location} is an adapter, whose base is a model folder: choose --config=FILE:hf and name "
        f"it with --config.model.folder"
      )
    place, _, arrays = self._of_model_folder(base, wanted)
    names = [name for name in self.adapters if name in wanted]
    if not names:
      return place, None, arrays
    adapter = peft_adapter.read_config(location)
    model_type = hf_folder.read_config(
      hf_folder.local(base, "model.folder"), "model.folder"
    ).model_type
    found = peft_adapter.read(adapter, model_spec(config), model_type)
    said = peft_adapter.metadata(adapter)
    frozen = {name: x for name, x in arrays.items() if name not in self.job.program.trained}
    same_kind = said.get(peft_adapter.DTYPE) == config.training.frozen_dtype
    if same_kind and len(frozen) == len(arrays):
      ours, theirs = self.digest(frozen), said.get(peft_adapter.DIGEST, "")
      if ours != theirs:
        raise ValueError(
          f"{location} is an adapter of another base than {base}: the digest of its base is "
          f"{theirs[:_SHOWN]}, and that of this one {ours[:_SHOWN]}"
        )
    for name in names:
      leaf, value = wanted[name], found[name].astype(wanted[name].dtype)
      arrays[name] = jax.make_array_from_callback(leaf.shape, leaf.sharding, value.__getitem__)
    return place, None, arrays

  def check_model_folder(self, workdir: epath.Path) -> None:
    """Checks the model folder that a new run is to start from, of which only headers are read.

    Raises:
      ValueError: its tensors are not the model's.
    """
    where = self.job.config.checkpoint.initialize_from
    if integrity.steps(workdir / integrity.FOLDER):
      return
    if hf_folder.is_adapter(where):
      where = self.job.config.model.get("folder") or where
    if hf_folder.is_model(where):
      from interop import read_weights  # as above

      spec = model_spec(self.job.config)
      source = read_weights.open_folder(where, spec, _KEY)
      for line in read_weights.differing_keys(spec, source.described):
        warn_once(f"WARNING: {line}")

  def require_same_adapters(
    self, checkpoint: Verified, keys: Collection[str] = ("rank", "targets", "alpha", "rs")
  ) -> None:
    """Raises ValueError if a checkpoint's adapters differ from the job's in these keys of `lora`.

    The scale cannot be seen in their arrays.
    """
    old, new = checkpoint.config.get("lora"), json.loads(self.job.config.lora.to_json_best_effort())
    if not old or not old["rank"] or (not new["rank"] and "rank" not in keys):
      return
    wrong = {key: old[key] for key in keys if old[key] != new[key]}
    if wrong:
      lines = [f"lora.{key}={new[key]!r} here, and {value!r} there" for key, value in wrong.items()]
      raise ValueError(f"{checkpoint.path} has other adapters: {'; '.join(lines)}; set them alike")


def unquantized_parameters(job: Job, plain: Job, location: str) -> tuple[int, Any]:
  """Returns step and parameters of a run with a quantized base, on the base as it was before.

  Where the run has no base, and so has saved it quantized, its kernels are decoded.

  Args:
    job: the run's.
    plain: the same with another `training.frozen_dtype`.
    location: of the run.

  Raises:
    ValueError: the base cannot be read.
  """
  step, params, _ = model_state(job, location)  # which compares the digest of its base
  base, own = Base.of_step(location, step), named_leaves(params)
  if base is None:
    return step, nested(quantized_base.decoded(model_spec(job.config), own))
  wanted = named_leaves(plain.program.changing(plain.placed_state.params)[1])
  own = {name: own[name] for name in named_leaves(plain.state.params) if name not in wanted}
  del params  # the quantized kernels
  where = plain.config.checkpoint.initialize_from or base.folder
  _, _, arrays = ParameterReader(plain).read(where, wanted, step=base.step)
  return step, nested(arrays | own)


def _as_wanted(stored: Any, wanted: Any) -> Any:
  """Returns an array of a checkpoint as it is compared: with the dtype to which it may be cast."""
  kinds = {np.dtype(x.dtype).name for x in (stored, wanted) if x is not None}
  if wanted is not None and "bfloat16" in kinds and all("float" in kind for kind in kinds):
    return jax.ShapeDtypeStruct(stored.shape, wanted.dtype)
  return stored


# ------------------------------ of a trained run ------------------------------


def model_state(job: Job, location: str) -> tuple[int, Any, Any]:
  """Returns (step, parameters, variables) of a run, placed as the job's, to evaluate and sample.

  Parameters that the run has not saved are read from its base, or from the job's
  `checkpoint.initialize_from`.

  Args:
    job: whose model and mesh they are for.
    location: `DIR[/STEP]`, DIR a workdir or its folder of checkpoints; or a model folder, which is
      step 0.

  Raises:
    ValueError: no such checkpoint, or one of another model; or its base is missing or another.
  """
  reader = ParameterReader(job)
  if hf_folder.is_model(location):
    if decay := job.config.evaluation.ema_decay:
      raise ValueError(f"evaluation.ema_decay={decay:g}: {location} is a model without averages")
    wanted = named_leaves(job.placed_state.params)
    _, _, arrays = reader.read(location, wanted, optional=reader.adapters)
    if arrays.keys() == wanted.keys() and not job.state.variables:
      # Without the optimizer's state, which is twice as large.
      return 0, nested(arrays), {}
    state, _, _ = reader.initial_state(location, {})
    return 0, state.params, state.variables
  folder, step = reading.parse_location(location)

  def saved_part(checkpoint: Verified) -> dict[str, Any]:
    reader.require_same_adapters(checkpoint)
    params, variables = job.placed_state.params, job.placed_state.variables
    if BASE in checkpoint.record:
      there = reading.stored_arrays(checkpoint.path)
      params, _ = split(params, lambda name: f"{PARAMETERS}/{name}" in there)
    return {PARAMETERS: params, VARIABLES: variables}

  given = {"verify": job.config.checkpoint.verify, "warn": warn_once, "together": job.consensus}
  with Waiting(f"restoring the parameters of {folder}").show():
    found, tree = reading.restore_branches(folder, saved_part, step, **given)
  base = Base.of(run_record.read(found)) if BASE in found.record else None
  params, _ = reader.completed(tree[PARAMETERS], base, str(folder))
  if decay := job.config.evaluation.ema_decay:
    trained, _ = job.program.split(job.placed_state.params)
    average = _average(found, trained, decay, job.consensus)
    params = merged(average, job.program.split(params)[1])
  return found.step, params, tree[VARIABLES]


def _average(checkpoint: Verified, wanted: Any, decay: float, together: Together) -> Any:
  """Returns an average of the trained parameters of a checkpoint that was read.

  Args:
    checkpoint: whose files have been verified.
    wanted: abstract, with the parameters' shardings.
    decay: which average.
    together: the processes.

  Raises:
    ValueError: the step has no average with this decay; with those that it has.
  """
  branch, key, path = "optimizer", averages.key(decay), checkpoint.path
  names = reading.stored_arrays(path)
  parts = (name.split("/") for name in names if name.startswith(f"{branch}/{averages.FIELD}/"))
  if key not in (there := sorted({part[2] for part in parts})):
    known = ", ".join(one.replace("_", ".") for one in there)
    known = known or "none (optimizer.ema_decays was not set)"
    raise ValueError(f"evaluation.ema_decay={decay:g}: {path} has no such average; it has {known}")
  found = reading.read_arrays(
    dataclasses.replace(checkpoint, large=()),
    {branch: {averages.FIELD: {key: wanted}}},
    branches=(branch,),
    together=together,
    compared=True,
  )
  return found[branch][averages.FIELD][key]
