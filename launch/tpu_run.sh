#!/usr/bin/env bash
# Runs a command on all workers of a TPU at once, shows worker 0's log, and ends with the command's status.
#
#   launch/tpu_run.sh --name NAME --zone ZONE [options] -- COMMAND...
#
#   --name NAME, --zone ZONE, --project PROJECT      also TPU_NAME, TPU_ZONE, TPU_PROJECT
#   --job JOB              its name on the workers (default: prb); one name, one command at a time
#   --log FILE             keep a copy of worker 0's log here
#   --detach               only start it; see it with launch/tpu_job.sh
#   --grace SECONDS        how long a preemption may take to show after a failure (default: 90)
#   --poll SECONDS         between two questions (default: 15)
#   --connect HOW          external (default), internal or iap
#   --dry-run              print the commands, run none
#
# The command outlives this script and the connection: the same call finds it again and goes on showing its log.
# It runs in the checkout on the worker (~/prb_jax), with ~/prb_venv. Words keep their spaces and quotes; for pipes
# or variables say -- bash -c '...'.
#
# Status: the command's; 75 where machines were taken away or started again (the same command continues the run).
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

JOB=prb LOG='' DETACH=0 GRACE=90 POLL=15
while [ $# -gt 0 ]; do
  [ "$1" != -- ] || { shift && break; }
  case $1 in --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;; esac
  tpu_option "$@"
  [ "$TAKEN" = 0 ] || { shift "$TAKEN" && continue; }
  case $1 in
    --job | --log | --grace | --poll) need_next "$@" && TAKEN=2 ;;
    *) TAKEN=1 ;;
  esac
  case $1 in
    --job) JOB=$2 ;;
    --log) LOG=$2 ;;
    --grace) GRACE=$2 ;;
    --poll) POLL=$2 ;;
    --detach) DETACH=1 ;;
    *) die "unknown argument '$1' (the command comes after --); see $SCRIPT --help" ;;
  esac
  shift "$TAKEN"
done
[ $# -gt 0 ] || die "a command is missing: $SCRIPT ... -- COMMAND"
need_number --grace "$GRACE"
need_number --poll "$POLL"
need_distributed "$@"
tpu_ready

WORKER=$REMOTE_HOME/launch/worker.sh

taken_away() {
  local state
  state=$(tpu_state)
  [ "$state" != READY ] && [ "$state" != UNKNOWN ] || return 1
  note "$NAME is $state: it was taken away"
}

if [ "$DRY_RUN" = 1 ]; then
  tpu_ssh all "$WORKER" start "$JOB" -- "$@"
  if [ "$DETACH" = 0 ]; then
    tpu_ssh 0 "$WORKER" follow "$JOB"
    tpu_ssh all "$WORKER" report "$JOB"
  fi
  exit
fi

# Tries again while the machines are there: a connection may fail, and a job that runs is not started twice.
tries=0
while :; do
  status=0
  tpu_ssh all "$WORKER" start "$JOB" -- "$@" >&2 || status=$?
  case $status in
    0) break ;;
    2) exit 2 ;; # the worker has said why
    126 | 127) die "$NAME is not set up; run launch/tpu_setup.sh" ;;
  esac
  if taken_away; then exit "$INTERRUPTED"; fi
  tries=$((tries + 1))
  [ "$tries" -lt 5 ] || die "could not start the command on all workers of $NAME"
  pause "$POLL"
done
[ "$DETACH" = 0 ] || exit 0

if [ -n "$LOG" ]; then
  mkdir -p "$(dirname "$LOG")" && touch "$LOG"
else
  LOG=$(mktemp)
  trap 'rm -f "$LOG"' EXIT
fi
before=$(wc -c <"$LOG")

# Goes on where the last connection ended.
follow() {
  tpu_ssh 0 "$WORKER" follow "$JOB" "$(($(wc -c <"$LOG") - before))" | tee -a "$LOG"
}

# What the workers say together: interrupted, failed N, running, done, or unreachable.
verdict() {
  local reports status
  reports=$(tpu_ssh all "$WORKER" report "$JOB" | grep '^prb-job ') || { echo unreachable && return; }
  status=$(printf '%s\n' "$reports" | sed -n 's/.*: exit \([1-9][0-9]*\)$/\1/p' | head -n 1)
  case $reports in
    *': interrupted'* | *': lost'* | *': none'*) echo interrupted ;;
    *': stopped'*) echo stopped ;;
    *) if [ -n "$status" ]; then
      echo "failed $status"
    else
      case $reports in *': running'*) echo running ;; *) echo "done" ;; esac
    fi ;;
  esac
}

while :; do
  follow || note "the connection to worker 0 ended; looking again"
  outcome=$(verdict)
  case $outcome in
    done) exit 0 ;;
    stopped) note "stopped with launch/tpu_job.sh stop" && exit 143 ;;
    interrupted) note "the command was interrupted on a worker" && break ;;
    failed*)
      # The state lags: a worker that lost its neighbours fails first.
      waited=0
      until taken_away; do
        if [ "$waited" -ge "$GRACE" ]; then
          note "the command failed: status ${outcome#failed }"
          tpu_ssh all "$WORKER" stop "$JOB" || true
          exit "${outcome#failed }"
        fi
        pause "$POLL"
        waited=$((waited + POLL + 1))
      done
      exit "$INTERRUPTED"
      ;;
    unreachable) if taken_away; then exit "$INTERRUPTED"; fi ;;
  esac
  pause "$POLL"
done
# What still runs on other workers would keep their chips.
tpu_ssh all "$WORKER" stop "$JOB" 30 || true
exit "$INTERRUPTED"
