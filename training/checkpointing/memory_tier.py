"""Checkpoints in the memory of the hosts, beside those in storage: a kill then costs no step.

Every `checkpoint.memory_every_steps` steps each process copies its own shards of the state to a
file that outlives it (`memory_copies`), which blocks the step only while the bytes are copied.
Shards that no process on another host holds (no other process, where there is one host) are sent to
a peer in the background (`processes.peer_transfer`). Replicas are their own copies. A start takes
the newest step of which the survivors' files have every shard, intact; what is not on the host of
the process that needs it is sent from where it is.

How a run uses it, and a restart of part of its processes may; all processes make the same calls:

  tier = MemoryTier(local_dir, workdir, together=..., say=...)
  found = tier.newest(abstract_of, after=10)     # None, or an InMemory: .step, .config, .record
  tree = tier.restore(found)                     # a tree like `abstract_of(record)`, of arrays
  tier.start_writing(owner, tree, resumed=found is not None)
  tier.save(step, tree, config=..., record=...)  # after a step; the tree may then be donated
  tier.roll_back(step)                           # removes newer steps
  tier.finish()                                  # waits for the background
  tier.remove()                                  # at the end of a run that has saved to storage

The files of step k are removed when those of a later step are complete on all processes. A copy
that fails (no space) is given up on all of them with a message, and the run continues.
"""

import contextlib
import dataclasses
import hashlib
import json
import secrets
import socket
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from etils import epath

from partitioning.rules import named_leaves
from processes import coordination as groups
from processes import peer_transfer
from processes.workdir_lease import Ownership
from runtime import files, units
from training.checkpointing import memory_copies
from training.checkpointing.consensus import Together, join_reports
from training.checkpointing.integrity import THREADS, UnreadableError, Verified, one_line
from training.checkpointing.memory_copies import OWN, RUN_ID, SENT, Copy, CopyFolder

_ALIGNED = 64  # bytes, between the shards of a copy
_AHEAD = 4  # shards on their way to the host, for each thread
_PEER_SECONDS = 300.0  # for a peer's copy to be there

Holders = tuple[int, ...]  # the processes that hold a shard
Part = tuple[int, str]  # (process, OWN or SENT): whose shards a file has


# ------------------------------ who holds what ------------------------------


@dataclasses.dataclass(frozen=True)
class Shard:
  """A shard in a copy.

  Attributes:
    key: the array's name, and (start, stop) of each dim.
    shape: of the shard.
    dtype: of the array.
    offset: of its bytes in the copy.
  """

  key: tuple
  shape: tuple[int, ...]
  dtype: np.dtype
  offset: int

  @property
  def stop(self) -> int:
    """Returns where its bytes end."""
    return self.offset + int(np.prod(self.shape)) * self.dtype.itemsize

  def view(self, array: np.ndarray) -> np.ndarray:
    """Returns it as a view of a copy's uint8 array."""
    return array[self.offset : self.stop].view(self.dtype).reshape(self.shape)


class Layout:
  """The shards of a state by the processes that hold them.

  Attributes:
    abstract: the state: a tree of ShapeDtypeStructs with shardings.
    hosts: of each process the number of its host.
    digest: of the arrays, their shards and who holds them.
  """

  def __init__(
    self,
    abstract: Any,
    hosts: Sequence[int],
    process_of: Callable[[jax.Device], int] = lambda device: device.process_index,
  ):
    """Takes the state, on which host each process is, and which process has a device."""
    self.abstract, self.hosts = abstract, tuple(hosts)
    self.leaves = named_leaves(abstract)
    self._holders: dict[tuple, Holders] = {}
    known: dict[Any, dict[tuple, Holders]] = {}  # many arrays are sharded alike
    facts = []
    for name, leaf in self.leaves.items():
      if (alike := (leaf.sharding, leaf.shape)) not in known:
        known[alike] = _holders(leaf.sharding, leaf.shape, process_of)
      self._holders.update({(name, index): by for index, by in known[alike].items()})
      facts.append([name, leaf.shape, str(leaf.dtype), list(known).index(alike)])
    text = json.dumps([facts, [list(one.items()) for one in known.values()]])
    self.digest = hashlib.sha256(text.encode()).hexdigest()

  def groups(self, process: int) -> set[Holders]:
    """Returns the holders of the shards that a process needs."""
    return {by for by in self._holders.values() if process in by}

  def is_sent(self, by: Holders) -> bool:
    """Returns whether shards go to the peer of the first of their holders."""
    several = len({*self.hosts}) > 1
    return len(self.hosts) > 1 and len({self.hosts[p] for p in by} if several else by) == 1

  def has(self, part: Part, by: Holders) -> bool:
    """Returns whether a file has the shards of these holders."""
    process, kind = part
    return process in by if kind == OWN else process == by[0] and self.is_sent(by)

  def shards(self, part: Part) -> list[Shard]:
    """Returns the shards in a file; what is sent comes first, so that it is a part of the whole."""
    process, kind = part
    ours = [key for key, by in self._holders.items() if process in by]
    first = [key for key in ours if self.has((process, SENT), self._holders[key])]
    taken = {*first}
    rest = [key for key in ours if key not in taken] if kind == OWN else []
    found, offset = [], 0
    for key in (*first, *rest):
      shape = tuple(stop - start for start, stop in key[1])
      found.append(Shard(key, shape, np.dtype(self.leaves[key[0]].dtype), offset))
      offset = -(-found[-1].stop // _ALIGNED) * _ALIGNED
    return found

  def size(self, part: Part) -> int:
    """Returns the bytes of a file's shards."""
    shards = self.shards(part)
    return shards[-1].stop if shards else 0

  def peer_of(self, process: int) -> int:
    """Returns whose shards a process has copies of: the next on another host, or the next."""
    count, hosts = len(self.hosts), self.hosts
    apart = (d for d in range(1, count) if all(hosts[p] != hosts[p - d] for p in range(count)))
    return (process - next(apart, 1)) % count

  def sources(self, process: int, there: Sequence[Sequence[Part]]) -> list[tuple[int, Part]] | None:
    """Returns the files that a process takes its shards from, and which process reads each.

    Args:
      process: that needs its shards.
      there: of each process, the files on its host.

    Returns:
      None where no process has some of the shards.
    """
    missing, taken = self.groups(process), []
    far = [(p, part) for p, parts in enumerate(there) for part in parts]
    for source, part in (*((process, part) for part in there[process]), *far):
      if new := {by for by in missing if self.has(part, by)}:
        missing -= new
        taken.append((source, part))
    return None if missing else taken


def _holders(
  sharding: jax.sharding.Sharding,
  shape: Sequence[int],
  process_of: Callable[[jax.Device], int],
) -> dict[tuple, Holders]:
  """Returns index -> the processes with a device that holds it, in their order."""
  found: dict[tuple, set[int]] = {}
  for device, index in sharding.devices_indices_map(tuple(shape)).items():
    found.setdefault(_bounds(index, shape), set()).add(process_of(device))
  return {index: tuple(sorted(by)) for index, by in found.items()}


def _bounds(index: Sequence[slice], shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
  return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


# ------------------------------ the tier ------------------------------


@dataclasses.dataclass(frozen=True)
class InMemory(Verified):
  """A step in memory of which every shard is there and intact.

  Attributes:
    order: the number of the owner that wrote it, and the step.
    layout: of its arrays.
    sources: of each process, the files that it takes its shards from, and which process reads each.
  """

  order: tuple[int, int] = (0, 0)
  layout: Layout | None = None
  sources: tuple[tuple[tuple[int, Part], ...], ...] = ()

  @property
  def step(self) -> int:
    """Returns its number."""
    return self.order[1]

  def __str__(self) -> str:
    """Returns what is said of its origin."""
    sent = sum(p != source for p, taken in enumerate(self.sources) for source, _ in taken)
    return f"in memory{f', {sent} of its parts from another process' if sent else ''}"


@dataclasses.dataclass
class _Save:
  """A save whose copies are being completed in the background."""

  step: int
  thread: threading.Thread | None = None
  failure: str = ""  # why this process has no copy
  no_peer: str = ""  # why it has none of its peer


class MemoryTier:
  """The copies of a run in memory; see above.

  Attributes:
    seconds: that each save has blocked the run.
    lost: how many saves were given up.
  """

  def __init__(
    self,
    local_dir: str,
    workdir: epath.Path,
    *,
    together: Together | None = None,
    say: Callable[[str], None] = print,
  ):
    """Changes nothing; all processes call it.

    Args:
      local_dir: the folder on each host; "": in its memory.
      workdir: of the run.
      together: the processes.
      say: called with messages, on every process alike.
    """
    self._together, self._owner = together or Together(), Ownership()
    self._workdir, self._say, self._me = workdir, say, self._together.index
    run = ""
    if self._together.first and (workdir / RUN_ID).exists():
      run = files.read_text(workdir / RUN_ID, most_bytes=64)
    self._run = self._together.from_first(run if run.isalnum() else secrets.token_hex(8))
    self._local_dir, self._folder = local_dir, CopyFolder(local_dir, self._run, self._me)
    names = self._together.exchange(socket.gethostname())
    self._hosts = [names.index(name) for name in names]
    self._layout: Layout | None = None
    self._pending: _Save | None = None
    self._bad: set[tuple] = set()  # copies whose bytes have changed
    self._sender: peer_transfer.Sender | None = None
    self._over, self._told = threading.Event(), ""
    self.seconds: list[float] = []
    self.lost = 0

  # ------------------------------ reading ------------------------------

  def newest(
    self, abstract_of: Callable[[Mapping[str, Any]], Any], *, after: int = -1
  ) -> InMemory | None:
    """Returns the newest step of which the survivors have every shard; None if there is none.

    Args:
      abstract_of: returns the state, with its shardings, of a run with this record.
      after: only steps after this one.
    """
    known: dict[tuple[int, int], tuple[Layout, dict]] = {}
    while True:
      mine = {(*c.order, *c.of): c for c in self._folder.copies() if self._fits(c, after)}
      told = self._together.exchange(json.dumps([*mine]))
      there = [[tuple(one) for one in json.loads(text or "[]")] for text in told]
      for order in sorted({one[:2] for ones in there for one in ones}, reverse=True):
        if order not in known:
          known[order] = self._shared(order, mine, abstract_of)
        layout, header = known[order]
        parts = [[one[2:] for one in ones if one[:2] == order] for ones in there]
        if layout.digest != header["layout"] or len(parts) != len(header["hosts"]):
          continue  # of another mesh: storage has what any mesh can read
        sources = [layout.sources(process, parts) for process in range(len(parts))]
        if None in sources:
          continue
        if why := join_reports(self._together.exchange(self._check(order, mine, sources))):
          self._say(f"WARNING: {why}; an intact copy is looked for")
          break  # without it
        path = epath.Path(self._folder.run) / str(order[1])
        given = {"order": order, "layout": layout, "sources": tuple(map(tuple, sources))}
        return InMemory(path, header["config"], header["record"], **given)
      else:
        return None

  def _fits(self, copy: Copy, after: int) -> bool:
    return copy.header["step"] > after and (*copy.order, *copy.of) not in self._bad

  def _shared(
    self, order: tuple[int, int], mine: Mapping[tuple, Copy], abstract_of: Callable[..., Any]
  ) -> tuple[Layout, dict]:
    """Returns the layout and the facts of a step, which not every process may have a file of."""
    ours = [copy.header for one, copy in mine.items() if one[:2] == order and one[3] == OWN]
    told = self._together.exchange(json.dumps(ours[0]) if ours else "")
    header = json.loads(next((text for text in told if text), '{"layout": "", "hosts": []}'))
    hosts = header["hosts"] or self._hosts
    return Layout(abstract_of(header.get("record", {})), hosts), header

  def _check(
    self, order: tuple[int, int], mine: Mapping[tuple, Copy], sources: Sequence[Sequence[tuple]]
  ) -> str:
    """Compares the files that this process reads with their digests; returns what has changed."""
    wanted = {part for taken in sources for source, part in taken if source == self._me}
    wrong = []
    for part in sorted(wanted):
      try:
        mine[(*order, *part)].check()
      except (memory_copies.DamagedCopyError, OSError, ValueError) as error:
        self._bad.add((*order, *part))
        wrong.append(str(error))
    return "; ".join(wrong)

  def restore(self, found: InMemory) -> Any:
    """Returns the state of a step, placed as its layout says; all processes call it.

    Raises:
      UnreadableError: a part that is on another host did not arrive.
    """
    if any(p != source for p, taken in enumerate(found.sources) for source, _ in taken):
      self._listen()
    shards: dict[tuple, np.ndarray] = {}
    failure = ""
    try:
      for source, part in found.sources[self._me]:
        array = self._part(found, source, part)
        shards.update({one.key: one.view(array) for one in found.layout.shards(part)})
    except (peer_transfer.TransferError, OSError) as error:
      failure = one_line(error)
    if why := join_reports(self._together.exchange(failure)):
      raise UnreadableError(why)
    leaves = {}
    for name, leaf in found.layout.leaves.items():

      def shard(index: tuple[slice, ...], name: str = name, leaf: Any = leaf) -> np.ndarray:
        return np.array(shards[name, _bounds(index, leaf.shape)])  # the file is written over later

      leaves[name] = jax.make_array_from_callback(leaf.shape, leaf.sharding, shard)
    abstract = found.layout.abstract
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves.values())

  def _part(self, found: InMemory, source: int, part: Part) -> np.ndarray:
    """Returns the bytes of a file of this host, or of another process's."""
    if source == self._me:
      path, count, _ = self._folder.find(found.order, part)
      return np.memmap(path, np.uint8, "r", shape=(count,))
    array = np.empty(found.layout.size(part), np.uint8)
    wanted = {"order": found.order, "of": part}
    group = groups.current()
    peer_transfer.receive(group, source, wanted, lambda _: array.data, wait_seconds=_PEER_SECONDS)
    return array

  # ------------------------------ writing ------------------------------

  def start_writing(self, owner: Ownership, tree: Any, *, resumed: bool) -> None:
    """Makes the folder on this host, and removes those of other runs whose workdir is gone.

    Args:
      owner: of the workdir, whose number the copies carry.
      tree: what will be saved, as it is now.
      resumed: whether it is a step of the copies. If not, the run makes later steps again, perhaps
        on another mesh: it gets another folder, so that no start takes copies of them, wherever
        they are.

    Raises:
      OSError: the workdir cannot be written.
    """
    self._owner = owner
    self._layout = Layout(jax.tree.map(_abstract, tree), self._hosts)
    peer = self._layout.peer_of(self._me)
    if not resumed:
      self._run = self._together.from_first(secrets.token_hex(8))
      self._folder = CopyFolder(self._local_dir, self._run, self._me)
    if self._together.first and not resumed:
      files.replace(self._workdir / RUN_ID, self._run, require=self._owner.require)
    self._together.exchange("")  # the others may remove folders whose workdir has no such file
    with contextlib.suppress(OSError):  # the first save says it
      self._folder.open(self._workdir)
      self._folder.give_up()
      self._folder.reserve(OWN, self._layout.size((self._me, OWN)))
      if peer != self._me and (count := self._layout.size((peer, SENT))):
        self._folder.reserve(SENT, count)
    self._listen()

  def _listen(self) -> None:
    if self._sender is None and not self._together.alone:
      self._sender = peer_transfer.Sender(groups.current(), self._find)

  def _find(self, wanted: Mapping[str, Any]) -> peer_transfer.Part | None:
    order, save = tuple(wanted["order"]), self._pending
    if save is not None and save.failure and save.step == order[1]:
      raise LookupError(save.failure)
    return self._folder.find(order, tuple(wanted["of"]))

  def save(
    self, step: int, tree: Any, *, config: Mapping[str, Any], record: Mapping[str, Any]
  ) -> float:
    """Copies this process's shards to its host; the rest is done in the background.

    Args:
      step: the number of steps done.
      tree: placed arrays; they may be donated as soon as this returns.
      config: resolved, as JSON.
      record: further JSON, as of a checkpoint in storage.

    Returns:
      The seconds that the caller waited, without those for other processes to come here, which it
      would wait for at the next step.
    """
    began = time.monotonic()
    if self._pending is not None:
      self._pending.thread.join()
    joined = time.monotonic() - began
    self.finish()
    began = time.monotonic() - joined
    save = self._pending = _Save(step)
    array = None
    try:
      array = self._folder.buffer(OWN, self._layout.size((self._me, OWN)))
      self._copy(tree, array)
    except OSError as error:
      save.failure = f"{self._folder.path}: {error.strerror or error}"
    header = {
      **{"owner": self._owner.number, "step": step, "of": self._me, "part": OWN},
      **{"layout": self._layout.digest, "hosts": self._hosts},
      **{"config": dict(config), "record": files.finite(dict(record))},
    }
    save.thread = threading.Thread(target=self._complete, args=(save, array, header))
    save.thread.start()
    self.seconds.append(time.monotonic() - began)
    return self.seconds[-1]

  def _copy(self, tree: Any, array: np.ndarray) -> None:
    """Copies shards from the devices, several at once."""
    held = {}
    for name, leaf in named_leaves(tree).items():
      for shard in leaf.addressable_shards:
        held[name, _bounds(shard.index, leaf.shape)] = shard.data
    shards = self._layout.shards((self._me, OWN))
    ahead = _AHEAD * THREADS
    for shard in shards[:ahead]:
      held[shard.key].copy_to_host_async()

    def one(number: int) -> None:
      if number + ahead < len(shards):
        held[shards[number + ahead].key].copy_to_host_async()
      shards[number].view(array)[...] = np.asarray(held[shards[number].key])

    with ThreadPoolExecutor(THREADS) as pool:
      list(pool.map(one, range(len(shards))))

  def _complete(self, save: _Save, array: np.ndarray | None, header: dict[str, Any]) -> None:
    """Writes the digests and the copy of the peer's shards, in the background."""
    me = self._me
    try:
      if array is not None and not save.failure:
        sent = self._layout.size((me, SENT))
        header |= {"sent_bytes": sent, "sent_sha256": memory_copies.digest(array, sent)}
        header |= {"bytes": len(array), "sha256": memory_copies.digest(array)}
        self._folder.commit(header)
    except OSError as error:
      save.failure = f"{self._folder.path}: {error.strerror or error}"
    peer = self._layout.peer_of(me)
    if save.failure or peer == me or not (count := self._layout.size((peer, SENT))):
      return
    try:
      copy = self._folder.buffer(SENT, count)
      wanted = {"order": [header["owner"], save.step], "of": [peer, SENT]}
      given = {"wait_seconds": _PEER_SECONDS, "given_up": self._over.is_set}
      sha256 = peer_transfer.receive(
        groups.current(), peer, wanted, lambda _: memoryview(copy), **given
      )
      self._folder.commit({**header, "of": peer, "part": SENT, "bytes": count, "sha256": sha256})
    except (OSError, peer_transfer.TransferError) as error:
      save.no_peer = f"no copy of process {peer}: {one_line(error)}"

  def finish(self) -> None:
    """Waits for the save in the background; then those before it are no longer needed.

    A save that has failed on any process is given up on all, with a message.
    """
    if (save := self._pending) is None:
      return
    save.thread.join()
    newest = self._owner.number, save.step
    told = self._together.exchange(json.dumps([save.failure, save.no_peer]))
    self._pending = None
    failures, no_peers = zip(*map(json.loads, told), strict=True)
    if why := join_reports(failures):
      self.lost += 1
      self._folder.drop(lambda order: order == newest)
      self._folder.give_up()
    else:
      self._folder.drop(lambda order: order < newest, spare=True)
    text = why or join_reports(no_peers) or self._text()
    if text != self._told:  # a full memory stays full: once
      what = "is given up" if why else "has fewer copies"
      kept = text == self._text()
      self._say(text if kept else f"WARNING: the save of step {save.step} to memory {what}: {text}")
    self._told = text

  def _text(self) -> str:
    """Returns what the first save says, and the first after one that has failed."""
    peer, size = self._layout.peer_of(self._me), self._layout.size
    own, other = size((self._me, OWN)), size((peer, SENT))
    beside = f" and {units.size(other)} of its peer" if other else ""
    return (
      f"saves to memory: {units.size(own)} of each process{beside}, at most twice, in "
      f"{self._folder.run}"
    )

  # ------------------------------ removing ------------------------------

  def roll_back(self, step: int) -> None:
    """Removes every step newer than `step`; all processes call it."""
    self.finish()
    self._folder.drop(lambda order: order[1] > step)
    self._together.exchange("")

  def text(self, stored: Sequence[float]) -> str:
    """Returns how long saves have blocked the run; "" without any.

    Args:
      stored: seconds for which saves to storage have blocked it.
    """
    if not self.seconds:
      return ""
    each = statistics.median(self.seconds)
    text = f"saved {len(self.seconds)} times to memory, blocking for {units.seconds(each)}"
    if stored:
      whole = statistics.median(stored)
      text += f", {units.percent(each / whole)} of a save to storage ({units.seconds(whole)})"
    return f"{text}; {self.lost} of them given up" if self.lost else text

  def close(self) -> None:
    """Ends what runs in the background; the files stay."""
    self._over.set()
    if self._pending is not None and self._pending.thread is not None:
      self._pending.thread.join()
    if self._sender is not None:
      self._sender.close()
      self._sender = None

  def remove(self) -> None:
    """Ends, and removes the files of the run: storage has what they had."""
    self.close()
    self._folder.remove(self._together.count)


def _abstract(leaf: jax.Array) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def host_bytes(abstract: Any, process_of: Mapping[jax.Device, int]) -> int:
  """Returns the bytes of host memory that the copies of the first process take, and of its peer's.

  Args:
    abstract: the state, a tree of ShapeDtypeStructs with shardings.
    process_of: device -> its process; each process has a host of its own.
  """
  layout = Layout(abstract, range(max(process_of.values()) + 1), process_of.__getitem__)
  peer = layout.peer_of(0)
  return 2 * (layout.size((0, OWN)) + (layout.size((peer, SENT)) if peer else 0))
