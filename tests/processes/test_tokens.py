"""The token of a run: from the environment or the workdir, and what is signed with it."""

import os
import stat

import pytest
from etils import epath

from processes import preemption, rendezvous, tokens
from processes.listening import free_port
from tests.processes.stores import together


@pytest.fixture(autouse=True)
def _none_given(monkeypatch):
  monkeypatch.delenv(tokens.VARIABLE, raising=False)


def token(folder) -> tokens.Token:
  """Returns the token of a run with this workdir."""
  return tokens.Token(epath.Path(folder), "host0:8476")


def test_signatures_cover_purpose_and_every_part():
  key = b"k"
  signature = tokens.sign(key, "hello", "ab", "c")
  assert tokens.signed(key, signature, "hello", "ab", "c")
  others = [("answer", "ab", "c"), ("hello", "a", "bc"), ("hello", "ab"), ("hello", "c", "ab")]
  for changed in others:
    assert not tokens.signed(key, signature, *changed)
  assert not tokens.signed(b"l", signature, "hello", "ab", "c")
  assert not tokens.signed(key, "\udcff", "hello", "ab", "c")


def test_signatures_are_hmac_sha256_of_json():
  # printf '["hello", "x"]' | openssl dgst -sha256 -hmac Jefe
  wanted = "337b7af78387bfbc2335da6c09459cdfbdb9c9c32117f859db0814abb1aefc72"
  assert tokens.sign(b"Jefe", "hello", "x") == wanted


def test_the_environment_comes_first(monkeypatch, tmp_path):
  monkeypatch.setenv(tokens.VARIABLE, "0123456789abcdef")
  one = token(tmp_path / "run")
  with one.shown() as key:
    assert key == one.read() == b"0123456789abcdef"
  assert [*tmp_path.iterdir()] == []


def test_a_token_that_can_be_guessed_is_refused(monkeypatch):
  monkeypatch.setenv(tokens.VARIABLE, "secret")
  with pytest.raises(ValueError, match="has 6 characters; a token has at") as said:
    tokens.Token(None, "")
  assert "secret" not in str(said.value)


def test_the_workdir_shows_it_while_process_0_waits_and_nothing_is_left(tmp_path):
  folder, keys = tmp_path / "runs" / "first", set()
  assert token(folder).read() == b""
  for end in (lambda: None, preemption.clean_up):  # that one before `os._exit`
    with token(folder).shown() as key:
      [file] = folder.iterdir()
      assert stat.S_IMODE(file.stat().st_mode) == 0o600
      assert token(folder).read() == key
      assert len(key) == 64
      assert tokens.Token(epath.Path(folder), "host0:8477").read() == b"", "of another run"
      end()
      assert end is not preemption.clean_up or [*tmp_path.iterdir()] == []
    assert [*tmp_path.iterdir()] == []
    keys.add(key)
  assert len(keys) == 2, "each start draws another"


def test_what_is_in_the_workdir_stays_and_a_file_of_a_killed_start_is_replaced(tmp_path):
  (tmp_path / "config.json").write_text("{}")
  with token(tmp_path).shown() as first:
    [file] = tmp_path.glob(".token-*")
  assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
  file.write_text(first.decode())
  file.chmod(0o600)
  with token(tmp_path).shown() as key:
    assert token(tmp_path).read() == key != first


def planted(folder, kind: str):
  """Puts something in the place of the file."""
  with token(folder).shown() as key:
    [file] = folder.iterdir()
  if kind == "others may read it":
    file.write_text(key.decode())
    file.chmod(0o644)
  elif kind == "a FIFO":
    os.mkfifo(file, 0o600)
  elif kind == "a symlink":
    (folder / "elsewhere").write_text("a token of somebody else")
    (folder / "elsewhere").chmod(0o600)
    file.symlink_to(folder / "elsewhere")
  return file


@pytest.mark.parametrize("kind", ["others may read it", "a FIFO", "a symlink"])
def test_what_process_0_has_not_written_is_not_read_and_is_replaced(tmp_path, kind):
  file = planted(tmp_path, kind)
  if kind == "others may read it":
    with pytest.raises(PermissionError, match="and only a file of user"):
      token(tmp_path).read()
  else:  # as a file that is not there yet
    assert token(tmp_path).read() == b""
  with token(tmp_path).shown() as key:
    assert stat.S_ISREG(file.lstat().st_mode)
    assert token(tmp_path).read() == key
  if kind == "a symlink":
    assert (tmp_path / "elsewhere").read_text() == "a token of somebody else"


def test_a_workdir_that_cannot_be_written(tmp_path):
  (tmp_path / "file").write_text("")
  shown = token(tmp_path / "file" / "run").shown()
  with pytest.raises(OSError, match="cannot write a token to the workdir") as said, shown:
    pass
  assert "or set MESHWRIGHT_TOKEN for all of them" in str(said.value)


# ------------------------------ in a rendezvous ------------------------------


def caller(folder, port: int, index: int, seconds: float = 20.0):
  """Returns the call of one of three processes with this workdir."""
  address = f"localhost:{port}"
  return lambda: rendezvous.call(
    address,
    3,
    index,
    token=tokens.Token(folder and epath.Path(folder), address),
    timeout_seconds=seconds,
  )


@pytest.mark.parametrize("of_before", [False, True])
def test_processes_find_one_another_by_the_workdir(tmp_path, of_before):
  port, folder = free_port(), tmp_path / "runs" / "first"
  if of_before:  # a token of a start that was killed: who finds it reads again
    name = tokens.Token(epath.Path(folder), f"localhost:{port}")._file
    folder.mkdir(parents=True)
    name.write_text("0" * 64)
    os.chmod(name, 0o600)
  results = together(*[caller(folder, port, index) for index in (2, 1, 0)])
  assert len({*results}) == 1, results
  assert isinstance(results[0], bytes), results
  assert [*tmp_path.rglob(".token*")] == []


def test_another_workdir_is_said(tmp_path):
  port = free_port()
  results = together(
    caller(tmp_path / "a", port, 0, 1.5),
    caller(tmp_path / "a", port, 1, 1.5),
    caller(tmp_path / "b", port, 2, 1.5),
  )
  assert all(isinstance(result, rendezvous.MissingError) for result in results), results
  assert "missing: 2;" in str(results[0])
  assert "(no token: the file " in str(results[2])
  assert "does this process see the same workdir? Else set MESHWRIGHT_TOKEN" in str(results[2])
