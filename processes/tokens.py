"""The shared secret of the processes of a run, and message signatures.

Anyone who reaches the coordinator's port can send to it. So every message between processes carries
an HMAC-SHA256 under a token that only they know, over the purpose of the message and what it is
about: a signature of one message is not valid for another.

The token comes from the environment (`processes.launch` sets it there). Otherwise process 0
generates one and publishes it in the workdir while it waits for the others, in a file that only its
user may read.
"""

import contextlib
import hashlib
import hmac
import json
import os
import re
import secrets
from collections.abc import Iterator

from etils import epath

from processes import preemption
from runtime import files

VARIABLE = "MESHWRIGHT_TOKEN"
LEAST_CHARACTERS = 16
LINE_BYTES = 2**14  # the longest line that is read
_MOST_BYTES = 4096  # of a file
_LINE = re.compile(rb"([0-9a-f]{64}) (\{.*\})\n", re.DOTALL)


def sign(key: bytes, purpose: str, *parts: str) -> str:
  """Returns the signature, 64 hexadecimal digits.

  Args:
    key: the token, or a key derived from it.
    purpose: what the message is for; part of what is signed.
    parts: the message, and what it is about: a name, the line that it answers.
  """
  # JSON, because joined strings could be split differently.
  return hmac.new(key, json.dumps([purpose, *parts]).encode(), hashlib.sha256).hexdigest()


def signed(key: bytes, signature: str, purpose: str, *parts: str) -> bool:
  """Returns whether this is the signature that `sign` returns for the same arguments."""
  wanted = sign(key, purpose, *parts).encode()
  return hmac.compare_digest(wanted, signature.encode(errors="surrogatepass"))


def line(key: bytes, purpose: str, text: str, *parts: str) -> bytes:
  """Returns a signed line of the rendezvous."""
  return f"{sign(key, purpose, text, *parts)} {text}\n".encode()


def split_line(received: bytes) -> tuple[str, str]:
  """Returns signature and text of a line; raises ValueError if it is malformed."""
  found = _LINE.fullmatch(received)
  if not found:
    raise ValueError("no line")
  return found[1].decode(), found[2].decode()  # UnicodeDecodeError is a ValueError


class Token:
  """The token of a run, from the environment or the workdir."""

  def __init__(self, folder: epath.Path | None, address: str):
    """Reads the environment.

    Args:
      folder: the workdir, which all processes see; None: only the environment can have a token.
      address: of the coordinator; runs in one folder have different ones.

    Raises:
      ValueError: the variable's value is too short.
    """
    self._given = os.environ.get(VARIABLE, "")
    if self._given and len(self._given) < LEAST_CHARACTERS:
      raise ValueError(
        f"{VARIABLE} has {len(self._given)} characters; a token has at least {LEAST_CHARACTERS}, "
        f"drawn at random, such as `openssl rand -hex 32` prints"
      )
    self._file = None
    if folder is not None and not self._given:
      name = hashlib.sha256(address.encode()).hexdigest()[:16]
      self._file = folder / f".token-{name}"

  def __str__(self) -> str:
    """Returns its origin, for messages."""
    return VARIABLE if self._given or self._file is None else f"the file {self._file}"

  @property
  def given(self) -> bool:
    """Returns whether the environment has one, so that it cannot change."""
    return bool(self._given)

  @contextlib.contextmanager
  def shown(self) -> Iterator[bytes]:
    """Yields the token of process 0, and publishes it to the others until the block ends.

    Raises:
      OSError: the workdir cannot be written, and the environment has no token.
    """
    if self._given or self._file is None:
      yield self._given.encode() or secrets.token_bytes()  # the latter is unknown to all others
      return
    folder, text = self._file.parent, secrets.token_hex(32)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
      folder.mkdir(parents=True, exist_ok=True)
      files.replace(self._file, text, shared=True, mode=0o600)
    except OSError as error:
      raise OSError(
        f"process 0 cannot write a token to the workdir ({error}), which the processes need to "
        f"know one another; make {folder} writable, or set {VARIABLE} for all of them"
      ) from error

    def remove() -> None:
      with contextlib.suppress(OSError):
        self._file.unlink(missing_ok=True)
        for empty in made:
          empty.rmdir()

    try:
      with preemption.undone(remove):  # even if a signal ends this process
        yield text.encode()
    finally:
      remove()

  def read(self) -> bytes:
    """Returns the token as a process other than 0 reads it; b"" if there is none yet.

    Raises:
      PermissionError: the file was not written by process 0.
    """
    if self._given or self._file is None:
      return self._given.encode()
    return _read(self._file)


def _read(file: epath.Path) -> bytes:
  """Returns the content of a file that only this user may read; b"" if there is none yet."""
  try:
    next(iter(file.parent.iterdir()), None)  # makes a network file system ask its server
    if not files.is_local(file):  # in a bucket, whose permissions apply
      return file.read_bytes()[:_MOST_BYTES]
    with open(files.open_plain(file, os.O_RDONLY), "rb") as opened:
      found, content = os.fstat(opened.fileno()), opened.read(_MOST_BYTES)
  except PermissionError:
    raise
  except OSError:
    return b""
  if found.st_uid != os.geteuid() or found.st_mode & 0o077:
    raise PermissionError(
      f"{file} belongs to user {found.st_uid} with mode {found.st_mode & 0o777:03o}, and only a "
      f"file of user {os.geteuid()} with mode 600 counts; set {VARIABLE} for all processes"
    )
  return content
