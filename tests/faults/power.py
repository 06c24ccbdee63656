"""What a power cut may leave of a folder, from the system calls that wrote it.

`strace` records the calls of a process below a folder. `Disk` replays them, and gives the states in
which the folder may be after a power cut at any moment. Of a file that was not synced since it was
written, the content may be old, missing, cut or zeros. Of the entries of a folder that was not
synced since, any may be there or not, independently of their order. Real file systems keep more.
"""

import dataclasses
import os
import pathlib
import random
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence

CALLS = (
  *("openat", "open", "creat", "close", "dup", "fcntl", "lseek", "write", "pwrite64", "writev"),
  *("ftruncate", "fsync", "fdatasync", "rename", "renameat", "renameat2", "mkdir", "unlink"),
  *("unlinkat", "rmdir", "link"),
)
_LINE = re.compile(r"(\d+) +(?:<\.\.\. (\w+) resumed>|(\w+)\()(.*)")
_TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')


@dataclasses.dataclass(eq=False)
class Node:
  """A file or a folder.

  Attributes:
    folder: whether it is one.
    content: of a file, as the processes see it.
    synced: of a file, what is on the disk; None: perhaps nothing.
  """

  folder: bool
  content: bytes = b""
  synced: bytes | None = None


@dataclasses.dataclass(eq=False)
class Entry:
  """A change of entries, atomic: `node` appears at `to`, and what was at `of` goes.

  Attributes:
    synced: whether it is on the disk.
  """

  node: Node | None
  to: tuple[Node, str] | None
  of: tuple[Node, str] | None
  synced: bool = False


@dataclasses.dataclass(frozen=True)
class Call:
  """A system call: its name, texts and numbers among its arguments, result, and two moments."""

  name: str
  texts: tuple[bytes, ...]
  numbers: tuple[int, ...]
  words: str
  result: int
  began: int
  ended: int


def trace(command: Sequence[str], log: pathlib.Path, **options: object) -> list[Call]:
  """Runs a command and returns the calls that succeeded, in the order of their beginnings."""
  strace = ["strace", "-f", "-xx", "-s", "10000000", "-e", f"trace={','.join(CALLS)}", "-o", log]
  subprocess.run([*strace, *command], check=True, **options)
  calls, unfinished = [], {}
  for moment, line in enumerate(log.read_text().splitlines()):
    if not (match := _LINE.match(line)):
      continue
    thread, resumed, name, rest = match.groups()
    if rest.endswith("<unfinished ...>"):
      unfinished[thread] = (moment, rest.removesuffix("<unfinished ...>"))
      continue
    began, before = unfinished.pop(thread) if resumed else (moment, "")
    words, _, result = (before + rest).rpartition(" = ")
    result = int(re.match(r"-?\d+|", result)[0] or -1)
    if result >= 0:
      texts = tuple(bytes.fromhex(text.replace("\\x", "")) for text in _TEXT.findall(words))
      plain = _TEXT.sub("", words)
      numbers = tuple(map(int, re.findall(r"(?<![\w.])\d+", plain)))
      calls.append(Call(resumed or name, texts, numbers, plain, result, began, moment))
  return sorted(calls, key=lambda call: call.began)


class Disk:
  """Replays calls below a folder."""

  def __init__(self, folder: pathlib.Path):
    """The folder is on the disk, and empty."""
    self._root, self.top = str(folder).encode(), Node(True)
    self._there: dict[tuple[Node, str], Node] = {}  # as the processes see it
    self._entries: list[Entry] = []
    self._open: dict[int, list] = {}  # descriptor -> node and offset, which duplicates share

  def replay(self, calls: Sequence[Call]) -> Iterator[Call]:
    """Applies one call after the other; yields each after which something has changed.

    A change is made when its call begins. A sync holds when its call has ended, for what was there
    when it began.
    """
    syncs: list[tuple[int, Node, bytes, list[Entry]]] = []
    for call in calls:
      for sync in [one for one in syncs if one[0] < call.began]:
        syncs.remove(sync)
        _, node, content, entries = sync
        node.synced = content
        for entry in entries:
          entry.synced = True
      if call.name in ("fsync", "fdatasync"):
        if found := self._open.get(call.numbers[0]):
          node = found[0]
          pending = [e for e in self._entries if node in [p and p[0] for p in (e.to, e.of)]]
          syncs.append((call.ended, node, node.content, pending))
          yield call
      elif self._apply(call):
        yield call

  def _apply(self, call: Call) -> bool:
    paths = [self._find(text) for text in call.texts]
    if call.name in ("openat", "open", "creat"):
      if (place := paths[0]) is None:
        self._open.pop(call.result, None)
        return False
      there = place == (None, "") or place in self._there
      node = self.top if place == (None, "") else self._there.get(place)
      if node is None:
        node = Node(False)
        self._enter(Entry(node, place, None))
      elif "O_TRUNC" in call.words:
        node.content = b""
      self._open[call.result] = [node, 0]
      return not there or "O_TRUNC" in call.words
    if call.name == "close":
      self._open.pop(call.numbers[0], None)
    elif call.name == "dup" or "F_DUPFD" in call.words:
      if found := self._open.get(call.numbers[0]):
        self._open[call.result] = found
    elif call.name == "lseek":
      if found := self._open.get(call.numbers[0]):
        found[1] = call.result
    elif call.name in ("write", "pwrite64", "writev", "ftruncate"):
      if found := self._open.get(call.numbers[0]):
        return self._write(call, found)
    elif call.name == "mkdir" and paths[0]:
      self._enter(Entry(Node(True), paths[0], None))
      return True
    elif call.name in ("unlink", "unlinkat", "rmdir"):
      place = paths[0] or self._relative(call)
      if place in self._there:
        self._enter(Entry(None, None, place))
        return True
    elif call.name.startswith("rename") and paths[0]:
      self._enter(Entry(self._there[paths[0]], paths[1], paths[0]))
      return True
    elif call.name == "link" and paths[0]:
      self._enter(Entry(self._there[paths[0]], paths[1], None))
      return True
    return False

  def _write(self, call: Call, opened: list) -> bool:
    node, offset = opened
    if call.name == "ftruncate":
      size = call.numbers[1]
      node.content = node.content[:size].ljust(size, b"\0")
      return True
    data = b"".join(call.texts)
    assert len(data) == call.result, call
    start = call.numbers[-1] if call.name == "pwrite64" else offset
    before, after = node.content[:start].ljust(start, b"\0"), node.content[start + len(data) :]
    node.content = before + data + after
    if call.name != "pwrite64":
      opened[1] = offset + len(data)
    return True

  def _find(self, path: bytes) -> tuple[Node | None, str] | None:
    """Returns the folder and the name of a path; (None, "") for the top, None outside of it."""
    if path == self._root:
      return None, ""
    if not path.startswith(self._root + b"/"):
      return None
    *above, name = path[len(self._root) + 1 :].decode().split("/")
    node = self.top
    for part in above:
      node = self._there[node, part]
    return node, name

  def _relative(self, call: Call) -> tuple[Node, str] | None:
    """Returns the place of `unlinkat(folder, name)`."""
    found = self._open.get(call.numbers[0]) if call.numbers else None
    return (found[0], call.texts[0].decode()) if found else None

  def _enter(self, entry: Entry) -> None:
    self._entries.append(entry)
    _change(self._there, entry)

  # ------------------------------ after a power cut ------------------------------

  def states(self, draw: random.Random, count: int) -> Iterator[dict[str, bytes | None]]:
    """Yields path -> content (None: a folder) of what a power cut now may leave.

    The extremes first: only what was synced; all entries, but no content that was not synced, or
    zeros; everything, as after a kill. Then `count` at random.
    """
    yield self._state(lambda entry: False, lambda node: node.synced or b"")
    yield self._state(lambda entry: True, lambda node: node.synced or b"")
    yield self._state(lambda entry: True, lambda node: bytes(len(node.content)))
    yield self._state(lambda entry: True, lambda node: node.content)
    for _ in range(count):
      share = draw.random()
      yield self._state(lambda entry: draw.random() < share, lambda node: _left(node, draw))  # noqa: B023

  def _state(self, keeps, content) -> dict[str, bytes | None]:
    there: dict[tuple[Node, str], Node] = {}
    for entry in self._entries:
      if entry.synced or keeps(entry):
        _change(there, entry)
    found: dict[str, bytes | None] = {}

    def walk(folder: Node, prefix: str) -> None:
      for (above, name), node in there.items():
        if above is folder:
          if node.folder:
            found[prefix + name] = None
            walk(node, f"{prefix}{name}/")
          else:
            whole = node.synced == node.content
            found[prefix + name] = node.content if whole else content(node)

    walk(self.top, "")
    return found


def _change(there: dict[tuple[Node, str], Node], entry: Entry) -> None:
  if entry.of and (entry.node is None or there.get(entry.of) is entry.node):
    there.pop(entry.of, None)
  if entry.to:
    there[entry.to] = entry.node


def _left(node: Node, draw: random.Random) -> bytes:
  """Returns what may be left of a file that was not synced since it was written."""
  size = draw.randrange(len(node.content) + 1)
  return draw.choice(
    (node.synced or b"", b"", node.content[:size], bytes(len(node.content)), node.content)
  )


def make(state: dict[str, bytes | None], folder: pathlib.Path) -> None:
  """Writes a state to a folder, replacing what is there."""
  shutil.rmtree(folder, ignore_errors=True)
  folder.mkdir()
  for path, content in state.items():
    if content is None:
      os.mkdir(folder / path)
    else:
      (folder / path).write_bytes(content)
