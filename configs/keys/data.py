"""The section `data`: rows, and how they become batches."""

from configs.keys.row import ACCEPT, MAY_CHANGE, Key, Required, Rows, Unset, shared

OF_FILES = "data.name=text|conversations|preferences|prompts"
RENDERED = "data.name=conversations|preferences"
TEMPLATED = f"{RENDERED}|prompts"

_OF_SOURCES = {"data.sources": "each source has its own"}

# Of rows of text.
_TEXT: Rows = {
  # On resume: may have moved; dataset.rows shows whether they hold the same.
  "files": Key(
    "",
    "Files of data=text, conversations, preferences and prompts: paths, folders, globs, gs://, "
    "s3:// and hf://OWNER/NAME, separated by commas",
    resume=MAY_CHANGE,
    needs=OF_FILES,
    excludes=_OF_SOURCES,
  ),
  "sources": Key(
    (),
    "A mixture in place of files: each source has name, files and weight (relative, of the "
    "tokens); also evaluation_files, text_feature and maximum_epochs (default 1; 0: no limit): "
    '({"name": "web", "files": "web/", "weight": 0.7}, {"name": "code", "files": "src/", ...})',
    needs=OF_FILES,
  ),
  # On resume: only of steps that are not done: training.restore checks.
  "stages": Key(
    (),
    'Other weights from a step on: ((1000, {"web": 0.2, "code": 0.8}),)',
    resume=ACCEPT,
    needs="data.sources",
  ),
  "evaluation_files": Key(
    "",
    'of the validation split; "": a share of the documents of files',
    resume=MAY_CHANGE,
    needs=OF_FILES,
    excludes=_OF_SOURCES,
  ),
  # On resume: may have moved; dataset.tokenizer shows whether it is the same.
  "tokenizer": Key(
    "",
    "bytes, characters (those of the text trained on), a tokenizer.json, a folder with one, or a "
    'SentencePiece model; "": the one that prepare has trained for these files, else bytes',
    resume=MAY_CHANGE,
    off="bytes",
  ),
  # On resume: may have moved; dataset.tokenizer shows whether it is the same.
  "train_tokenizer": Key(
    0,
    "Where tokenizer is not set, a run first trains a byte-level BPE of so many tokens on what it"
    " trains on (once per data_dir); 0: off",
    unit="tokens",
    resume=MAY_CHANGE,
  ),
  "packing": Key(
    Unset(str),
    "Which documents share a row: best_fit (the default of files), concatenate (of TFDS data "
    "sets) or none",
    choices=("best_fit", "concatenate", "none"),
    off="concatenate",
  ),
  # On resume: may have moved; dataset.chat_template shows whether it is the same.
  "chat_template": Key(
    "",
    'a file with one (conversations, preferences, prompts); "": the tokenizer\'s',
    resume=MAY_CHANGE,
    needs=TEMPLATED,
  ),
  "untrained_conversations": Key(
    "refuse",
    "Conversations without a token to train on, or longer than a row: refuse or drop",
    choices=("refuse", "drop"),
    needs=RENDERED,
  ),
  "long_conversations": Key("refuse", "", choices=("refuse", "drop"), needs=RENDERED),
}

DATA: Rows = {
  "global_batch_size": Key(Required(int), "", unit="rows", most=2**24, resume=ACCEPT),
  # On resume: dataset.* shows whether the rows are the same.
  "data_dir": Key(
    "", 'folder of TFDS data sets; "": TFDS_DATA_DIR, or ~/tensorflow_datasets', resume=MAY_CHANGE
  ),
  "train_split": Key("train", "TFDS syntax, such as train[:90%]"),
  "evaluation_split": Key("test", "TFDS syntax", resume=MAY_CHANGE),
  "shuffle": Key(True, "in another order each epoch"),
  "prefetch_batches": Key(
    2, "prepared ahead, in the background", unit="batches", resume=MAY_CHANGE
  ),
  # On resume: a run that an unreadable record has stopped may resume.
  "max_bad_records": Key(
    0,
    "unreadable records of a split that get weight 0; more are refused",
    unit="records",
    resume=MAY_CHANGE,
  ),
  "sequence_length": Key(0, "tokens per row (text)", unit="tokens", readers=("text",)),
  # On resume: only of steps that are not done: training.restore checks.
  "batch_size_ramp": Key(
    (),
    "Fewer rows per step at first, each number from a step on: ((0, 8), (100, 16), (200, 32)), of"
    " which the last is global_batch_size",
    resume=ACCEPT,
    excludes={"data.skip_batches": "batches differ in size; name rows with data.skip_rows"},
  ),
  # On resume: only of steps that are not done: training.restore checks.
  "sequence_length_ramp": Key(
    (),
    "Shorter rows at first, in tokens: ((0, 64), (100, 128)), of which the last is "
    "sequence_length. Rows are cut into equal pieces, so that the tokens of a step stay as many",
    resume=ACCEPT,
    readers=("text",),
  ),
  "text_feature": Key(
    "", '"": the only one of that type', readers=("text", "plain"), excludes=_OF_SOURCES
  ),
  **shared(_TEXT, readers=("text",)),
  "evaluation_fraction": Key(
    0.05,
    "Documents of files that are held out for validation, chosen by their content; of a single "
    "text file its end",
    unit="of the documents",
    above=0,
    below=1,
  ),
  "prepare_processes": Key(
    0, "that tokenize; 0: one per core", unit="processes", resume=MAY_CHANGE
  ),
  "image_feature": Key("", '"": the only one of that type', readers=("image",)),
  "label_feature": Key("", '"": the only one of that type', readers=("image",)),
  "examples": Key(0, "rows (random)", unit="rows", readers=("random",)),
  "input_size": Key(
    0,
    "values per example (image, random); derived from the model",
    unit="values",
    readers=("image", "random"),
  ),
  "target_size": Key(
    0,
    "classes (image), values (random); derived from the model",
    unit="values",
    readers=("image", "random"),
  ),
  # On resume: only of rows that no step has reached: training.bad_steps checks.
  "skip_rows": Key(
    (),
    "Rows to skip, counted from 0 over all epochs, in ranges (first, one after the last): ((544, "
    "608),)",
    resume=ACCEPT,
  ),
  # On resume: always (): resolved into rows.
  "skip_batches": Key(
    (), "the same in batches of global_batch_size rows, from 0: (17, 18)", resume=ACCEPT
  ),
  "name": Key(Required(str), ""),
}
