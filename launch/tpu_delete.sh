#!/usr/bin/env bash
# Deletes a TPU, or with --queued a queued resource and its TPU. Buckets and other storage stay.
#
#   launch/tpu_delete.sh --name NAME --zone ZONE [--queued] [--project PROJECT] [--dry-run]
#
#   --name NAME, --zone ZONE, --project PROJECT      also TPU_NAME, TPU_ZONE, TPU_PROJECT
#   --queued               it was created with --queued
#   --dry-run              print the commands, run none
#
# Nothing to delete is no error.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

while [ $# -gt 0 ]; do
  case $1 in --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;; esac
  tpu_option "$@"
  [ "$TAKEN" != 0 ] || die "unknown argument '$1'; see $SCRIPT --help"
  shift "$TAKEN"
done
tpu_ready

if [ "$QUEUED" = 1 ]; then
  kind=queued-resources
  force=(--force) # its TPU first
else
  kind=tpu-vm
  force=()
fi
if [ "$DRY_RUN" = 0 ]; then
  state=$(cloud_state "$kind" state)
  [ "$state" != NONE ] || { note "there is no $kind $NAME" && exit 0; }
fi
run gcloud compute tpus "$kind" delete "$NAME" "${TPU_WHERE[@]}" ${force[@]+"${force[@]}"} --quiet
