#!/usr/bin/env bash
# Creates a Cloud TPU: a single host (as v6e-8) or a slice of many hosts (as v5litepod-64), and waits for it.
#
#   launch/tpu_create.sh --name NAME --zone ZONE --type TYPE [options]
#
#   --name NAME            also TPU_NAME; of the TPU, and of the queued resource with --queued
#   --zone ZONE            also TPU_ZONE
#   --project PROJECT      also TPU_PROJECT (default: gcloud's)
#   --type TYPE            also TPU_TYPE: v5litepod-8, v5litepod-64, v5p-32, v6e-8, ...
#   --version VERSION      TPU software version (default: the one for TYPE)
#   --spot                 cheap, may be taken away at any time
#   --reserved             from a reservation
#   --queued               as a queued resource: waits in the queue until there is capacity
#   --valid-until TIME     with --queued: give up after, as 6h
#   --network N, --subnetwork S, --service-account A
#   --internal-ips         no external addresses (then --connect internal or iap, and Cloud NAT for the set-up)
#   --poll SECONDS         between two looks at the queue (default: 30)
#   --dry-run              print the commands, run none
#
# Status 75: no capacity, or the request ended without a TPU; worth another try.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

TYPE=${TPU_TYPE:-} VERSION='' SPOT=0 RESERVED=0 VALID='' POLL=30
NETWORK=()
while [ $# -gt 0 ]; do
  case $1 in --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;; esac
  tpu_option "$@"
  [ "$TAKEN" = 0 ] || { shift "$TAKEN" && continue; }
  case $1 in
    --type | --version | --valid-until | --network | --subnetwork | --service-account | --poll) need_next "$@" && TAKEN=2 ;;
    *) TAKEN=1 ;;
  esac
  case $1 in
    --type) TYPE=$2 ;;
    --version) VERSION=$2 ;;
    --spot) SPOT=1 ;;
    --reserved) RESERVED=1 ;;
    --valid-until) VALID=$2 ;;
    --network | --subnetwork | --service-account) NETWORK+=("$1=$2") ;;
    --internal-ips) NETWORK+=("$1") ;;
    --poll) POLL=$2 ;;
    *) die "unknown argument '$1'; see $SCRIPT --help" ;;
  esac
  shift "$TAKEN"
done
need_value --type "$TYPE" TPU_TYPE
need_number --poll "$POLL"
[ -z "$VALID" ] || [ "$QUEUED" = 1 ] || die "--valid-until is for --queued"
[ "$SPOT$RESERVED" != 11 ] || die "--spot and --reserved exclude each other"
tpu_ready

if [ -z "$VERSION" ]; then
  case $TYPE in
    v6e-*) VERSION=v2-alpha-tpuv6e ;;
    v5p-*) VERSION=v2-alpha-tpuv5 ;;
    v5litepod-* | v5e-*) VERSION=v2-alpha-tpuv5-lite ;;
    v2-* | v3-* | v4-*) VERSION=tpu-ubuntu2204-base ;;
    *) die "no TPU software version is known for --type $TYPE; give one with --version" ;;
  esac
fi
# A mounted bucket is reached with the machine's own account.
options=("${TPU_WHERE[@]}" "--accelerator-type=$TYPE" --scopes=https://www.googleapis.com/auth/cloud-platform)
[ "$SPOT" = 0 ] || options+=(--spot)
[ "$RESERVED" = 0 ] || options+=(--reserved)
options+=(${NETWORK[@]+"${NETWORK[@]}"})

if [ "$QUEUED" = 0 ]; then
  run gcloud compute tpus tpu-vm create "$NAME" "${options[@]}" "--version=$VERSION" --quiet || {
    note "not created; see the message above"
    exit "$INTERRUPTED"
  }
  exit
fi

[ -z "$VALID" ] || options+=("--valid-until-duration=$VALID")
run gcloud compute tpus queued-resources create "$NAME" "--node-id=$NAME" "${options[@]}" "--runtime-version=$VERSION" --quiet || {
  note "not queued; see the message above"
  exit "$INTERRUPTED"
}
if [ "$DRY_RUN" = 1 ]; then
  run gcloud compute tpus queued-resources describe "$NAME" "${TPU_WHERE[@]}" '--format=value(state.state)'
  exit
fi
last=''
while :; do
  state=$(queue_state)
  [ "$state" = "$last" ] || note "queued resource $NAME: $state"
  last=$state
  case $state in
    ACTIVE) exit 0 ;;
    FAILED | SUSPENDING | SUSPENDED | DELETING | NONE)
      note "the request ended without a TPU; remove it with launch/tpu_delete.sh --queued $(quote "${TPU_CALL[@]}")"
      exit "$INTERRUPTED"
      ;;
  esac
  pause "$POLL"
done
