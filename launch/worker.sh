#!/usr/bin/env bash
# What runs on a worker (TPU VM, container): set it up, start a job that outlives the connection, ask for it.
#
#   worker.sh setup [--extra tpu] [--bucket B | --nfs SERVER:/EXPORT] [--mount DIR] [--dry-run]
#   worker.sh start JOB -- COMMAND...   in the background; once more while it runs: nothing happens
#   worker.sh report JOB                one line: running, `exit N`, interrupted, stopped, lost or none
#   worker.sh follow JOB [BYTES]        the log since the job's start, until it ends; BYTES of it are known already
#   worker.sh log JOB [LINES]           the last lines of the log (default: 50)
#   worker.sh stop JOB [SECONDS]        SIGTERM, and SIGKILL if it still runs after SECONDS (default: 120)
#   worker.sh exec -- COMMAND...        in the foreground; status 75 where SIGTERM stopped it
#
# Jobs are in $PRB_JOBS/JOB (default ~/prb_jobs): command, log, status, pid. `interrupted` (SIGTERM from the
# system, as before a preemption) and `lost` (the machine started again) mean: the same command continues.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

JOBS=${PRB_JOBS:-$HOME/prb_jobs}
VENV=${PRB_VENV:-$HOME/prb_venv}
MOUNTED=$HOME/prb_mount # holds the folder that `setup` mounted
BOOT=/proc/sys/kernel/random/boot_id

job_folder() {
  need_value JOB "${1:-}"
  case $1 in *[!A-Za-z0-9_.-]* | .*) die "a job's name has letters, digits, . _ and -, found '$1'" ;; esac
  FOLDER=$JOBS/$1
}

alive() {
  [ -f "$FOLDER/pid" ] && [ "$(cat "$FOLDER/boot")" = "$(cat "$BOOT")" ] && kill -0 "$(cat "$FOLDER/pid")" 2>/dev/null
}

job_state() {
  local state
  if [ -f "$FOLDER/status" ]; then
    state=$(cat "$FOLDER/status")
  elif alive; then
    state=running
  elif [ -f "$FOLDER/command" ]; then
    # It may have ended between the two questions.
    state=$(cat "$FOLDER/status" 2>/dev/null || echo lost)
  else
    state=none
  fi
  printf '%s\n' "$state"
}

# Runs the command in a process group of its own; sets STATUS, and TERMINATED=1 after a SIGTERM to us.
# forward=1 hands a SIGTERM on: a container's first process alone gets it. At a shutdown every process
# gets one from the system, and a second one would end a `prb train` that is saving.
supervise() {
  local forward=$1 child='' early=0 signalled
  shift
  STATUS=0 TERMINATED=0
  # Before the child starts: a SIGTERM that comes while it does is handed on when its number is known.
  trap 'TERMINATED=1 signalled=1; if [ -z "$child" ]; then early=1; else hand_on "$forward" "$child"; fi' TERM
  set -m # a process group for the child
  "$@" &
  child=$!
  set +m
  [ "$early" = 0 ] || hand_on "$forward" "$child"
  [ -z "${FOLDER:-}" ] || echo "$child" >"$FOLDER/child"
  while :; do
    signalled=0
    wait "$child" && STATUS=0 || STATUS=$?
    [ "$signalled" = 1 ] || break # a signal ends `wait`, not the child
  done
  trap - TERM
}

hand_on() { # SIGTERM, to the child's process group
  [ "$1" = 0 ] || kill -TERM -- "-$2" 2>/dev/null || true
}

start() {
  job_folder "$@"
  shift
  [ "${1:-}" != -- ] || shift
  [ $# -gt 0 ] || die "start needs a command"
  # Without its storage a run would be written to this machine's disk, and lost with it.
  if [ -f "$MOUNTED" ] && ! mountpoint -q "$(cat "$MOUNTED")"; then
    die "$(cat "$MOUNTED") is not mounted; run launch/tpu_setup.sh again"
  fi
  mkdir -p "$FOLDER"
  if [ "$(job_state)" = running ]; then
    [ "$(cat "$FOLDER/command")" = "$(quote "$@")" ] || die "job ${FOLDER##*/} runs another command: $(cat "$FOLDER/command")"
    echo "already running: $(quote "$@")"
    return
  fi
  rm -f "$FOLDER/status" "$FOLDER/stopped" "$FOLDER/pid" "$FOLDER/child"
  quote "$@" >"$FOLDER/command"
  touch "$FOLDER/log"
  wc -c <"$FOLDER/log" >"$FOLDER/offset" # where this start begins in the log
  printf '=== %s: %s\n' "$(date -u +%FT%TZ)" "$(quote "$@")" >>"$FOLDER/log"
  # Nothing of it may hold the connection open: its own session, no terminal, no pipes.
  setsid nohup bash "${BASH_SOURCE[0]}" _job "${FOLDER##*/}" "$@" >>"$FOLDER/log" 2>&1 </dev/null &
  local tries=0
  until [ -f "$FOLDER/pid" ]; do
    tries=$((tries + 1))
    [ "$tries" -le 600 ] || die "the job did not start; see $FOLDER/log"
    sleep 0.05
  done
  echo "started: $(quote "$@")"
}

# The background part of `start`.
job() {
  job_folder "$1"
  shift
  cat "$BOOT" >"$FOLDER/boot" # a number that means a process only until the machine starts again
  echo $$ >"$FOLDER/pid.new" && mv "$FOLDER/pid.new" "$FOLDER/pid"
  if [ -d "$VENV/bin" ]; then export PATH="$VENV/bin:$PATH"; fi
  cd "$ROOT" # paths as configs/bt_user_blind.py are those of the checkout
  supervise 0 "$@"
  local state="exit $STATUS"
  if [ -f "$FOLDER/stopped" ]; then
    state=stopped
  elif [ "$TERMINATED" = 1 ] || [ "$STATUS" = "$INTERRUPTED" ]; then # of `prb`: it, or another of its processes
    state=interrupted
  fi
  printf '=== %s: %s\n' "$(date -u +%FT%TZ)" "$state"
  printf '%s\n' "$state" >"$FOLDER/status.new" && mv "$FOLDER/status.new" "$FOLDER/status"
}

follow() {
  job_folder "$@"
  [ -f "$FOLDER/log" ] || die "no job ${FOLDER##*/} on $(hostname)"
  need_number BYTES "${2:-0}"
  local seen size more=1
  seen=$(($(cat "$FOLDER/offset") + ${2:-0}))
  while [ "$more" = 1 ]; do
    [ "$(job_state)" = running ] || more=0 # and then once more, for the last lines
    size=$(wc -c <"$FOLDER/log")
    if [ "$size" -gt "$seen" ]; then
      { tail -c "+$((seen + 1))" "$FOLDER/log" || true; } | head -c "$((size - seen))" # it may grow meanwhile
      seen=$size
    fi
    [ "$more" = 0 ] || sleep 1
  done
}

stop() {
  job_folder "$@"
  local seconds=${2:-120} group
  need_number SECONDS "$seconds"
  [ "$(job_state)" = running ] || { job_state && return; }
  touch "$FOLDER/stopped"
  group=$(cat "$FOLDER/child")
  kill -TERM -- "-$group" 2>/dev/null || true
  while [ "$seconds" -gt 0 ] && [ "$(job_state)" = running ]; do
    sleep 1
    seconds=$((seconds - 1))
  done
  [ "$(job_state)" != running ] || kill -KILL -- "-$group" 2>/dev/null || true
  while [ "$(job_state)" = running ]; do sleep 0.1; done
  job_state
}

# A machine that has just started often updates itself.
APT=(-o DPkg::Lock::Timeout=600)

setup() {
  local extra=tpu bucket='' nfs='' mount=/mnt/prb
  while [ $# -gt 0 ]; do
    case $1 in --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;; esac
    case $1 in
      --dry-run) DRY_RUN=1 && shift && continue ;;
      --extra | --bucket | --nfs | --mount) need_next "$@" ;;
      *) die "unknown argument '$1'" ;;
    esac
    case $1 in
      --extra) extra=$2 ;;
      --bucket) bucket=$2 ;;
      --nfs) nfs=$2 ;;
      --mount) mount=$2 ;;
    esac
    shift 2
  done
  [ -z "$bucket" ] || [ -z "$nfs" ] || die "--bucket and --nfs exclude each other"
  # uv brings a Python of its own: TPU VMs come with one that is too old.
  if [ "$DRY_RUN" = 1 ] || [ ! -x "$VENV/bin/python" ]; then
    # The variable: newer systems refuse even --user without it.
    run env PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --user --quiet --upgrade uv
    run python3 -m uv venv --quiet --python 3.12 "$VENV"
  fi
  run python3 -m uv pip install --quiet --python "$VENV/bin/python" --editable "${ROOT}[$extra]"
  if [ -n "$bucket$nfs" ] && { [ "$DRY_RUN" = 1 ] || ! mountpoint -q "$mount"; }; then
    run sudo mkdir -p "$mount"
    if [ -n "$nfs" ]; then
      run sudo apt-get "${APT[@]}" install --yes --quiet nfs-common
      run sudo mount -t nfs "$nfs" "$mount"
    else
      install_gcsfuse
      run sudo chown "$(id -un)" "$mount"
      run gcsfuse --implicit-dirs --rename-dir-limit=100000 "$bucket" "$mount"
    fi
  fi
  if [ "$DRY_RUN" = 0 ] && [ -n "$bucket$nfs" ]; then echo "$mount" >"$MOUNTED"; fi
}

install_gcsfuse() {
  [ "$DRY_RUN" = 1 ] || ! command -v gcsfuse >/dev/null 2>&1 || return 0
  local packages=https://packages.cloud.google.com/apt key=/usr/share/keyrings/cloud.google.asc
  run sudo curl -fsSL "$packages/doc/apt-key.gpg" -o "$key"
  # shellcheck disable=SC2016  # expanded by the inner shell
  run sudo bash -c 'echo "deb [signed-by=$1] $2 gcsfuse-$(lsb_release -cs) main" >/etc/apt/sources.list.d/gcsfuse.list' \
    bash "$key" "$packages"
  run sudo apt-get "${APT[@]}" update --quiet
  run sudo apt-get "${APT[@]}" install --yes --quiet gcsfuse
}

verb=${1:-}
[ $# -eq 0 ] || shift
case $verb in
  setup) setup "$@" ;;
  start) start "$@" ;;
  _job) job "$@" ;;
  report) job_folder "$@" && echo "prb-job $(hostname): $(job_state)" ;;
  follow) follow "$@" ;;
  log) job_folder "$@" && tail -n "${2:-50}" "$FOLDER/log" ;;
  stop) stop "$@" ;;
  exec)
    [ "${1:-}" != -- ] || shift
    [ $# -gt 0 ] || die "exec needs a command"
    supervise 1 "$@"
    [ "$TERMINATED" = 0 ] || STATUS=$INTERRUPTED
    exit "$STATUS"
    ;;
  --help | -h) show_help ;;
  *) die "expected setup, start, report, follow, log, stop or exec; see $SCRIPT --help" ;;
esac
