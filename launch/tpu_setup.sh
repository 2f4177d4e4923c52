#!/usr/bin/env bash
# Puts this checkout on all workers of a TPU, installs it (~/prb_venv), and mounts the storage for runs.
# Can be run again at any time, as after a change in the checkout.
#
#   launch/tpu_setup.sh --name NAME --zone ZONE [options]
#
#   --name NAME, --zone ZONE, --project PROJECT      also TPU_NAME, TPU_ZONE, TPU_PROJECT
#   --bucket BUCKET        mount this Cloud Storage bucket with gcsfuse
#   --nfs SERVER:/EXPORT   or this NFS export (Filestore)
#   --mount DIR            where (default: /mnt/prb)
#   --connect HOW          external (default), internal (from a machine in the same network) or iap
#   --no-check             do not start JAX on all workers to count the chips
#   --dry-run              print the commands, run none
#
# What travels: the files of the checkout that git does not ignore, committed or not.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

SETUP=(--extra tpu) CHECK=1
while [ $# -gt 0 ]; do
  case $1 in --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;; esac
  tpu_option "$@"
  [ "$TAKEN" = 0 ] || { shift "$TAKEN" && continue; }
  case $1 in
    --bucket | --nfs | --mount) need_next "$@" && SETUP+=("$1" "$2") && shift 2 ;;
    --no-check) CHECK=0 && shift ;;
    *) die "unknown argument '$1'; see $SCRIPT --help" ;;
  esac
done
case " ${SETUP[*]} " in *' --bucket '*' --nfs '* | *' --nfs '*' --bucket '*) die "--bucket and --nfs exclude each other" ;; esac
tpu_ready
need_tool git 'it lists the files to copy'

archive=prb_jax.tar.gz
if [ "$DRY_RUN" = 0 ]; then
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
  archive=$folder/$archive
  (
    cd "$ROOT"
    # A file that was deleted but is still in the index is not there to be copied.
    git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
      [ ! -e "$file" ] || printf '%s\0' "$file"
    done | tar --null -T - -czf "$archive"
  )
else
  echo "# the checkout as $archive"
fi
tpu_copy "$archive" prb_jax.tar.gz
tpu_ssh all bash -c "mkdir -p $REMOTE_HOME && tar -xzf prb_jax.tar.gz -C $REMOTE_HOME"
tpu_ssh all "$REMOTE_HOME/launch/worker.sh" setup "${SETUP[@]}"
if [ "$CHECK" = 1 ]; then
  tpu_ssh all prb_venv/bin/python -c 'import jax; jax.distributed.initialize(); print(f"process {jax.process_index()} of {jax.process_count()}: {jax.local_device_count()} of {jax.device_count()} chips, {jax.devices()[0].device_kind}")'
fi
