"""The file of digests: what it says, and that nothing about it can change unnoticed."""

import hashlib
import os
import random
import tracemalloc

import pytest
from etils import epath

from training.checkpointing import integrity, reading
from training.checkpointing.integrity import DamagedError, Digest

CONTENTS = {"a": b"", "state/d/long name": b"x" * 5000, "state/manifest": b"yz", "config/m": b"{}"}


@pytest.fixture
def folder(tmp_path):
  """Returns a folder of a few files, with their digests."""
  for path, content in CONTENTS.items():
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_bytes(content)
  folder = epath.Path(tmp_path)
  integrity.write_digests(folder, integrity.compute_digests(folder, CONTENTS))
  return folder


def check(folder):
  """Checks all of a folder."""
  listed = reading.read_digests(folder)
  reading.check_sizes(folder, listed)
  reading.check_contents(folder, listed)


def test_the_file_is_what_the_documents_say(folder):
  lines = (folder / "digests").read_text().splitlines(keepends=True)
  assert lines[0] == "checkpoint digests 1\n"
  expected = [
    f"{hashlib.sha256(content).hexdigest()} {len(content)} {path}\n"
    for path, content in sorted(CONTENTS.items())
  ]
  assert lines[1:-1] == expected
  above = "".join(lines[:-1]).encode()
  assert lines[-1] == f"{hashlib.sha256(above).hexdigest()} end\n"
  check(folder)


def test_what_the_file_system_adds_is_passed_over(folder):
  (folder / ".nfs0001").write_text("x")
  (folder / "state" / ".snapshot").mkdir()
  check(folder)


DAMAGE = {
  "missing": (lambda f: (f / "a").unlink(), r"^a: missing$"),
  "added": (lambda f: (f / "config/n").write_text(""), r"^config/n: not in digests$"),
  "cut": (
    lambda f: (f / "state/d/long name").write_bytes(b"x" * 4999),
    r"^state/d/long name: 4999 bytes, and it should be 5000$",
  ),
  "changed": (
    lambda f: (f / "state/manifest").write_bytes(b"yy"),
    r"^state/manifest: its bytes have changed \(SHA-256 [0-9a-f]{12}, [0-9a-f]{12} once\)$",
  ),
  "a FIFO for a file": (
    lambda f: ((f / "a").unlink(), os.mkfifo(f / "a")),
    r"^a: it is a FIFO, not a plain file$",
  ),
  "a link": (
    lambda f: ((f / "a").rename(f.parent / "a"), os.symlink(f.parent / "a", f / "a")),
    r"^a: it is a symbolic link, not a plain file$",
  ),
  "a link to a folder above": (
    lambda f: os.symlink(f, f / "state/loop"),
    r"^state/loop: it is a symbolic link, not a plain file$",
  ),
  "a sparse file": (
    lambda f: os.truncate(f / "a", 2**40),
    rf"^a: {2**40} bytes, and it should be \d+$",
  ),
  "folders in folders": (
    lambda f: (f / "/".join("d" * 30)).mkdir(parents=True),
    r"^d(/d){16}/d: folders in folders, deeper than 16$",
  ),
  "no digests": (
    lambda f: (f / "digests").unlink(),
    r"^digests: missing, .* before there were digests: checkpoint.verify=off reads it",
  ),
  "no digests but a folder": (
    lambda f: ((f / "digests").unlink(), (f / "digests").mkdir()),
    r"^digests: it is a directory, not a plain file$",
  ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(kind, folder):
  damage, message = DAMAGE[kind]
  damage(folder)
  with pytest.raises(DamagedError, match=message):
    check(folder)


def test_of_many_files_the_first_are_named_and_the_others_counted(folder):
  for path in CONTENTS:
    (folder / path).write_bytes(b"other")
  with pytest.raises(DamagedError, match=r"^a: 5 bytes, .*; config/m: .*; .*; and 1 more$"):
    check(folder)


def test_digests_with_a_flipped_bit_or_cut_or_longer_are_damaged(folder):
  content = (folder / "digests").read_bytes()
  assert reading.parse_digests(content)
  others = [content[:end] for end in range(len(content))] + [content + b"\n", b"\n" + content]
  for byte in range(len(content)):
    others.append(bytes([*content[:byte], content[byte] ^ 1 << byte % 8, *content[byte + 1 :]]))
  for other in others:
    with pytest.raises(DamagedError, match=r"^digests: "):
      reading.parse_digests(other)


def test_another_form_and_other_lines_are_refused():
  def text(*lines):
    above = "".join(f"{line}\n" for line in lines)
    return f"{above}{hashlib.sha256(above.encode()).hexdigest()} end\n".encode()

  with pytest.raises(DamagedError, match="begins with 'checkpoint digests 2'"):
    reading.parse_digests(text("checkpoint digests 2"))
  good = f"{'0' * 64} 5 a"
  assert reading.parse_digests(text("checkpoint digests 1", good)) == [Digest("a", 5, "0" * 64)]
  for line in (f"{'0' * 63} 5 a", f"{'0' * 64} -5 a", f"{'0' * 64} 05 a", f"{'0' * 64} 5 ", "x"):
    with pytest.raises(DamagedError, match="no digest, size and path"):
      reading.parse_digests(text("checkpoint digests 1", line))


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_the_shares_are_all_files_once_and_about_as_many_bytes(count):
  chance = random.Random(count)
  listed = [Digest(f"file {i}", chance.randrange(1000), "0" * 64) for i in range(40)]
  shares = [reading.share_of(listed, index, count) for index in range(count)]
  assert sorted((d for one in shares for d in one), key=lambda d: d.path) == sorted(
    listed, key=lambda d: d.path
  )
  loads = [sum(digest.size for digest in one) for one in shares]
  assert max(loads) - min(loads) <= 1000
  # All processes find the same shares, in whatever order they list the files.
  again = random.Random(0).sample(listed, len(listed))
  assert [reading.share_of(again, index, count) for index in range(count)] == shares


def test_a_large_file_is_read_in_blocks(tmp_path):
  size = 64 * 2**20
  with open(tmp_path / "large", "wb") as file:
    file.truncate(size)
  folder = epath.Path(tmp_path)
  tracemalloc.start()
  try:
    [digest] = integrity.compute_digests(folder, ["large"])
    reading.check_contents(folder, [digest])
    _, most = tracemalloc.get_traced_memory()
  finally:
    tracemalloc.stop()
  assert digest.size == size
  assert most < 8 * 2**20
