"""Claims to a workdir in a bucket, by conditional writes."""

import threading

MOST_BYTES = 2**16  # of a claim


class BucketStorage:
  """A folder of a bucket, accessed by TensorStore, with the methods of `_FolderStorage`.

  A claim is created on the condition that its object does not exist: `ifGenerationMatch=0` in Cloud
  Storage, `If-None-Match: *` in S3. Both list new objects without delay.
  """

  def __init__(self, url: str):
    """Takes the URL of the folder; the bucket must exist."""
    self._url = url
    self._store = None
    self._opening = threading.Lock()

  @property
  def _objects(self):
    import tensorstore  # here: it takes a while, and a workdir on a disk does not need it

    with self._opening:
      if self._store is None:
        self._store = _result(tensorstore.KvStore.open(self._url))
    return self._store

  def names(self) -> list[str]:
    return [name.decode(errors="replace") for name in _result(self._objects.list())]

  def create(self, name: str, text: str) -> bool:
    there = _result(self._objects.read(name))
    if there.state != "missing":
      return False
    # The generation of a missing object: the server refuses the write if there is one now.
    written = _result(self._objects.write(name, text, if_equal=there.stamp.generation))
    # TensorStore retries a request whose reply was lost; then the object has this claim's secret.
    return bool(written.generation) or self.read(name)[0] == text

  def read(self, name: str) -> tuple[str, str]:
    found = _result(self._objects.read(name))
    text = found.value[:MOST_BYTES].decode(errors="replace")
    return text, f"{found.stamp.generation!r} {text}"

  def write(self, name: str, text: str) -> None:
    _result(self._objects.write(name, text))

  def remove(self, name: str) -> None:
    _result(self._objects.write(name, None))

  def remove_created(self) -> None:
    """Does nothing: a bucket has no folders."""


def _result(future):
  """Returns the result of a TensorStore future; raises OSError if it failed or takes too long."""
  try:
    return future.result(timeout=60)
  except (ValueError, TimeoutError) as error:
    raise OSError(f"{type(error).__name__}: {error}") from error
