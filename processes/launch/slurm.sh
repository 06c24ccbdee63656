#!/usr/bin/env bash
# A batch file for Slurm: one process per GPU; runs again after a stop, and after a few failures.
#
#   sbatch processes/launch/slurm.sh --config=configs/fsdp.py --workdir=FOLDER
#
# Submit it from the root of the repository, after `make setup ACCELERATOR=gpu`, on a file system
# that all nodes see. Sizes, partition and account can be given to sbatch: its flags come first.
#
#   RUNS=FILE sbatch --array=1-3 processes/launch/slurm.sh --config=configs/fsdp.py
#
# Each task of the array is a run of its own: line N of the file has its further arguments.
#
#   REPLACEMENTS=3 sbatch processes/launch/slurm.sh ...
#
# Each task starts its process again, three times at most, when a signal has ended it; the others stay.

#SBATCH --job-name=meshwright
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@180

# --ntasks-per-node is the number of GPUs per node: under Slurm each process takes the GPU of its
# index on the node. So every process must see all of them: --gpus-per-node, not --gpus-per-task.
#
# --signal without `B:` sends SIGTERM to the processes of the job step (main.py), and neither to
# this script nor to srun. That matters: srun itself answers SIGTERM with SIGKILL to all its tasks.
# Slurm may send it 60 s early.

set -u

MAX_FAILURES=${MAX_FAILURES:-3}  # in a row, without a stop between them
if [[ ! $MAX_FAILURES =~ ^[0-9]{1,3}$ ]]; then
  echo "refused: MAX_FAILURES=$MAX_FAILURES is not a number below 1000" >&2
  exit 2
fi

main=(.venv/bin/python main.py)
[[ -z ${REPLACEMENTS:-} ]] || main=(processes/launch/again.sh "${main[@]}")

if [[ $# -eq 0 ]]; then
  echo "usage: sbatch [SBATCH'S FLAGS] processes/launch/slurm.sh --config=CONFIG --workdir=FOLDER ..." >&2
  exit 2
fi
if [[ ! -x .venv/bin/python || ! -f main.py ]]; then
  echo "refused: $PWD has no .venv/bin/python and main.py; submit from the root of the" \
    "repository, after 'make setup ACCELERATOR=gpu'" >&2
  exit 2
fi

# A task of an array has two names. The last one's job id is the array's too, and would mean all.
job=$SLURM_JOB_ID
if [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then
  job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
  line=()
  [[ -f ${RUNS:-} ]] && read -ra line < <(sed -n "${SLURM_ARRAY_TASK_ID}p" "$RUNS")
  if [[ " ${line[*]}" != *" --workdir="* ]]; then
    echo "refused: task $SLURM_ARRAY_TASK_ID of an array needs RUNS=FILE, a file whose line" \
      "$SLURM_ARRAY_TASK_ID has the run's --workdir=FOLDER and what else is its own; RUNS=${RUNS:-}" >&2
    exit 2
  fi
  set -- "$@" "${line[@]}"
fi

# What reaches this script is passed on to the job step, by Slurm and not by `kill` (see above).
# SIGTERM (scancel --batch --signal=TERM) stops and requeues, SIGUSR1 stops for good.
interrupted="" wanted=yes
# shellcheck disable=SC2317,SC2329  # the traps call it
pass_on() {
  interrupted=yes
  echo "slurm.sh: $1 is passed on to main.py as SIGTERM"
  scancel --signal=TERM "$job"
}
trap 'pass_on SIGTERM' TERM
trap 'wanted=no; pass_on SIGUSR1' USR1

# A process that ends must not take the others with it at once: they are saving, or are about to
# exit with the same code, and SIGKILL would hide it (srun returns the highest code of all, and 137
# for SIGKILL). So they get 60 s, whatever KillOnBadExit is at this site.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}  # srun does not take it from sbatch
srun --kill-on-bad-exit=0 --wait=60 "${main[@]}" "$@" &
step=$!
while true; do
  interrupted=""
  wait "$step"
  code=$?
  [[ -n $interrupted ]] || break  # a trap ends `wait` before srun has ended
done

requeue() {
  echo "slurm.sh: $1; requeued"
  trap '' TERM USR1  # Slurm ends this script for it
  scontrol requeue "$job" || exit "$code"
  exit 0
}

failures="slurm-$SLURM_JOB_ID.failures"  # beside the log; the job keeps its number when requeued

# By a rename, so that a link in its place is replaced and not written through.
count_failures() {
  local new
  new=$(mktemp "$failures.XXXXXX") && echo "$count" >"$new" && mv -fT "$new" "$failures"
}

case $code in
0) ;;
2) echo "slurm.sh: exit 2: refused; the message above says why" ;;
3) echo "slurm.sh: exit 3: the check failed" ;;
75)
  rm -f "$failures"
  [[ $wanted == yes ]] && requeue "exit 75: stopped after saving"
  echo "slurm.sh: exit 75: stopped for good, after saving"
  ;;
*)
  # Only digits are taken from the file: bash's arithmetic would run commands in its text.
  count=0
  [[ -f $failures ]] && read -r -n 4 count <"$failures"
  [[ $count =~ ^[0-9]{1,3}$ ]] || count=0
  count=$((10#$count + 1))
  if [[ $wanted == no ]]; then
    echo "slurm.sh: exit $code: stopped for good; main.py did not end with a save"
  elif ((count > MAX_FAILURES)); then
    echo "slurm.sh: exit $code: failed $count times in a row; given up"
  elif count_failures; then
    requeue "exit $code: failure $count of $MAX_FAILURES in a row"
  fi
  ;;
esac
rm -f "$failures"
exit "$code"
