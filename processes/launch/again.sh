#!/usr/bin/env bash
# Runs a command, and runs it again where it was when a signal has ended it: in the same task of
# Slurm, or the same pod, whose memory keeps the copies of checkpoint.memory_every_steps.
#
#   REPLACEMENTS=3 processes/launch/again.sh .venv/bin/python main.py --config=configs/fsdp.py ...
#
# Exit codes are passed on, also that of the last death (128 + the signal). Under Slurm the other
# tasks are told by SIGUSR1, and stay; elsewhere they die of it, and each is run again in its place.

set -u

left=${REPLACEMENTS:-3}
if [[ ! $left =~ ^[0-9]{1,3}$ || $# -eq 0 ]]; then
  echo "refused: REPLACEMENTS=$left must be a number below 1000, and again.sh needs a command" >&2
  exit 2
fi
[[ -z ${SLURM_STEP_ID:-} ]] || export MESHWRIGHT_REPLACEABLE=1

stopped="" interrupted="" process=""
# shellcheck disable=SC2317,SC2329  # the trap calls it
stop() {
  stopped=yes interrupted=yes
  [[ -z $process ]] || kill -TERM "$process" 2>/dev/null
}
trap stop TERM
trap '' USR1  # also for the command, until it is ready for it

while true; do
  [[ -z $stopped ]] || exit 75
  "$@" &
  process=$!
  while true; do
    interrupted=""
    wait "$process"
    code=$?
    [[ -n $interrupted ]] || break  # the trap ends `wait` before the command has ended
  done
  if ((code <= 128)) || [[ -n $stopped ]] || ((left == 0)); then
    exit "$code"
  fi
  left=$((left - 1))
  echo "again.sh: process ${SLURM_PROCID:-${JAX_PROCESS_ID:-0}} ended by signal $((code - 128));" \
    "run again, $left more at most" >&2
  [[ -z ${SLURM_STEP_ID:-} ]] || scancel --signal=USR1 "$SLURM_JOB_ID.$SLURM_STEP_ID"
done
