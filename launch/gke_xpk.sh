#!/usr/bin/env bash
# Runs on Google Kubernetes Engine through xpk: one or several TPU slices, restarted after a preemption.
#
#   launch/gke_xpk.sh cluster-create --cluster C --zone Z --type T [--slices N] [--spot | --reservation R]
#   launch/gke_xpk.sh storage        --cluster C --zone Z --bucket B [--storage S] [--mount DIR]
#   launch/gke_xpk.sh image          --image I [--extra tpu|cuda]
#   launch/gke_xpk.sh run            --cluster C --zone Z --type T --image I --job J [options] -- COMMAND...
#   launch/gke_xpk.sh status         --cluster C --zone Z [--job J]
#   launch/gke_xpk.sh logs           --cluster C --zone Z --job J
#   launch/gke_xpk.sh delete         --cluster C --zone Z --job J
#   launch/gke_xpk.sh cluster-delete --cluster C --zone Z
#
#   --cluster C            also GKE_CLUSTER
#   --zone Z               also GKE_ZONE
#   --project P            also GKE_PROJECT (default: gcloud's)
#   --type T               also TPU_TYPE: v5litepod-16, v5p-32, v6e-16, ...
#   --slices N             default: 1
#   --image I              also GKE_IMAGE; as europe-docker.pkg.dev/PROJECT/REPOSITORY/prb_jax:1
#   --storage S            name of the storage (default: prb-runs); `run` mounts it; none for none
#   --mount DIR            where, in the container (default: /mnt/prb)
#   --bucket B             Cloud Storage bucket behind it
#   --job J                name of the workload
#   --max-restarts N       after preemptions and failures (default: 100)
#   --grace SECONDS        for saving, from SIGTERM to SIGKILL (default: 120)
#   --priority P           very-low, low, medium, high or very-high
#   --env KEY=VALUE        for the command; repeatable; not for secrets, they would be readable in the cluster
#   --xpk OPTION           any other option of the xpk command; repeatable
#   --dry-run              print the commands, run none
#
# COMMAND is the same on every host, with --distributed, and its --out lies below --mount.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

VERB='' CLUSTER=${GKE_CLUSTER:-} ZONE=${GKE_ZONE:-} PROJECT=${GKE_PROJECT:-} TYPE=${TPU_TYPE:-} SLICES=1
IMAGE=${GKE_IMAGE:-} EXTRA=tpu STORAGE=prb-runs MOUNT=/mnt/prb BUCKET='' JOB='' RESTARTS=100 GRACE=120
CAPACITY=(--on-demand) MORE=()
while [ $# -gt 0 ]; do
  [ "$1" != -- ] || { shift && break; }
  case $1 in --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;; esac
  case $1 in
    --help | -h) show_help && exit 0 ;;
    --dry-run) DRY_RUN=1 && shift && continue ;;
    --spot) CAPACITY=(--spot) && shift && continue ;;
    --*) need_next "$@" ;;
    *)
      [ -z "$VERB" ] || die "unknown argument '$1' (the command comes after --); see $SCRIPT --help"
      VERB=$1 && shift && continue
      ;;
  esac
  case $1 in
    --cluster) CLUSTER=$2 ;;
    --zone) ZONE=$2 ;;
    --project) PROJECT=$2 ;;
    --type) TYPE=$2 ;;
    --slices) SLICES=$2 ;;
    --reservation) CAPACITY=("--reservation=$2") ;;
    --image) IMAGE=$2 ;;
    --extra) EXTRA=$2 ;;
    --storage) STORAGE=$2 ;;
    --mount) MOUNT=$2 ;;
    --bucket) BUCKET=$2 ;;
    --job) JOB=$2 ;;
    --max-restarts) RESTARTS=$2 ;;
    --grace) GRACE=$2 ;;
    --priority) MORE+=("$1=$2") ;;
    --env) MORE+=("$1=$2") ;;
    --xpk) MORE+=("$2") ;;
    *) die "unknown argument '$1'; see $SCRIPT --help" ;;
  esac
  shift 2
done

where=("--zone=$ZONE")
[ -z "$PROJECT" ] || where+=("--project=$PROJECT")
need_cluster() {
  need_value --cluster "$CLUSTER" GKE_CLUSTER
  need_value --zone "$ZONE" GKE_ZONE
  need_tool "${1:-xpk}" "${2:-install it with: pip install xpk}"
}
more() { run "$@" ${MORE[@]+"${MORE[@]}"}; }

case $VERB in
  cluster-create)
    need_cluster
    need_value --type "$TYPE" TPU_TYPE
    need_number --slices "$SLICES"
    more xpk cluster create "--cluster=$CLUSTER" "${where[@]}" "--tpu-type=$TYPE" "--num-slices=$SLICES" \
      "${CAPACITY[@]}" --enable-workload-identity --enable-gcsfuse-csi-driver
    ;;
  storage)
    need_cluster
    need_value --bucket "$BUCKET"
    # The volume's size is a formality: a bucket has none.
    more xpk storage attach "$STORAGE" "--cluster=$CLUSTER" "${where[@]}" --type=gcsfuse "--bucket=$BUCKET" \
      --size=1000 "--mount-point=$MOUNT" --auto-mount=false --readonly=false \
      --mount-options=implicit-dirs,rename-dir-limit=100000
    ;;
  image)
    need_value --image "$IMAGE" GKE_IMAGE
    need_tool docker 'install Docker'
    run docker build --platform=linux/amd64 "--build-arg=EXTRA=$EXTRA" "--file=$HERE/Dockerfile" "--tag=$IMAGE" "$ROOT"
    run docker push "$IMAGE"
    ;;
  run)
    [ $# -gt 0 ] || die "a command is missing: $SCRIPT run ... -- COMMAND"
    need_value --type "$TYPE" TPU_TYPE
    need_value --image "$IMAGE" GKE_IMAGE
    need_value --job "$JOB"
    need_number --slices "$SLICES"
    need_number --max-restarts "$RESTARTS"
    need_number --grace "$GRACE"
    need_distributed "$@"
    need_cluster
    # `exec`: signals reach the worker script. 75: SIGTERM ended it; 1: a neighbour is gone. By itself xpk starts
    # again only after 42 and 127-255. 2 is not among them: the command line is wrong.
    mounted=("--storage=$STORAGE")
    [ "$STORAGE" != none ] || mounted=()
    more xpk workload create "--workload=$JOB" "--cluster=$CLUSTER" "${where[@]}" "--tpu-type=$TYPE" \
      "--num-slices=$SLICES" "--docker-image=$IMAGE" ${mounted[@]+"${mounted[@]}"} "--max-restarts=$RESTARTS" \
      --restart-on-exit-codes=1,75 "--termination-grace-period-seconds=$GRACE" \
      "--command=exec /opt/prb_jax/launch/worker.sh exec -- $(quote "$@")"
    ;;
  status)
    need_cluster
    filter=()
    [ -z "$JOB" ] || filter=("--filter-by-job=$JOB")
    more xpk workload list "--cluster=$CLUSTER" "${where[@]}" ${filter[@]+"${filter[@]}"}
    ;;
  logs)
    need_value --job "$JOB"
    need_cluster kubectl 'gcloud components install kubectl'
    # Clusters of xpk are regional: the zone without its letter.
    run gcloud container clusters get-credentials "$CLUSTER" "--region=${ZONE%-*}" ${PROJECT:+"--project=$PROJECT"}
    # The first host of each slice; process 0 is in slice 0.
    run kubectl logs --follow --tail=-1 --prefix --max-log-requests=64 \
      "--selector=jobset.sigs.k8s.io/jobset-name=$JOB,batch.kubernetes.io/job-completion-index=0"
    ;;
  delete)
    need_value --job "$JOB"
    need_cluster
    more xpk workload delete "--workload=$JOB" "--cluster=$CLUSTER" "${where[@]}" --force
    ;;
  cluster-delete)
    need_cluster
    more xpk cluster delete "--cluster=$CLUSTER" "${where[@]}" --force
    ;;
  '') die "what to do is missing: cluster-create, storage, image, run, status, logs, delete or cluster-delete; see $SCRIPT --help" ;;
  *) die "unknown '$VERB'; see $SCRIPT --help" ;;
esac
