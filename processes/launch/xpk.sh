#!/usr/bin/env bash
# Starts a run on a GKE cluster that XPK has made, as a workload of one TPU slice or several.
set -euo pipefail

usage() {
  cat >&2 <<'USAGE'
usage: processes/launch/xpk.sh NAME CLUSTER ZONE TPU_TYPE IMAGE ARGUMENT...   main.py ARGUMENT... on every host

for example: processes/launch/xpk.sh first my-cluster us-central2-b v5p-128 IMAGE \
               --config=configs/fsdp.py --workdir=gs://BUCKET/first

IMAGE is what processes/launch/Dockerfile has built, where the cluster can pull it.
SLICES=2          number of slices; give --config.mesh_dcn.data=2 as well
XPK="xpk ..."     another command than xpk
USAGE
  exit 2
}

refuse() {
  echo "refused: $1" >&2
  usage
}

[[ $# -ge 6 ]] || usage
name=$1 cluster=$2 zone=$3 type=$4 image=$5
shift 5
[[ $name =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ ]] || refuse "'$name' is not a valid name of a workload"
[[ $zone =~ ^[a-z]+-[a-z]+[0-9]+-[a-z]$ ]] || refuse "'$zone' is not a zone, such as us-central2-b"
[[ " $*" == *" --workdir="* ]] || refuse "give --workdir=gs://..., which all hosts and restarts see"

read -ra xpk <<<"${XPK:-xpk}"
# 1 failed, 75 stopped after saving: both resume from the last save. 2 and 3 would end the same.
# 60 s of grace: a save on SIGTERM takes about 30. `exec`: main.py gets the signal, and not a shell.
exec "${xpk[@]}" workload create --workload="$name" --cluster="$cluster" --zone="$zone" \
  --tpu-type="$type" --num-slices="${SLICES:-1}" --docker-image="$image" \
  --max-restarts=10 --restart-on-exit-codes=1,75 --termination-grace-period-seconds=60 \
  --command="exec .venv/bin/python main.py$(printf ' %q' "$@")"
