#!/usr/bin/env bash
# One machine, several processes: one for each GPU, or some on the CPU.
#
#   launch/local.sh [options] -- prb train|evaluate ... --distributed
#
#   --processes N          default: the number of GPUs
#   --gpus LIST            these GPUs, as 0,2,3 (default: all)
#   --cpu                  on the CPU instead; needs --processes
#   --log-dir DIR          a file for each process (default: runs/logs/local-<time>)
#   --retries N            start again this many times after a failure (default: 0); the run continues
#   --port P               of the coordinator (default: a free one)
#   --grace SECONDS        between SIGTERM and SIGKILL (default: 120)
#   --dry-run              print the commands, run none
#
# Process 0 also writes to the terminal. If one process fails, the others are ended. Ctrl-C and SIGTERM are handed
# on once: `prb train` saves and ends. One process can also use all GPUs: `prb ...` without this script and without
# --distributed; a process for each GPU reads and tokenises in parallel.
#
# Status: the first failure's; 2 (the command line is wrong) is not tried again; 75 after SIGTERM, 130 after Ctrl-C.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

PROCESSES='' GPUS='' CPU=0 LOGS='' RETRIES=0 PORT='' GRACE=120
while [ $# -gt 0 ]; do
  [ "$1" != -- ] || { shift && break; }
  case $1 in --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;; esac
  case $1 in
    --cpu | --dry-run) ;;
    --help | -h) show_help && exit 0 ;;
    --*) need_next "$@" ;;
  esac
  case $1 in
    --processes) PROCESSES=$2 && shift ;;
    --gpus) GPUS=$2 && shift ;;
    --cpu) CPU=1 ;;
    --log-dir) LOGS=$2 && shift ;;
    --retries) RETRIES=$2 && shift ;;
    --port) PORT=$2 && shift ;;
    --grace) GRACE=$2 && shift ;;
    --dry-run) DRY_RUN=1 ;;
    *) die "unknown argument '$1' (the command comes after --); see $SCRIPT --help" ;;
  esac
  shift
done
[ $# -gt 0 ] || die "a command is missing: $SCRIPT ... -- COMMAND"
need_distributed "$@"
need_number --retries "$RETRIES"
need_number --grace "$GRACE"
[ "$CPU" = 0 ] || [ -z "$GPUS" ] || die "--cpu and --gpus exclude each other"

IDS=()
if [ "$CPU" = 1 ]; then
  need_value --processes "$PROCESSES"
else
  if [ -n "$GPUS" ]; then
    case $GPUS in *[!0-9,]* | ,* | *, | *,,*) die "--gpus is a list as 0,2,3, found '$GPUS'" ;; esac
    IFS=, read -r -a IDS <<<"$GPUS"
  elif [ -n "$PROCESSES" ] && [ "$DRY_RUN" = 1 ]; then
    need_number --processes "$PROCESSES"
    for ((gpu = 0; gpu < PROCESSES; gpu++)); do IDS+=("$gpu"); done
  else
    command -v nvidia-smi >/dev/null 2>&1 || die "nvidia-smi not found, so no GPUs; use --cpu --processes N"
    # JAX counts within CUDA_VISIBLE_DEVICES, as this does.
    if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
      count=$(awk -F, '{ print NF }' <<<"$CUDA_VISIBLE_DEVICES")
    else
      count=$(nvidia-smi --list-gpus | wc -l)
    fi
    for ((gpu = 0; gpu < count; gpu++)); do IDS+=("$gpu"); done
  fi
  PROCESSES=${PROCESSES:-${#IDS[@]}}
fi
need_number --processes "$PROCESSES"
[ "$PROCESSES" -gt 0 ] || die "--processes must be at least 1"
[ "$CPU" = 1 ] || [ "$PROCESSES" -le "${#IDS[@]}" ] || die "--processes $PROCESSES, but there are ${#IDS[@]} GPUs"

free_port() {
  local port
  while :; do
    port=$((20000 + RANDOM % 10000))
    (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || { echo "$port" && return; }
  done
}

# The words that start process $1; WORDS.
words_of() {
  local index=$1
  shift
  WORDS=(env "JAX_COORDINATOR_ADDRESS=127.0.0.1:$port" "JAX_NUM_PROCESSES=$PROCESSES" "JAX_PROCESS_ID=$index")
  if [ "$CPU" = 1 ]; then
    WORDS+=(JAX_PLATFORMS=cpu JAX_LOCAL_DEVICE_IDS=0)
  else
    WORDS+=("JAX_LOCAL_DEVICE_IDS=${IDS[index]}")
  fi
  WORDS+=("$@")
}

if [ "$DRY_RUN" = 1 ]; then
  port=${PORT:-PORT}
  for ((index = 0; index < PROCESSES; index++)); do
    words_of "$index" "$@"
    run "${WORDS[@]}"
  done
  exit
fi

LOGS=${LOGS:-runs/logs/local-$(date +%Y%m%d-%H%M%S)}
mkdir -p "$LOGS"
PIDS=() SIGNAL=0

# Every process has its own group, so that a signal comes once, and from here.
signal_all() {
  local pid
  for pid in ${PIDS[@]+"${PIDS[@]}"}; do kill "-$1" -- "-$pid" 2>/dev/null || true; done
}

trap 'SIGNAL=130; signal_all TERM' INT
trap 'SIGNAL=75; signal_all TERM' TERM
trap 'signal_all KILL' EXIT

# All processes to their end; STATUS is the first failure's.
once() {
  local index pid left deadline='' status
  port=${PORT:-$(free_port)}
  STATUS=0 PIDS=()
  set -m # a process group each
  for ((index = 0; index < PROCESSES; index++)); do
    words_of "$index" "$@"
    if [ "$index" = 0 ]; then
      "${WORDS[@]}" > >(trap '' INT TERM && exec tee -a "$LOGS/process-0.log") 2>&1 </dev/null &
    else
      "${WORDS[@]}" >>"$LOGS/process-$index.log" 2>&1 </dev/null &
    fi
    PIDS+=("$!")
  done
  set +m
  while :; do
    left=()
    for pid in "${PIDS[@]}"; do
      if kill -0 "$pid" 2>/dev/null; then
        left+=("$pid")
        continue
      fi
      status=0
      wait "$pid" || status=$?
      if [ "$status" != 0 ] && [ "$STATUS" = 0 ]; then
        STATUS=$status
        if [ "$SIGNAL" = 0 ]; then
          note "a process ended with status $status; ending the others"
          signal_all TERM
        fi
      fi
    done
    PIDS=(${left[@]+"${left[@]}"})
    [ "${#PIDS[@]}" -gt 0 ] || break
    if [ "$STATUS" != 0 ] || [ "$SIGNAL" != 0 ]; then
      deadline=${deadline:-$((SECONDS + GRACE))}
      [ "$SECONDS" -lt "$deadline" ] || signal_all KILL
    fi
    sleep 0.2 || true
  done
}

for ((attempt = 0; attempt <= RETRIES; attempt++)); do
  [ "$attempt" = 0 ] || note "start $((attempt + 1)): the run continues"
  once "$@"
  [ "$SIGNAL" = 0 ] || exit "$SIGNAL"
  [ "$STATUS" != 0 ] && [ "$STATUS" != 2 ] || break
done
if [ "$STATUS" != 0 ]; then note "failed with status $STATUS; see $LOGS"; fi
exit "$STATUS"
