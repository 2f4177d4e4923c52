# shellcheck shell=bash disable=SC2034  # names are used where this is sourced
# What the launch scripts share; sourced, never run. Works with bash 3.2, which macOS has.

# Status of a job that was stopped before it was done and that the same command continues.
INTERRUPTED=75
DRY_RUN=${DRY_RUN:-0}
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(dirname "$HERE")
SCRIPT=$(basename "$0")

# One line, status 2: the caller can put it right.
die() {
  printf '%s: error: %s\n' "$SCRIPT" "$*" >&2
  exit 2
}

note() { printf '%s: %s\n' "$SCRIPT" "$*" >&2; }

# The comment at the top of a script is its help.
show_help() { awk 'NR > 1 && !/^#/ { exit } NR > 1 { sub(/^# ?/, ""); print }' "$0"; }

# One word for any POSIX shell; plain words stay as they are.
quote_word() {
  local word=$1 out="'" apostrophe="'"
  case $word in
    '' | *[!A-Za-z0-9_@%+=:,./-]*) ;;
    *) printf '%s' "$word" && return ;;
  esac
  case $word in
    *[[:cntrl:]]*) printf '%q' "$word" && return ;; # stays on one line
  esac
  while [[ $word == *"$apostrophe"* ]]; do
    out+=${word%%"$apostrophe"*}"'\\''"
    word=${word#*"$apostrophe"}
  done
  printf "%s%s'" "$out" "$word"
}

# All words as one command line that a shell reads back as the same words.
quote() {
  local word separator=''
  for word in "$@"; do
    printf '%s' "$separator"
    quote_word "$word"
    separator=' '
  done
}

# Runs a command, and says so; with --dry-run only prints it, ready to paste.
run() {
  if [ "$DRY_RUN" = 1 ]; then
    quote "$@" && echo
  else
    printf '+ %s\n' "$(quote "$@")" >&2
    "$@"
  fi
}

need_tool() {
  if [ "$DRY_RUN" = 0 ] && ! command -v "$1" >/dev/null 2>&1; then
    die "$1 not found: $2"
  fi
}

# need_value --zone "$ZONE" [TPU_ZONE]
need_value() { [ -n "$2" ] || die "$1 is missing${3:+ (or set $3)}; see $SCRIPT --help"; }

# need_next "$@": an option that takes a value has one.
need_next() { [ $# -ge 2 ] || die "$1 needs a value; see $SCRIPT --help"; }

need_number() {
  case $2 in
    '' | *[!0-9]*) die "$1 must be a whole number, found '$2'" ;;
  esac
}

# A `prb` command of several processes says so itself.
need_distributed() {
  local word
  [ "${1##*/}" = prb ] || return 0
  for word in "$@"; do [ "$word" != --distributed ] || return 0; done
  die "the command is for several processes and lacks --distributed"
}

pause() { [ "$DRY_RUN" = 1 ] || sleep "$1"; }

# --- Cloud TPU VMs ----------------------------------------------------------------------------------

NAME=${TPU_NAME:-} ZONE=${TPU_ZONE:-} PROJECT=${TPU_PROJECT:-} CONNECT='' QUEUED=0
REMOTE_HOME=prb_jax # the checkout on the workers, below their home folder
TAKEN=0

# The options that every tpu_*.sh has; sets TAKEN to the number of words read, 0 for none.
tpu_option() {
  TAKEN=2
  case $1 in
    --name) need_next "$@" && NAME=$2 ;;
    --zone) need_next "$@" && ZONE=$2 ;;
    --project) need_next "$@" && PROJECT=$2 ;;
    --connect)
      need_next "$@"
      case $2 in external | internal | iap) CONNECT=$2 ;; *) die "--connect is external, internal or iap, found '$2'" ;; esac
      ;;
    --queued) QUEUED=1 TAKEN=1 ;;
    --dry-run) DRY_RUN=1 TAKEN=1 ;;
    --help | -h) show_help && exit 0 ;;
    *) TAKEN=0 ;;
  esac
}

# After parsing: what is needed is there. TPU_WHERE and TPU_CALL (options to hand on) are for the caller.
tpu_ready() {
  need_value --name "$NAME" TPU_NAME
  need_value --zone "$ZONE" TPU_ZONE
  need_tool gcloud "install the Google Cloud CLI, then run gcloud auth login"
  TPU_WHERE=("--zone=$ZONE")
  TPU_CALL=(--name "$NAME" --zone "$ZONE")
  if [ -n "$PROJECT" ]; then
    TPU_WHERE+=("--project=$PROJECT")
    TPU_CALL+=(--project "$PROJECT")
  fi
  [ -z "$CONNECT" ] || TPU_CALL+=(--connect "$CONNECT")
  [ "$DRY_RUN" = 0 ] || TPU_CALL+=(--dry-run)
  TPU_TRACK=(gcloud)
  TPU_SSH=("${TPU_WHERE[@]}" --quiet)
  case $CONNECT in
    internal) TPU_SSH+=(--internal-ip) ;;
    iap) TPU_TRACK+=(alpha) TPU_SSH+=(--tunnel-through-iap) ;;
  esac
}

# tpu_ssh WORKER WORDS...: the words reach the worker's shell as they are, whatever they hold.
tpu_ssh() {
  local worker=$1
  shift
  # A machine that was taken away says nothing more: the connection ends after three minutes of silence.
  run "${TPU_TRACK[@]}" compute tpus tpu-vm ssh "$NAME" "${TPU_SSH[@]}" \
    --ssh-flag=-oServerAliveInterval=30 --ssh-flag=-oServerAliveCountMax=6 "--worker=$worker" "--command=$(quote "$@")"
}

# A file to the same place on all workers; relative places are below the home folder.
tpu_copy() {
  run "${TPU_TRACK[@]}" compute tpus tpu-vm scp "$1" "$NAME:$2" "${TPU_SSH[@]}" --worker=all
}

# The state in one word; NONE: there is none; UNKNOWN: could not be asked.
cloud_state() {
  local kind=$1 field=$2 answer
  if answer=$(gcloud compute tpus "$kind" describe "$NAME" "${TPU_WHERE[@]}" "--format=value($field)" 2>&1); then
    printf '%s\n' "$answer" | tail -n 1
  else
    case $answer in
      *NOT_FOUND* | *'not found'*) echo NONE ;;
      *) note "cannot ask for the state: $(printf '%s' "$answer" | tail -n 1)" && echo UNKNOWN ;;
    esac
  fi
}

tpu_state() { cloud_state tpu-vm state; }
queue_state() { cloud_state queued-resources state.state; }
