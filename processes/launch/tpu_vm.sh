#!/usr/bin/env bash
# Runs the same command on every host of a Cloud TPU VM; docs/running.md has the whole way.
set -euo pipefail

usage() {
  cat >&2 <<'USAGE'
usage: processes/launch/tpu_vm.sh setup NAME ZONE            copy this tree's tracked files, install
       processes/launch/tpu_vm.sh run NAME ZONE ARGUMENT...  main.py ARGUMENT... on every host
       processes/launch/tpu_vm.sh stop NAME ZONE             SIGTERM: save a common step, exit 75

for example: processes/launch/tpu_vm.sh run my-tpu us-central2-b --config=configs/fsdp.py --workdir=gs://B/run

PYTHON=python3.12   setup: the Python of the hosts to install for; 3.11 or newer
GCLOUD=echo         print the gcloud commands instead of running them
USAGE
  exit 2
}

refuse() {
  echo "refused: $1" >&2
  usage
}

# Runs a command on every host, or on the one that is named; ends with its exit code.
remotely() {
  local worker=$1 command=$2
  "$gcloud" compute tpus tpu-vm ssh "$name" --zone="$zone" --worker="$worker" --command="$command"
}

gcloud=${GCLOUD:-gcloud}
python=${PYTHON:-python3}
# Expanded on the host: the process of a run that is under way there, or nothing. The number may by
# now be another program's, and a file that holds anything but a number names no process.
# shellcheck disable=SC2016
running='pid=$(head -c 20 meshwright.pid 2>/dev/null) && case $pid in *[!0-9]*) false ;; esac'
# shellcheck disable=SC2016
running+=' && grep -qs main.py "/proc/$pid/cmdline"'

[[ $# -ge 3 ]] || usage
verb=$1 name=$2 zone=$3
shift 3
[[ $name =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ ]] || refuse "'$name' is not a valid name of a TPU VM"
[[ $zone =~ ^[a-z]+-[a-z]+[0-9]+-[a-z]$ ]] || refuse "'$zone' is not a zone, such as us-central2-b"

case $verb in
setup)
  [[ $# -eq 0 ]] || refuse "setup takes no '$1'"
  cd "$(dirname "${BASH_SOURCE[0]}")/../.."
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
  # COPYFILE_DISABLE: macOS would add files of its own.
  git ls-files -z | COPYFILE_DISABLE=1 tar -czf "$folder/meshwright.tar.gz" --null -T -
  "$gcloud" compute tpus tpu-vm scp "$folder/meshwright.tar.gz" "$name:" \
    --zone="$zone" --worker=all
  # What an earlier copy left goes, so that all hosts run the same code; the installation stays.
  clear="find meshwright -mindepth 1 -maxdepth 1 ! -name .venv ! -name runs -exec rm -rf {} +"
  remotely all "mkdir -p meshwright && $clear && tar -xzf meshwright.tar.gz -C meshwright \
&& make -C meshwright PYTHON=$(printf %q "$python") setup buckets ACCELERATOR=tpu"
  ;;
run)
  [[ $# -gt 0 ]] || refuse "run needs main.py's arguments"
  arguments=$(printf ' %q' "$@")
  # gcloud starts a command again when its connection breaks, up to ten times. The run continues
  # without the connection, so a second one beside it has to be refused.
  busy="echo \"refused: process \$pid runs main.py already; processes/launch/tpu_vm.sh stop ends it\" >&2"
  remotely all "if $running; then $busy; exit 2; fi; cd meshwright && echo \$\$ >../meshwright.pid \
&& exec .venv/bin/python main.py$arguments"
  ;;
stop)
  [[ $# -eq 0 ]] || refuse "stop takes no '$1'"
  # One process is enough: it notifies the others.
  remotely 0 "if $running; then kill -TERM \$pid; else echo nothing runs; fi"
  ;;
*) refuse "'$verb' is none of setup, run, stop" ;;
esac
