"""The verb `completion`: prints the completion of a shell, to be sourced where it starts.

The shells call commands/complete.py of the clone whose main.py is typed, by the Python before it.
What there is to complete is printed as JSON by `python -m commands.completion`; complete.py keeps
it until a file that it is made of changes.
"""

import json
import pathlib
import re

from absl import flags as absl_flags

from commands import config_flag, flags, help
from commands.verbs import VERBS
from configs import base
from configs.schema import recipes, validate
from input_pipeline import catalog
from runtime import chips, exit_codes
from runtime.suggest import nearest
from training.optimizer import OPTIMIZERS

_BASH = r"""# Completes `python main.py ...`:  source <(python main.py completion bash)
_meshwright_other=$(complete -p python 2>/dev/null | sed -n 's/.* -F \([^ ]*\) .*/\1/p')
[ "$_meshwright_other" = _meshwright ] && _meshwright_other=
_meshwright() {
  local position word root line python=${COMP_WORDS[0]/#\~/$HOME}
  for ((position = 1; position < COMP_CWORD; position++)); do
    word=${COMP_WORDS[position]/#\~/$HOME}
    case $word in
      main.py | */main.py)
        root=$(dirname -- "$word")
        [ -f "$root/commands/complete.py" ] || break
        line=${COMP_LINE:0:COMP_POINT}
        compopt -o nospace 2>/dev/null
        mapfile -t COMPREPLY < <("$python" -S "$root/commands/complete.py" bash \
          "$COMP_WORDBREAKS" "$line" 2>/dev/null)
        return
        ;;
      -*) ;;
      *) break ;;
    esac
  done
  if [ -n "$_meshwright_other" ]; then
    "$_meshwright_other" "$@"
  else
    compopt -o default 2>/dev/null
    COMPREPLY=()
  fi
}
complete -F _meshwright python python3
"""
_ZSH = r"""# Completes `python main.py ...`:  source <(python main.py completion zsh)
_meshwright() {
  local word root answer
  local -a whole whole_text part part_text
  for word in ${words[2,CURRENT-1]}; do
    case $word in
      main.py | */main.py)
        root=${~word}; root=${root:h}
        [[ -f $root/commands/complete.py ]] || break
        answer=$(${~words[1]} -S $root/commands/complete.py zsh '' "$LBUFFER" 2>/dev/null)
        for answer in ${(f)answer}; do
          local name=${answer%%$'\t'*} text=${answer#*$'\t'}
          text="${name% }${text:+  -- $text}"
          if [[ $name == *' ' ]]; then
            whole+=("${name% }"); whole_text+=("${text:0:$((COLUMNS - 2))}")
          else
            part+=("$name"); part_text+=("${text:0:$((COLUMNS - 2))}")
          fi
        done
        (( $#part )) && compadd -Q -S '' -l -d part_text -a part
        (( $#whole )) && compadd -Q -l -d whole_text -a whole
        return
        ;;
      -*) ;;
      *) break ;;
    esac
  done
  autoload -Uz +X _python 2>/dev/null && _python "$@" || _default
}
compdef _meshwright python python3
"""
_FISH = r"""# Completes `python main.py ...`:  python main.py completion fish | source
function __meshwright_main
  for word in (commandline -opc)[2..-1]
    switch $word
      case main.py '*/main.py'
        test -f (dirname $word)/commands/complete.py; and echo $word; and return 0
        return 1
      case '-*'
      case '*'
        return 1
    end
  end
  return 1
end
function __meshwright
  set -l main (__meshwright_main)
  set -l python (commandline -opc)[1]
  set -l line (string escape -- (commandline -cp))
  eval $python -S (dirname $main)/commands/complete.py fish "''" $line 2>/dev/null \
    | string replace -r ' \t' \t
end
complete -c python -n '__meshwright_main >/dev/null' -f -a '(__meshwright)'
complete -c python3 -n '__meshwright_main >/dev/null' -f -a '(__meshwright)'
"""
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def run(*words: str) -> int:
  """Prints the script of a shell; returns the exit code."""
  if len(words) != 1 or words[0] not in SCRIPTS:
    given = words[0] if words else ""
    hint = nearest(given, SCRIPTS) if given else ""
    raise ValueError(f"completion takes one of {', '.join(SCRIPTS)}{hint}")
  help.show(SCRIPTS[words[0]], end="")
  return exit_codes.DONE


def index() -> dict[str, object]:
  """Returns verbs, flags with their values, config keys with theirs, and recipes."""
  owners = {flag.name: verbs for flag, verbs in flags.OWNERS}
  paths = {flag.name for flag in flags.PATHS}
  values = {"chapter": chapters(), "topology": [f"{name}:" for name in chips.CHIPS]}
  values["dtype"] = ["float32", "bfloat16"]
  return {
    "verbs": {name: verb.summary for name, verb in VERBS.items()},
    "takes": {name: verb.config != "none" for name, verb in VERBS.items()},
    "flags": {
      flag.name: {
        "help": help.meaning(flag),
        "verbs": owners.get(flag.name),
        "bool": bool(flag.boolean),
        "many": isinstance(flag, absl_flags.MultiFlag),
        "values": values.get(flag.name, []),
        "path": flag.name in paths,
      }
      for flag in help.own_flags()
    },
    "keys": {recipe: _keys(recipe) for recipe in (*recipes.RECIPES, recipes.HF)},
    "strategies": config_flag.strategies(),
    "recipes": recipes.names(),
    "data": [*catalog.EMBEDDED, *catalog.OF_FILES],
  }


def chapters() -> list[str]:
  """Returns the chapters of the tour, read from its table: importing it would import JAX."""
  source = (pathlib.Path(__file__).resolve().parents[1] / "reports/tour/run.py").read_text()
  return re.findall(r'^  "(\w+)": \1,$', source, re.MULTILINE)


def _keys(recipe: str) -> dict[str, list]:
  """Returns dotted key -> [its words, its meaning]."""
  config = base.get_config(recipe)
  words = {"optimizer.name": (*OPTIMIZERS, "lion"), **validate.choices_of(config)}
  found = {}
  for key, section, name in config_flag.keys(config):
    row = help.key_row(key, recipe)
    is_bool = section.get_type(name) is bool
    known = ("true", "false") if is_bool else filter(None, words.get(key, row.usual))
    found[key] = [[*known], row.meaning]
  return found


if __name__ == "__main__":
  print(json.dumps(index()))
