"""What is on the disk when a folder gets its final name: records syncs and renames."""

import os
import pathlib
import zlib


class Syncs:
  """Records `os.fsync`, and for each rename what of its source had changed since its last one.

  Attributes:
    events: ("sync", path) and ("rename", source, target, unsynced), in order.
  """

  def __init__(self, monkeypatch):
    """Begins to record; C++ libraries are not seen."""
    self.events: list[tuple] = []
    self._synced: dict[int, object] = {}  # inode -> its content
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def synced(descriptor):
      fsync(descriptor)
      path = pathlib.Path(os.readlink(f"/proc/self/fd/{descriptor}"))
      self._synced[path.stat().st_ino] = _content(path)
      self.events.append(("sync", path))

    def renaming(original):
      def renamed(source, target, **options):
        source, target = pathlib.Path(source), pathlib.Path(target)
        self.events.append(("rename", source, target, self.unsynced(source)))
        original(source, target, **options)

      return renamed

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renaming(rename))
    monkeypatch.setattr(os, "replace", renaming(replace))

  def unsynced(self, path: pathlib.Path) -> list[str]:
    """Returns what is at or below a path whose content a power cut may take."""
    paths = [path, *path.rglob("*")]
    return [
      str(one.relative_to(path))
      for one in sorted(paths)
      if self._synced.get(one.stat().st_ino) != _content(one)
    ]

  def place(self, *event: object) -> int:
    """Returns where an event is that begins so."""
    found = [i for i, one in enumerate(self.events) if one[: len(event)] == event]
    assert found, (event, self.events)
    return found[0]

  def unsynced_at(self, target: pathlib.Path) -> list[str]:
    """Returns what was not on the disk when something was renamed to `target`."""
    [found] = [event[3] for event in self.events if event[0] == "rename" and event[2] == target]
    return found


def _content(path: pathlib.Path) -> object:
  if path.is_dir():
    return sorted((name, (path / name).stat().st_ino) for name in os.listdir(path))
  return zlib.crc32(path.read_bytes())
