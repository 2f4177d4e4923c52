#!/usr/bin/env bash
# The Slurm job itself, submitted by launch/slurm_submit.sh; Slurm copies it, so it stands alone.
#
#   slurm_job.sh --device gpu|cpu --log-dir DIR --max-requeues N --setup LINE -- COMMAND...
#
#   --dry-run              print the srun command, run none
#
# Starts the command once for each task with srun; jax.distributed finds the rest in Slurm's variables.
# SIGUSR1 (the time limit is near): the tasks get SIGTERM, `prb train` saves, and the job is queued again.
# SIGTERM (preemption): the same, but queueing it again is left to Slurm.
set -euo pipefail

DRY_RUN=0 DEVICE=gpu LOGS=runs/logs REQUEUES=50 SETUP=''
die() { printf 'slurm_job.sh: error: %s\n' "$*" >&2 && exit 2; }
while [ $# -gt 0 ]; do
  case $1 in
    --) shift && break ;;
    --dry-run) DRY_RUN=1 && shift && continue ;;
    --help | -h) awk 'NR > 1 && !/^#/ { exit } NR > 1 { sub(/^# ?/, ""); print }' "$0" && exit 0 ;;
    --device | --log-dir | --max-requeues | --setup) [ $# -ge 2 ] || die "$1 needs a value" ;;
    *) die "unknown argument '$1' (the command comes after --)" ;;
  esac
  case $1 in
    --device) DEVICE=$2 ;;
    --log-dir) LOGS=$2 ;;
    --max-requeues) REQUEUES=$2 ;;
    --setup) SETUP=$2 ;;
  esac
  shift 2
done
[ $# -gt 0 ] || die "a command is missing"

step=(srun --kill-on-bad-exit=1 "--output=$LOGS/%x-%j.%t.log" --open-mode=append)
# srun does not take this from the job by itself.
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || step+=("--cpus-per-task=$SLURM_CPUS_PER_TASK")
if [ "$DEVICE" = gpu ]; then
  step+=(--gpu-bind=none) # each process sees all GPUs of its node and takes the one of its local number
else
  export JAX_PLATFORMS=cpu
fi
step+=("$@")
if [ "$DRY_RUN" = 1 ]; then
  [ -z "$SETUP" ] || printf '%s\n' "$SETUP"
  printf '%q ' "${step[@]}" && echo
  exit
fi
[ -n "${SLURM_JOB_ID:-}" ] || die "not in a Slurm job; submit with launch/slurm_submit.sh"

if [ -n "$SETUP" ]; then
  set +u # activation scripts and modules are not written for it
  eval "$SETUP"
  set -u
fi
printf '=== %s: start %s of job %s on %s\n' "$(date -u +%FT%TZ)" "$((${SLURM_RESTART_COUNT:-0} + 1))" \
  "$SLURM_JOB_ID" "${SLURM_JOB_NODELIST:-$(hostname)}"

REASON='' SIGNALLED=0
# shellcheck disable=SC2329  # called by the traps
# To the tasks alone: srun itself would answer a SIGTERM with a SIGKILL for them.
end_tasks() {
  SIGNALLED=1
  [ -z "$REASON" ] || return 0
  REASON=$1
  echo "=== $1: SIGTERM to the tasks"
  scancel --signal=TERM "$SLURM_JOB_ID" || true
}
trap 'end_tasks "time limit"' USR1
trap 'end_tasks preemption' TERM

"${step[@]}" &
task=$!
while :; do
  SIGNALLED=0
  status=0
  wait "$task" || status=$?
  [ "$SIGNALLED" = 1 ] || break # a signal ends `wait`, not srun
done
case $REASON in
  '') exit "$status" ;;
  'time limit')
    [ "${SLURM_RESTART_COUNT:-0}" -lt "$REQUEUES" ] || die "not done after $REQUEUES requeues; submit it again to go on"
    echo "=== queued again"
    scontrol requeue "$SLURM_JOB_ID"
    ;;
esac
exit 75
