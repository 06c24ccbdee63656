"""Every key of every JSON file from outside, with other values in its place: read or refused.

A refusal is a ValueError or an OSError; any other exception would reach a user as a traceback.
"""

import contextlib
import json
import struct

import pytest
from etils import epath

from inference import task_evaluation
from input_pipeline.text import chat_template, tokenizer, tokenizer_files
from input_pipeline.text.chat_template import ChatTemplate
from input_pipeline.text.chat_template import load as load_template
from input_pipeline.text.conversations import Conversation
from interop import hf_config, hf_folder, peft_adapter, read_weights, safetensors_file
from interop.hf_config import FAMILIES
from reports import charts, run_files, run_index, run_page
from runtime import files
from tests.interop import folders
from tests.reports import runs

NESTED = '{"a":' * 40 + "[[1]]" + "}" * 40
# As texts of JSON; Infinity is what Python reads of 1e400.
VALUES = (
  *("null", "[]", "{}", '"x"', '""', "-1", "0", "true", "false", "1e400", "-1e400", "NaN", "0.5"),
  *("1" + "0" * 400, "1" + "0" * 30, "1000000000000", "[[]]", "[{}]", '{"x": []}', "[null]"),
  NESTED,
)
STRIDE = 4
FEW = ("null", "[]", '"x"', "-1", "true", "1e400", "1" + "0" * 39, "[null]")


def places(value, path=(), depth=4):
  """Yields the path of every value in an object; of a list, of its first two values."""
  inner = value.items() if isinstance(value, dict) else enumerate(value[:2])
  for key, one in list(inner):
    yield (*path, key)
    if isinstance(one, dict | list) and depth > 1:
      yield from places(one, (*path, key), depth - 1)


def changed(sound, path, text):
  """Returns the JSON of an object with another text at a path; None leaves the key out."""
  mark = "a text that is nowhere else"
  value = json.loads(json.dumps(sound))
  inner = value
  for key in path[:-1]:
    inner = inner[key]
  if text is None:
    del inner[path[-1]]
  else:
    inner[path[-1]] = mark
  return json.dumps(value).replace(json.dumps(mark), text or "")


def check(sound, read, values=VALUES):
  """Reads an object without each key, and with some values in its place; says all that went wrong.

  The values in turn: one place meets what the next one does not.
  """
  read(json.dumps(sound))
  wrong = {}
  for number, path in enumerate(places(sound)):
    for text in (None, *values[number % STRIDE :: STRIDE]):
      try:
        read(changed(sound, path, text))
      except (ValueError, OSError) as error:
        if len(str(error)) > 5_000:
          wrong[path, text] = f"a message of {len(str(error)):,} characters"
      except Exception as error:
        wrong[path, (text or "missing")[:30]] = f"{type(error).__name__}: {error}"[:150]
  lines = [f"{path} = {text}: {said}" for (path, text), said in wrong.items()]
  assert not lines, "\n".join([f"{len(lines)} places", *lines[:40]])


# ------------------------------ model folders ------------------------------

SIZES = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
ROPES = (
  {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
  {"rope_type": "linear", "factor": 4.0},
  {"rope_type": "dynamic", "factor": 4.0},
  {"type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0]},
  {
    **{"rope_type": "yarn", "factor": 4.0, "beta_fast": 32, "mscale": 1.0, "mscale_all_dim": 0.5},
    **{"truncate": True, "attention_factor": 1.0, "original_max_position_embeddings": 8},
  },
)


def read_config(text):
  found = hf_config.read(files.parse_json(text), "config.json")
  hf_config.canonical(found.model)


@pytest.mark.parametrize("version", folders.VERSIONS)
@pytest.mark.parametrize("name", folders.NAMES)
def test_config_json_of_each_fixture(name, version):
  check(folders.config_of(name, version), read_config)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_key_that_a_family_reads(name):
  family = FAMILIES[name]
  keys = {key for part in family.parts for key in part.keys} | {*family.defaults, *family.only}
  for key in sorted(keys - {"model_type"}):
    sound = {"model_type": name, **{k: v for k, v in SIZES.items() if k in keys}}
    for text in VALUES:
      with contextlib.suppress(ValueError):
        read_config(changed({**sound, key: 0}, (key,), text))


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope.get("rope_type", rope.get("type")))
def test_rotary_scaling(rope):
  sound = {"model_type": "llama", **SIZES, "rope_scaling": rope, "rope_theta": 1e4}
  check(sound, read_config)
  check({"model_type": "deepseek_v3", "rope_parameters": {**rope, "rope_theta": 1e4}}, _or_refused)


def _or_refused(text):
  with contextlib.suppress(ValueError):
    read_config(text)


def test_quantization_config():
  given = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
  check({"model_type": "llama", **SIZES, "quantization_config": given}, read_config)


def test_adapter_config(tmp_path):
  sound = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "lora_dropout": 0.1, "bias": "none"}
  sound |= {"use_rslora": False, "rank_pattern": {"q_proj": 4}, "alpha_pattern": {"q_proj": 4.0}}
  sound |= dict.fromkeys(peft_adapter._OFF, None) | {"peft_type": "LORA"}

  def read(text):
    (tmp_path / "adapter_config.json").write_text(text)
    peft_adapter.read_config(str(tmp_path))

  check(sound, read)


def test_index_of_weights(tmp_path):
  (tmp_path / "a.safetensors").write_bytes(_safetensors(json.dumps({"w": ENTRY})))

  def read(text):
    (tmp_path / hf_folder.INDEX).write_text(text)
    read_weights.stored_tensors(tmp_path, "model.folder")

  check({"metadata": {"total_size": 8}, "weight_map": {"w": "a.safetensors"}}, read)


ENTRY = {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]}


def _safetensors(text):
  return struct.pack("<Q", len(text)) + text.encode() + bytes(8)


def test_safetensors_header(tmp_path):
  def read(text):
    (tmp_path / "a.safetensors").write_bytes(_safetensors(text))
    safetensors_file.read_header(tmp_path / "a.safetensors")

  check({"w": ENTRY, "__metadata__": {"format": "pt"}}, read)


# ------------------------------ tokenizers and templates ------------------------------

FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
END = {"id": 4, "content": "</s>", "special": True, **FLAGS}
TOKENIZERS = {
  "BPE": {
    "model": {
      "type": "BPE",
      "vocab": {"a": 0, "b": 1, "ab": 2, "c": 3, "</s>": 4},
      "merges": ["a b"],
      "dropout": None,
      "unk_token": None,
    },
    "decoder": {
      **{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    },
    "post_processor": {
      "type": "TemplateProcessing",
      "single": [
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "</s>", "type_id": 0}},
      ],
      "pair": [],
      "special_tokens": {"</s>": {"id": "</s>", "ids": [4], "tokens": ["</s>"]}},
    },
  },
  "Unigram": {
    "model": {
      "type": "Unigram",
      "unk_id": 0,
      "vocab": [["<unk>", 0.0], ["a", -1.0], ["b", -2.0], ["▁", -3.0], ["</s>", 0.0]],
      "byte_fallback": False,
    },
    "decoder": {
      "type": "Sequence",
      "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
      ],
    },
  },
  "WordLevel": {
    "model": {
      "type": "WordLevel",
      "vocab": {"a": 0, "b": 1, "[UNK]": 2, "</s>": 4},
      "unk_token": "[UNK]",
    },
    "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
  },
  "WordPiece": {
    "model": {
      **{"type": "WordPiece", "vocab": {"a": 0, "##b": 1, "[UNK]": 2, "</s>": 4}},
      **{"unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 9},
    },
    "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
  },
}
COMPANIONS = {
  tokenizer_files.CONFIG_FILE: {
    "eos_token": {"content": "</s>", "special": True},
    "bos_token": None,
    "add_bos_token": False,
    "additional_special_tokens": ["b"],
    "extra_special_tokens": {"x": "b"},
    "added_tokens_decoder": {"4": {"content": "</s>", "special": True}},
    "chat_template": "{{ messages[0].content }}{{ eos_token }}",
  },
  tokenizer_files.SPECIAL_FILE: {"eos_token": "</s>", "additional_special_tokens": ["b"]},
  tokenizer_files.GENERATION_FILE: {"eos_token_id": [4], "bos_token_id": 1},
  tokenizer_files.ADDED_FILE: {"</s>": 4},
}


def use(folder):
  """Does with a folder's tokenizer what runs do."""
  found = tokenizer.load(str(folder))
  [ids] = found.encode(["ab é"])
  found.decode([*ids, 0, 4])
  found.token_bytes(0)
  found.encode_template("ab</s>")
  return found


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokenizer_json(kind, tmp_path):
  (tmp_path / tokenizer_files.CONFIG_FILE).write_text('{"eos_token": "</s>"}')
  sound = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [END]}
  sound |= {"normalizer": None, "pre_tokenizer": None, **TOKENIZERS[kind]}

  def read(text):
    (tmp_path / tokenizer_files.TOKENIZER_FILE).write_text(text)
    use(tmp_path)

  check(sound, read, FEW)


@pytest.mark.parametrize("name", COMPANIONS)
def test_files_beside_a_tokenizer(name, tmp_path):
  sound = {"added_tokens": [END], "normalizer": None, "pre_tokenizer": None}
  text = json.dumps({**sound, **TOKENIZERS["BPE"], "version": "1.0"})
  (tmp_path / tokenizer_files.TOKENIZER_FILE).write_text(text)
  for other, content in COMPANIONS.items():
    (tmp_path / other).write_text(json.dumps(content))

  def read(text):
    (tmp_path / name).write_text(text)
    found = use(tmp_path)
    chat_template._ends_of_generation(found)
    template = load_template("", found)
    template.render(Conversation([{"role": "user", "content": "a"}]))

  check(COMPANIONS[name], read, FEW)


@pytest.mark.parametrize(
  "source",
  [
    "{% break %}",
    "{% continue %}",
    "{{ 'a' * 10 }",
    "{% for x in %}",
    "{{ 1 if }}",
    "{{ x.y.z() }}",
  ],
)
def test_a_template_that_is_no_program_is_refused(source):
  with pytest.raises(ValueError, match="the template"):
    ChatTemplate("the template", {"default": source}, {}).render(Conversation([]))


# ------------------------------ tasks and runs ------------------------------

TASKS = (
  {"context": "a", "answer": 1, "choices": ["b", "c"]},
  {"context": [{"role": "user", "content": "a"}], "answer": "b"},
  {"context": "a", "answer": ["b"], "until": ["\n"], "max_new_tokens": 8, "pattern": "(a)"},
)


@pytest.mark.parametrize("sound", TASKS)
def test_records_of_tasks(sound, tmp_path):
  def read(text):
    (tmp_path / "task.jsonl").write_text(text + "\n")
    task_evaluation.read_tasks(str(tmp_path / "task.jsonl"))

  check(sound, read)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  return tmp_path_factory.mktemp("run")


@pytest.fixture
def page(monkeypatch, tmp_path):
  """Returns the function that makes the pages of a workdir; charts are checked, and not drawn."""

  def drawn(chart, **_):
    assert all(abs(x) <= 2**53 and abs(y) <= 1e300 for line in chart.lines for x, y in line.points)
    assert all(mark.step <= 2**53 and mark.kind for mark in chart.marks)
    return ""

  monkeypatch.setattr(charts, "svg", drawn)

  def make(folder):
    run = run_files.read(folder)
    run_page.html(run)
    run_index.html([run], page=epath.Path(tmp_path / "index.html"))

  return make


@pytest.mark.parametrize("place", [0, 6])
def test_lines_of_metrics(place, workdir, page):
  def read(text):
    lines = [*runs.METRICS[:place], files.parse_json(text), *runs.METRICS[place + 1 :]]
    runs.write(workdir, metrics=lines, history=runs.HISTORY[:3])
    page(workdir)

  check(runs.METRICS[place], read, FEW)


@pytest.mark.parametrize("place", [0, 1, 3, 8, 11])
def test_events_of_the_history(place, workdir, page):
  end = {"event": "end", "step": 41, "time": 1150.0, "how": "failed", "why": "x", "bad_step": 3}
  sound = [*runs.HISTORY, end]

  def read(text):
    lines = [*sound[:place], files.parse_json(text), *sound[place + 1 :]]
    runs.write(workdir, history=lines)
    page(workdir)

  check(sound[place], read, FEW)


def test_config_and_layout_of_a_run(workdir, page):
  def config(text):
    runs.write(workdir, config=files.parse_json(text))
    page(workdir)

  check(runs.CONFIG, config, FEW)

  def layout(text):
    runs.write(workdir, layout=files.parse_json(text))
    page(workdir)

  edge = {"title": "rows", "under": "x", "labels": ["0", "1"]}
  cells = [{"devices": [device], "text": "a", "hatch": 0} for device in range(4)]
  sheet = {"title": "t", "rows": edge, "columns": edge, "notes": ["n"], "turnable": True}
  sheet["panels"] = {"c": cells}
  values = {"caption": "c", "mesh": sheet, "parameters": 9, "bytes_per_device": {"batch": 1.0}}
  values |= {"replicated_bytes": 1, "drawings": [{"names": ["w"], "sheet": sheet}]}
  values["pipeline"] = {"kind": "1f1b", "stages": 2, "microbatches": 4, "chunks": 1, "layers": 4}
  check(values, layout, FEW)
  assert run_files.read(runs.write(workdir, layout=values)).layout["drawings"]


def test_extreme_numbers_are_drawn():
  line = charts.Line("a", [(0, 1e300), (2**53, -1e300), (7, 1e-300)])
  mark = charts.Mark("checkpoint", 2**53, "x")
  for chart in (charts.Chart("a", [line], [mark]), charts.Chart("b", [line], logarithmic=True)):
    assert "<svg" in charts.svg(chart, name="x")
