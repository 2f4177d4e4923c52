#!/usr/bin/env bash
# A run on machines that may be taken away (spot): creates the TPU, sets it up, runs the command; after a
# preemption deletes what is left and does it again, until the command is done. Then deletes the TPU.
#
#   launch/tpu_until_done.sh --name NAME --zone ZONE --type TYPE --spot --bucket BUCKET [options] -- COMMAND...
#
#   --name NAME, --zone ZONE, --project PROJECT, --type TYPE     also TPU_NAME, TPU_ZONE, TPU_PROJECT, TPU_TYPE
#   --spot, --reserved, --queued, --valid-until, --version, --network, --subnetwork, --service-account,
#   --internal-ips         as for launch/tpu_create.sh
#   --bucket, --nfs, --mount     as for launch/tpu_setup.sh; one of the first two is required: the run has to outlive
#                                the machines, so COMMAND's --out must lie below --mount (default: /mnt/prb)
#   --job, --log, --grace, --poll, --connect     as for launch/tpu_run.sh
#   --max-attempts N       starts in all (default: 100)
#   --wait SECONDS         before the next try when there is no capacity (default: 120)
#   --cleanup WHEN         delete the TPU at the end: success (default; a failed command leaves it to look at),
#                          always or never
#   --dry-run              print the commands, run none
#
# Status: the command's; 75 after --max-attempts.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

CREATE=() SETUP=() RUN=() ATTEMPTS=100 WAIT=120 CLEANUP=success STORAGE='' TYPE=${TPU_TYPE:-}
while [ $# -gt 0 ]; do
  [ "$1" != -- ] || { shift && break; }
  case $1 in --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;; esac
  tpu_option "$@"
  [ "$TAKEN" = 0 ] || { shift "$TAKEN" && continue; }
  case $1 in
    --spot | --reserved | --internal-ips) TAKEN=1 ;;
    --*) need_next "$@" && TAKEN=2 ;;
    *) die "unknown argument '$1' (the command comes after --); see $SCRIPT --help" ;;
  esac
  case $1 in
    --type) TYPE=$2 && CREATE+=("$1" "$2") ;;
    --spot | --reserved | --internal-ips) CREATE+=("$1") ;;
    --valid-until | --version | --network | --subnetwork | --service-account) CREATE+=("$1" "$2") ;;
    --bucket | --nfs) STORAGE=$2 && SETUP+=("$1" "$2") ;;
    --mount) SETUP+=("$1" "$2") ;;
    --poll) CREATE+=("$1" "$2") && RUN+=("$1" "$2") ;;
    --job | --log | --grace) RUN+=("$1" "$2") ;;
    --max-attempts) ATTEMPTS=$2 ;;
    --wait) WAIT=$2 ;;
    --cleanup) CLEANUP=$2 ;;
    *) die "unknown argument '$1'; see $SCRIPT --help" ;;
  esac
  shift "$TAKEN"
done
[ $# -gt 0 ] || die "a command is missing: $SCRIPT ... -- COMMAND"
need_value --type "$TYPE" TPU_TYPE
need_value '--bucket or --nfs' "$STORAGE"
need_number --max-attempts "$ATTEMPTS"
need_number --wait "$WAIT"
case $CLEANUP in success | always | never) ;; *) die "--cleanup is success, always or never, found '$CLEANUP'" ;; esac
need_distributed "$@"
tpu_ready
[ "$QUEUED" = 0 ] || CREATE+=(--queued)
DELETE=("${TPU_CALL[@]}")
[ "$QUEUED" = 0 ] || DELETE+=(--queued)

# 0: there is a TPU; otherwise there is none and none can be had now.
have_tpu() {
  local state=NONE
  if [ "$DRY_RUN" = 0 ]; then
    state=$(tpu_state)
    case $state in
      READY) return 0 ;;
      UNKNOWN) return 1 ;;
    esac
    # A request that was preempted stays, and keeps the name.
    "$HERE/tpu_delete.sh" "${DELETE[@]}" || return 1
  fi
  "$HERE/tpu_create.sh" "${TPU_CALL[@]}" ${CREATE[@]+"${CREATE[@]}"}
}

finish() {
  local status=$1
  if [ "$CLEANUP" = always ] || { [ "$CLEANUP" = success ] && [ "$status" = 0 ]; }; then
    "$HERE/tpu_delete.sh" "${DELETE[@]}" || note "$NAME could not be deleted: it still costs"
  elif [ "$DRY_RUN" = 0 ]; then
    note "$NAME was left as it is; delete it with launch/tpu_delete.sh $(quote "${DELETE[@]}")"
  fi
  exit "$status"
}

attempt=1 bad_setups=0
while [ "$attempt" -le "$ATTEMPTS" ]; do
  [ "$DRY_RUN" = 1 ] || note "attempt $attempt"
  attempt=$((attempt + 1))
  status=0
  have_tpu || status=$?
  if [ "$status" != 0 ]; then
    [ "$status" != 2 ] || finish 2
    note "no TPU now; next try in $WAIT seconds"
    pause "$WAIT"
    continue
  fi
  if ! "$HERE/tpu_setup.sh" "${TPU_CALL[@]}" "${SETUP[@]}"; then
    bad_setups=$((bad_setups + 1))
    [ "$bad_setups" -lt 3 ] || { note "the set-up failed three times" && finish 1; }
    continue
  fi
  bad_setups=0
  "$HERE/tpu_run.sh" "${TPU_CALL[@]}" ${RUN[@]+"${RUN[@]}"} -- "$@" || status=$?
  [ "$status" = "$INTERRUPTED" ] || finish "$status"
  note "interrupted; the same command continues the run"
done
note "not done after $ATTEMPTS attempts"
finish "$INTERRUPTED"
