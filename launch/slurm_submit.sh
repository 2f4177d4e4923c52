#!/usr/bin/env bash
# Submits a run to Slurm: several nodes, one process for each GPU (or CPU processes).
#
#   launch/slurm_submit.sh --nodes 2 --gpus-per-node 8 [options] -- prb train|evaluate ... --distributed
#
#   --nodes N              default: 1
#   --gpus-per-node G      one process for each GPU; without it on CPUs
#   --tasks-per-node T     processes on a node (default: G, or 1 on CPUs)
#   --cpus-per-task C, --mem M, --time T, --partition P, --account A, --qos Q     as sbatch's
#   --job-name NAME        default: prb
#   --log-dir DIR          on storage that the nodes share (default: runs/logs)
#   --setup LINE           shell line before the command, as '. .venv/bin/activate' or 'module load cuda'
#   --warn SECONDS         this long before the time limit the run saves, ends and is queued again (default: 300)
#   --max-requeues N       default: 50
#   --sbatch OPTION        any other option of sbatch, as --sbatch=--constraint=h100; repeatable
#   --dry-run              print the commands, run none
#
# Preemption, node failures and the time limit queue the job again under the same number; the same command then
# continues the run. Stop it for good with `scancel JOB`. --out, the model and the data must be on shared storage.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

NODES=1 GPUS='' TASKS='' JOB=prb LOGS=runs/logs SETUP='' WARN=300 REQUEUES=50 OPTIONS=()
while [ $# -gt 0 ]; do
  [ "$1" != -- ] || { shift && break; }
  case $1 in --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;; esac
  case $1 in
    --dry-run) DRY_RUN=1 && shift && continue ;;
    --help | -h) show_help && exit 0 ;;
    --*) need_next "$@" ;;
    *) die "unknown argument '$1' (the command comes after --); see $SCRIPT --help" ;;
  esac
  case $1 in
    --nodes) NODES=$2 ;;
    --gpus-per-node) GPUS=$2 ;;
    --tasks-per-node) TASKS=$2 ;;
    --cpus-per-task | --mem | --time | --partition | --account | --qos) OPTIONS+=("$1=$2") ;;
    --job-name) JOB=$2 ;;
    --log-dir) LOGS=$2 ;;
    --setup) SETUP=$2 ;;
    --warn) WARN=$2 ;;
    --max-requeues) REQUEUES=$2 ;;
    --sbatch) OPTIONS+=("$2") ;;
    *) die "unknown argument '$1'; see $SCRIPT --help" ;;
  esac
  shift 2
done
[ $# -gt 0 ] || die "a command is missing: $SCRIPT ... -- COMMAND"
need_number --nodes "$NODES"
need_number --warn "$WARN"
need_number --max-requeues "$REQUEUES"
[ -z "$GPUS" ] || need_number --gpus-per-node "$GPUS"
TASKS=${TASKS:-${GPUS:-1}}
need_number --tasks-per-node "$TASKS"
# JAX gives the i-th process of a node its i-th GPU.
[ -z "$GPUS" ] || [ "$TASKS" = "$GPUS" ] || die "--tasks-per-node $TASKS, but --gpus-per-node $GPUS: there is one process for each GPU"
[ "$((NODES * TASKS))" = 1 ] || need_distributed "$@"
need_tool sbatch 'run this on a login node of the cluster'

device=gpu
[ -n "$GPUS" ] || device=cpu
[ -z "$GPUS" ] || OPTIONS=("--gpus-per-node=$GPUS" ${OPTIONS[@]+"${OPTIONS[@]}"})
run mkdir -p "$LOGS" # sbatch drops a job whose log cannot be opened
run sbatch "--job-name=$JOB" "--nodes=$NODES" "--ntasks-per-node=$TASKS" ${OPTIONS[@]+"${OPTIONS[@]}"} \
  --requeue "--signal=B:USR1@$WARN" --open-mode=append "--output=$LOGS/%x-%j.log" \
  "$HERE/slurm_job.sh" --device "$device" --log-dir "$LOGS" --max-requeues "$REQUEUES" --setup "$SETUP" -- "$@"
[ "$DRY_RUN" = 1 ] || note "logs: $LOGS/$JOB-<job>.log, and .<process>.log for each process"
