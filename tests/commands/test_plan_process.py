"""Plans are kept, and found again only where nothing that they follow from has changed."""

import concurrent.futures
import os

import pytest

from commands import plan_process
from configs import dp8


def config(tmp_path, **changes):
  found = dp8.get_config("lm")
  found.planning.cache_dir = str(tmp_path / "plans")
  found.update_from_flattened_dict(changes)
  return found


def plan(tmp_path, topology="h100:8", **changes):
  return plan_process.made(config(tmp_path, **changes), topology, title="dp8_lm")


@pytest.mark.long
def test_the_same_plan_is_made_once_also_by_several_at_once(tmp_path, monkeypatch):
  with concurrent.futures.ThreadPoolExecutor() as pool:
    one, two = pool.map(lambda _: plan(tmp_path), range(2))
  assert one == two
  assert one["remarks"] == []
  [kept] = (tmp_path / "plans").iterdir()
  monkeypatch.setattr(plan_process, "answer", lambda *_, **__: pytest.fail("made again"))
  remark = f"cached plan of the same config, topology, code and versions: {kept}"
  assert plan(tmp_path) == {**one, "remarks": [remark]}
  assert one["report"].startswith("fits 8 devices of h100:8")


@pytest.mark.parametrize(
  ("topology", "changes"),
  [
    ("h200:8", {}),
    ("h100:8", {"planning.constants": "matmul=0.5"}),
    ("h100:8", {"model.layers": 4}),
  ],
)
def test_another_plan_has_another_place(tmp_path, topology, changes):
  here = plan_process.place(config(tmp_path), "h100:8", "dp8_lm")
  assert here == plan_process.place(config(tmp_path), "h100:8", "dp8_lm")
  assert here != plan_process.place(config(tmp_path, **changes), topology, "dp8_lm")
  assert here != plan_process.place(config(tmp_path), "h100:8", "another")


def test_other_code_and_another_compiler_have_another_place(tmp_path, monkeypatch):
  here = plan_process.place(config(tmp_path), "h100:8", "dp8_lm")
  for name in ("everything", "_compilers"):
    with monkeypatch.context() as patch:
      patch.setattr(plan_process, name, lambda: "another")
      assert plan_process.place(config(tmp_path), "h100:8", "dp8_lm") != here


# As libtpu writes it for fsdp=4096 of Llama 3 8B on v5p:16x16x16.
DUMP = """https://symbolize.stripped_domain/r/?trace=7fdf
*** SIGFPE (@0x7fdfca8d18ec), see go/stacktraces#s15 received by PID 1 (TID 2) on cpu 1; ***
PC: @     0x7fdfca8d18ec  (unknown)  xla::(anonymous namespace)::ComputeShardingConfig1D()
    @     0x7fdff925a050  (unknown)  (unknown)
"""


@pytest.mark.parametrize(
  ("code", "printed", "said"),
  [
    (-8, DUMP, "crashed with SIGFPE in the compiler's ComputeShardingConfig1D(), a defect of its"),
    (-11, "", "crashed with SIGSEGV in native code; try another mesh, and --debug"),
    (-9, "", "ended by SIGKILL, as the system does where memory runs out"),
    (1, "Traceback\nOSError: no", "OSError: no"),
  ],
)
def test_a_worker_that_crashes_says_where(monkeypatch, code, printed, said):
  def work(request, errors, *_):
    errors.write_text(printed)
    return code

  monkeypatch.setattr(plan_process, "_work", work)
  with pytest.raises(plan_process.WorkerError) as error:
    plan_process.answer({"topology": "v5p:2x2x1"})
  assert said in str(error.value)
  assert "stacktraces" not in error.value.printed


def test_where_there_is_no_terminal_a_line_says_what_is_done_and_since_when(monkeypatch):
  monkeypatch.setattr(plan_process, "PIPED_SECONDS", 0.0)
  reading, writing = os.pipe()
  said = []

  def say(line):
    said.append(line)
    if len(said) == 1:
      os.write(writing, b"mesh 1 of 4\nmesh 2 of 4 by formula\n")
    else:
      os.close(writing)

  with open(reading, "rb", buffering=0) as phases:
    plan_process._watch(phases, "search: h100:8", say, quiet=False)
  assert said == ["search: h100:8: starting, 0:00", "search: h100:8: mesh 2 of 4 by formula, 0:00"]
