#!/usr/bin/env bash
# Looks after a command that launch/tpu_run.sh started on a TPU.
#
#   launch/tpu_job.sh status --name NAME --zone ZONE     what each worker says of it
#   launch/tpu_job.sh log    --name NAME --zone ZONE     the last lines of the log
#   launch/tpu_job.sh follow --name NAME --zone ZONE     the log, until the command ends
#   launch/tpu_job.sh stop   --name NAME --zone ZONE     SIGTERM on all workers: `prb train` saves and ends
#
#   --name NAME, --zone ZONE, --project PROJECT      also TPU_NAME, TPU_ZONE, TPU_PROJECT
#   --job JOB              default: prb
#   --worker W             for log and follow: 0 (default), 3, all
#   --lines N              for log: how many (default: 50)
#   --connect HOW          external (default), internal or iap
#   --dry-run              print the commands, run none
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

VERB='' JOB=prb WORKERS=0 LINES_SHOWN=50
while [ $# -gt 0 ]; do
  case $1 in --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;; esac
  tpu_option "$@"
  [ "$TAKEN" = 0 ] || { shift "$TAKEN" && continue; }
  case $1 in
    --job | --worker | --lines) need_next "$@" && TAKEN=2 ;;
    *) TAKEN=1 ;;
  esac
  case $1 in
    --job) JOB=$2 ;;
    --worker) WORKERS=$2 ;;
    --lines) LINES_SHOWN=$2 ;;
    status | log | follow | stop) VERB=$1 ;;
    *) die "unknown argument '$1'; see $SCRIPT --help" ;;
  esac
  shift "$TAKEN"
done
[ -n "$VERB" ] || die "what to do is missing: status, log, follow or stop; see $SCRIPT --help"
need_number --lines "$LINES_SHOWN"
tpu_ready

case $VERB in
  status) tpu_ssh all "$REMOTE_HOME/launch/worker.sh" report "$JOB" ;;
  log) tpu_ssh "$WORKERS" "$REMOTE_HOME/launch/worker.sh" log "$JOB" "$LINES_SHOWN" ;;
  follow) tpu_ssh "$WORKERS" "$REMOTE_HOME/launch/worker.sh" follow "$JOB" ;;
  stop) tpu_ssh all "$REMOTE_HOME/launch/worker.sh" stop "$JOB" ;;
esac
