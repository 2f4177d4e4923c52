#!/usr/bin/env bash
# Runs on Google Kubernetes Engine through the Cluster Toolkit: TPU slices or GPUs, restarted after a preemption.
#
#   launch/gke.sh image  --image I [--extra tpu|cuda]
#   launch/gke.sh run    --cluster C --location L --type T --image I --job J --bucket B [options] -- COMMAND...
#   launch/gke.sh status --cluster C --location L [--job J]
#   launch/gke.sh logs   --cluster C --location L --job J
#   launch/gke.sh delete --cluster C --location L --job J
#
#   --cluster C            also GKE_CLUSTER; made by a blueprint of the toolkit: gcluster create, gcluster deploy
#   --location L           also GKE_LOCATION: its region or zone
#   --project P            also GKE_PROJECT (default: gcluster's)
#   --type T               also GKE_TYPE: v6e-16, nvidia-l4, ...
#   --slices N             default: 1
#   --image I              also GKE_IMAGE; as europe-docker.pkg.dev/PROJECT/REPOSITORY/prb_jax:1
#   --bucket B             Cloud Storage bucket that is mounted in the containers; none for none
#   --mount DIR            where, in the container (default: /mnt/prb)
#   --job J                name of the workload
#   --restarts N           after failures (default: 10); those after a preemption are not counted
#   --grace SECONDS        for saving, from SIGTERM to SIGKILL (default: 120)
#   --gcluster OPTION      any other option of gcluster job submit; repeatable
#   --dry-run              print the commands, run none
#
# COMMAND is the same on every host, with --distributed, and its --out lies below --mount.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

VERB='' CLUSTER=${GKE_CLUSTER:-} LOCATION=${GKE_LOCATION:-} PROJECT=${GKE_PROJECT:-} TYPE=${GKE_TYPE:-} SLICES=1
IMAGE=${GKE_IMAGE:-} EXTRA=tpu MOUNT=/mnt/prb BUCKET='' JOB='' RESTARTS=10 GRACE=120 MORE=()
while [ $# -gt 0 ]; do
  [ "$1" != -- ] || { shift && break; }
  case $1 in --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;; esac
  case $1 in
    --help | -h) show_help && exit 0 ;;
    --dry-run) DRY_RUN=1 && shift && continue ;;
    --*) need_next "$@" ;;
    *)
      [ -z "$VERB" ] || die "unknown argument '$1' (the command comes after --); see $SCRIPT --help"
      VERB=$1 && shift && continue
      ;;
  esac
  case $1 in
    --cluster) CLUSTER=$2 ;;
    --location) LOCATION=$2 ;;
    --project) PROJECT=$2 ;;
    --type) TYPE=$2 ;;
    --slices) SLICES=$2 ;;
    --image) IMAGE=$2 ;;
    --extra) EXTRA=$2 ;;
    --mount) MOUNT=$2 ;;
    --bucket) BUCKET=$2 ;;
    --job) JOB=$2 ;;
    --restarts) RESTARTS=$2 ;;
    --grace) GRACE=$2 ;;
    --gcluster) MORE+=("$2") ;;
    *) die "unknown argument '$1'; see $SCRIPT --help" ;;
  esac
  shift 2
done

gcluster_job() {
  local verb=$1
  shift
  need_value --cluster "$CLUSTER" GKE_CLUSTER
  need_value --location "$LOCATION" GKE_LOCATION
  need_tool gcluster "install Google's Cluster Toolkit"
  run gcluster job "$verb" "$@" "--cluster=$CLUSTER" "--location=$LOCATION" ${PROJECT:+"--project=$PROJECT"} \
    ${MORE[@]+"${MORE[@]}"}
}

case $VERB in
  image)
    need_value --image "$IMAGE" GKE_IMAGE
    need_tool docker 'install Docker'
    run docker build --platform=linux/amd64 "--build-arg=EXTRA=$EXTRA" "--file=$HERE/Dockerfile" "--tag=$IMAGE" "$ROOT"
    run docker push "$IMAGE"
    ;;
  run)
    [ $# -gt 0 ] || die "a command is missing: $SCRIPT run ... -- COMMAND"
    need_value --type "$TYPE" GKE_TYPE
    need_value --image "$IMAGE" GKE_IMAGE
    need_value --job "$JOB"
    need_value --bucket "$BUCKET"
    need_number --slices "$SLICES"
    need_number --restarts "$RESTARTS"
    need_number --grace "$GRACE"
    need_distributed "$@"
    mounted=("--mount=gs://$BUCKET:$MOUNT:rw")
    [ "$BUCKET" != none ] || mounted=()
    # `exec`: signals reach the worker script. 75: SIGTERM ended it, which counts for no restart.
    gcluster_job submit "--name=$JOB" "--compute-type=$TYPE" "--num-slices=$SLICES" "--image=$IMAGE" \
      ${mounted[@]+"${mounted[@]}"} "--restarts=$RESTARTS" --restart-on-exit-codes=75 "--grace-period=${GRACE}s" \
      "--command=exec /opt/prb_jax/launch/worker.sh exec -- $(quote "$@")"
    ;;
  status) gcluster_job list ${JOB:+"--name-contains=$JOB"} ;;
  logs)
    need_value --job "$JOB"
    gcluster_job logs "$JOB" --follow
    ;;
  delete)
    need_value --job "$JOB"
    gcluster_job cancel "$JOB"
    ;;
  '') die "what to do is missing: image, run, status, logs or delete; see $SCRIPT --help" ;;
  *) die "unknown '$VERB'; see $SCRIPT --help" ;;
esac
