"""input_pipeline/text/files.py: which files a user means, wherever they are."""

import os

import fsspec
import pyarrow
import pytest
from pyarrow import fs

from input_pipeline.text import documents, files
from tests.input_pipeline.text.writing import write


def names(spec, below):
  return [file.path.removeprefix(f"{below}/") for file in files.find(str(spec))]


@pytest.fixture
def folder(tmp_path):
  every = ("b.jsonl", "a/c.txt", "a/.hidden.txt", ".git/d.md", "e.pdf", "a/b/F.PARQUET", "_SUCCESS")
  for name in every:
    write(tmp_path / name, "x")
  return tmp_path


# ------------------------------ on disk ------------------------------


def test_a_folder_is_read_below_without_what_is_hidden_or_of_another_format(folder):
  assert names(folder, folder) == ["a/b/F.PARQUET", "a/c.txt", "b.jsonl"]
  assert names(f"{folder}/", folder) == ["a/b/F.PARQUET", "a/c.txt", "b.jsonl"]


@pytest.mark.parametrize(
  ("spec", "found"),
  [
    ("{0}/*.jsonl", ["b.jsonl"]),
    ("{0}/*", ["b.jsonl"]),
    ("{0}/**", ["a/b/F.PARQUET", "a/c.txt", "b.jsonl"]),
    ("{0}/**/*.txt", ["a/c.txt"]),
    ("{0}/[ab].json?", ["b.jsonl"]),
    ("{0}/a/.hidden.txt", ["a/.hidden.txt"]),  # who names it wants it
    ("{0}/b.jsonl, {0}/a/c.txt,", ["a/c.txt", "b.jsonl"]),
    ("{0}/b.jsonl,{0}/*.jsonl,{0}/a/../b.jsonl", ["b.jsonl"]),
  ],
)
def test_paths_and_globs(spec, found, folder):
  assert names(spec.format(folder), folder) == found


def test_a_relative_path_and_a_home_are_absolute(folder, monkeypatch):
  monkeypatch.chdir(folder)
  monkeypatch.setenv("HOME", str(folder))
  assert files.find("b.jsonl") == files.find("~/b.jsonl") == files.find(f"{folder}/b.jsonl")


def test_a_name_with_glob_characters_is_a_file_that_is_there(tmp_path):
  write(tmp_path / "a[1]*.txt", "x")
  assert names(tmp_path / "a[1]*.txt", tmp_path) == ["a[1]*.txt"]


def test_links_are_followed_once(folder):
  (folder / "link.jsonl").symlink_to(folder / "b.jsonl")  # the same file: counted once
  (folder / "a" / "up").symlink_to(folder)  # and a circle
  write(folder.parent / "outside" / "o.txt", "x")
  (folder / "out").symlink_to(folder.parent / "outside")
  assert names(folder, folder) == ["a/b/F.PARQUET", "a/c.txt", "b.jsonl", "out/o.txt"]
  os.unlink(folder / "a" / "up")
  assert names(f"{folder}/**", folder) == ["a/b/F.PARQUET", "a/c.txt", "b.jsonl", "out/o.txt"]


def test_size_and_stamp_are_the_file_s(tmp_path):
  write(tmp_path / "a.txt", "abc")
  [first] = files.find(str(tmp_path))
  assert (first.size, first.suffix, first.compression) == (3, ".txt", None)
  os.utime(tmp_path / "a.txt", ns=(0, 1))
  [second] = files.find(str(tmp_path))
  assert (second.stamp, second.path) == ("1", first.path)
  assert second.stamp != first.stamp


@pytest.mark.parametrize(
  ("spec", "said"),
  [
    ("", r"data\.files is empty; name the files"),
    (" , ", r"data\.files is empty"),
    ("{0}/*.md", r"data\.files: {0}/\*\.md matches no file; files are \.txt, \.md, \.jsonl"),
    ("{0}/b.jsonl,{0}/none.jsonl", r"there is no file or folder {0}/none\.jsonl$"),
    ("{0}/none/x.jsonl", r"no file or folder {0}/none/x\.jsonl, and no folder {0}/none"),
    (
      "{0}/e.pdf",
      r"{0}/e\.pdf has no file of a format that is read, only e\.pdf; files are .*\.txt",
    ),
    ("{0}/[e_]*", r"only _SUCCESS, e\.pdf; files are"),
    ("{0}/a/?", r"{0}/a/\? matches only folders; {0}/a/\?/\*\* reads them"),
    ("{0}/empty", r"{0}/empty matches no file"),
    ("ftp://host/x", r"ftp://host/x: only local paths, gs://, s3:// and hf:// are read"),
    ("{0}/b.json", r"rename a \.json file with an object in each line to \.jsonl"),
    ("{0}/fifo.txt", r"{0}/fifo\.txt is a FIFO, not a file"),
    ("{0}/broken.txt", r"{0}/broken\.txt cannot be read \(.*No such file.*broken\.txt"),
    ("hf://owner", r"hf://owner: a data set of the Hub is hf://OWNER/NAME"),
  ],
)
def test_what_names_no_file_is_refused(spec, said, folder):
  (folder / "empty").mkdir()
  if "b.json" in spec:
    write(folder / "b.json", "{}")
  if "fifo" in spec:
    os.mkfifo(folder / "fifo.txt")
  if "broken" in spec:
    (folder / "broken.txt").symlink_to(folder / "nothing")
  with pytest.raises(ValueError, match=said.replace("{0}", str(folder))):
    files.find(spec.format(folder))


def test_a_folder_that_may_not_be_read_is_named(folder, monkeypatch):
  """Root may read everything, so the refusal of the system is imitated."""
  scan = os.scandir

  def refuse(path):
    if str(path).endswith("/a"):
      raise PermissionError(13, "Permission denied", str(path))
    return scan(path)

  monkeypatch.setattr(os, "scandir", refuse)
  with pytest.raises(ValueError, match=rf"data\.files: {folder} cannot .*Permission denied.*/a"):
    files.find(str(folder))


def test_a_file_that_may_not_be_read_is_named(folder, monkeypatch):
  found = files.find(f"{folder}/b.jsonl")

  def refuse(path, flags, **_):
    raise PermissionError(13, "Permission denied", path)

  monkeypatch.setattr(files.files, "open_plain", refuse)
  with pytest.raises(ValueError, match=r"b\.jsonl cannot be read \(Permission denied\)"):
    [*documents.read(documents.units(found)[0], "text")]


# ------------------------------ buckets ------------------------------


@pytest.fixture
def bucket(folder, monkeypatch):
  """A bucket of the folder's files, as pyarrow's file systems show one."""
  system = fs.SubTreeFileSystem(str(folder.parent), fs.LocalFileSystem())
  asked = []
  monkeypatch.setattr(files, "_file_system", lambda *name: asked.append(name) or system)
  return f"gs://{folder.name}", asked


def test_a_bucket_is_read_like_a_folder(bucket, folder):
  uri, asked = bucket
  assert names(uri, uri) == names(f"{uri}/", uri) == ["a/b/F.PARQUET", "a/c.txt", "b.jsonl"]
  assert names(f"{uri}/*.jsonl", uri) == names(f"{uri}/b.jsonl", uri) == ["b.jsonl"]
  assert names(f"{uri}/a/**/*.PARQUET,{uri}/**/c.*", uri) == ["a/b/F.PARQUET", "a/c.txt"]
  assert names(f"{uri}/*/c.tx[t]", uri) == ["a/c.txt"]
  assert {*asked} == {("gs", folder.name)}
  [file] = files.find(f"{uri}/b.jsonl")
  assert (file.size, int(file.stamp) > 0) == (1, True)
  with files.open_content(file) as stream:
    assert stream.read() == b"x"


def test_globs_match_the_same_in_a_bucket_as_on_disk(bucket, folder):
  """Ours against Python's, over names that need escaping too."""
  uri, _ = bucket
  for name in ("x.y.txt", "x-y.txt", "+.txt", "(1).txt", "a/x/y/z.txt", "a/x/z.txt", "Ab.txt"):
    write(folder / name, "x")
  patterns = [
    "*",
    "**",
    "**/*",
    "*.txt",
    "?.txt",
    "x?y.txt",
    "[x+]*.txt",
    "[!x]*.txt",
    "a/**/z.txt",
  ]
  patterns += ["a/*/*.txt", "**/x/*", "(*).txt", "x.y.*", "[A-Z]b.*", "*/*", "a/**", "*.[tj]*"]
  for pattern in patterns:
    assert names(f"{uri}/{pattern}", uri) == names(f"{folder}/{pattern}", folder), pattern


def test_documents_of_a_bucket(bucket, folder):
  uri, _ = bucket
  lines = "".join(f'{{"text": "{n:04}"}}\n' for n in range(100))
  write(folder / "b.jsonl", lines)
  with pyarrow.CompressedOutputStream(str(folder / "c.jsonl.gz"), "gzip") as stream:
    stream.write(lines.encode())
  found = files.find(f"{uri}/*.jsonl*")
  assert documents.choose_feature(found) == "text"
  items = [item for unit in documents.units(found, 333) for item in documents.read(unit, "text")]
  assert [int(item.value) for item in items] == [*range(100), *range(100)]
  assert items[70].where == f"{uri}/b.jsonl:71"


@pytest.mark.parametrize(
  ("part", "said"),
  [
    ("/none", "data.files: there is no file or folder gs://{0}/none$"),
    ("/*.md", r"data\.files: gs://{0}/\*\.md matches no file"),
    ("/e.pdf", r"gs://{0}/e\.pdf has no file of a format that is read, only e\.pdf"),
  ],
)
def test_what_names_no_file_in_a_bucket_is_refused(part, said, bucket, folder):
  with pytest.raises(ValueError, match=said.replace("{0}", folder.name)):
    files.find(bucket[0] + part)


def test_a_bucket_that_does_not_answer_is_named(monkeypatch):
  class Broken:
    def get_file_info(self, path):
      raise OSError("could not resolve the host")

  monkeypatch.setattr(files, "_file_system", lambda *_: Broken())
  said = r"data\.files: s3://b/x cannot be read \(could not resolve .*check .*AWS_ACCESS_KEY_ID"
  with pytest.raises(ValueError, match=said):
    files.find("s3://b/x")


def test_a_public_bucket_is_read_without_credentials(bucket, folder):
  uri, asked = bucket
  uri = uri.replace("gs://", "gs://anonymous@")
  assert names(f"{uri}/**/*.txt", uri) == ["a/c.txt"]
  [file] = files.find(f"{uri}/b.jsonl")
  assert file.path == f"{uri}/b.jsonl"
  with files.open_file(file.path) as stream:
    assert stream.read() == b"x"
  assert {*asked} == {("gs", f"anonymous@{folder.name}")}


def test_a_password_in_a_path_is_refused_and_not_repeated():
  with pytest.raises(
    ValueError, match=r"data\.files: s3://\.\.\.@b/x: credentials are no"
  ) as error:
    files.find("s3://AKIA:secret@b/x")
  assert "secret@" not in str(error.value)


def test_pyarrow_opens_these_schemes():
  for scheme, kind in (("gs", "gcs"), ("s3", "s3")):
    assert (
      files._file_system(
        scheme, "bucket?region=us-east-1" if scheme == "s3" else "bucket"
      ).type_name
      == kind
    )


# ------------------------------ the Hub ------------------------------


@pytest.fixture
def hub(tmp_path, monkeypatch):
  """A Hub with one data set, as huggingface_hub's file system shows it."""
  commits = {"": "c0ffee", "v2": "beef", "refs/convert/parquet": "cafe"}
  monkeypatch.setattr(files, "_commit", lambda repository, revision: commits[revision])
  system = fsspec.filesystem("dir", path=str(tmp_path), fs=fsspec.filesystem("file"))
  monkeypatch.setattr(files, "hub", lambda: system)
  return tmp_path / "datasets" / "o"


@pytest.mark.parametrize(
  ("uri", "found"),
  [
    (
      "hf://o/n",
      ["@c0ffee/a.parquet", "@c0ffee/data/test-0.parquet", "@c0ffee/data/train-0.parquet"],
    ),
    ("hf://datasets/o/n/data", ["@c0ffee/data/test-0.parquet", "@c0ffee/data/train-0.parquet"]),
    ("hf://o/n/data/train-*", ["@c0ffee/data/train-0.parquet"]),
    ("hf://o/n/data/train-0.parquet", ["@c0ffee/data/train-0.parquet"]),
    ("hf://o/n@v2/a.parquet", ["@beef/a.parquet"]),
  ],
)
def test_a_data_set_of_the_hub_is_its_parquet_files_at_a_commit(uri, found, hub):
  for name in ("a.parquet", "data/train-0.parquet", "data/test-0.parquet", "README.md"):
    write(hub / "n@c0ffee" / name, "x")
  write(hub / "n@beef" / "a.parquet", "xyz")
  matches = files.find(uri)
  assert [file.path for file in matches] == [f"hf://o/n{path}" for path in found]
  with files.open_file(matches[0].path) as stream:
    assert len(stream.read()) == matches[0].size
  assert matches[0].suffix == ".parquet"


def test_the_parquet_files_that_the_hub_has_made_are_the_second_choice(hub):
  write(hub / "n@c0ffee" / "data.csv", "x")
  write(hub / "n@cafe" / "default" / "train" / "0000.parquet", "x")
  assert [f.path for f in files.find("hf://o/n")] == ["hf://o/n@cafe/default/train/0000.parquet"]


def test_without_a_network_the_command_that_downloads_is_named(monkeypatch):
  def fail(*_):
    raise ConnectionError("Name or service not known")

  monkeypatch.setattr(files, "_commit", fail)
  with pytest.raises(
    ValueError, match=r"hf://o/n cannot be read .*\(ConnectionError: Name or"
  ) as error:
    files.find("hf://o/n")
  assert (
    "hf download --repo-type dataset o/n --local-dir FOLDER`, and set data.files=FOLDER"
    in str(error.value)
  )


def test_a_data_set_without_parquet_files_is_refused(hub):
  write(hub / "n@c0ffee" / "data.csv", "x")
  write(hub / "n@cafe" / "data.csv", "x")
  with pytest.raises(ValueError, match="hf://o/n has no Parquet files"):
    files.find("hf://o/n")
