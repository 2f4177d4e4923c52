#!/usr/bin/env bash
# From reward models of differing quality to a correlation: the chain of docs/behaviour.md, in one folder.
#
#   bash docs/behaviour.sh POLICY OUT
#
# POLICY is a small causal language model; the reward models are trained from it, so that they share its tokenizer.
# Every command goes on where it was killed: run the script again. PRB is the command (default: prb).
set -euo pipefail
policy=$1 out=$2 prb=${PRB:-prb}
mkdir -p "$out"

# 1. Data: the generated personas, whose ground truth is known. A part for training, the same with some labels
#    exchanged (a corruption), and a part for testing with users that are not in the first.
$prb personas --out "$out/personas"
train=$out/train.jsonl test=$out/test.jsonl
every() { zcat "$out/personas/$1.jsonl.gz" | awk -v n="$2" 'NR % n == 1'; }
{ every train 6; every generic-train 2; } > "$train"
{ every test-unseen "${EVERY:-8}"; every generic-test "${EVERY:-8}"; } > "$test"
for share in 4 10; do # of ten labels
  awk -v share=$share '{ if (NR % 10 < share) { gsub(/"chosen":/, "\"#\":"); gsub(/"rejected":/, "\"chosen\":");
    gsub(/"#":/, "\"rejected\":") } print }' "$train" > "$out/train_wrong_$share.jsonl"
done

# 2. Reward models of differing quality: steps, knowledge of the user, trained part, corruption.
models=()
train_one() { # NAME CONFIG DATA KEY=VALUE...
  local name=$1 config=$2 data=$3
  shift 3
  $prb train "configs/$config.py" "model=$policy" init_head=true "data=$data" batch.comparisons=16 "$@" \
    validation.fraction=0 --out "$out/$name" --no-progress
  models+=("$out/$name")
}
train_one blind_5 bt_user_blind "$train" steps=5
train_one blind_40 bt_user_blind "$train" steps=40
train_one blind_160 bt_user_blind "$train" steps=160
train_one profile_20 bt_profile_context "$train" profile_posts=2 steps=20
train_one profile_80 bt_profile_context "$train" profile_posts=2 steps=80
train_one profile_240 bt_profile_context "$train" profile_posts=2 steps=240
train_one head_80 bt_user_blind "$train" tuning=head steps=80
train_one lora_80 bt_user_blind "$train" tuning=lora steps=80
train_one wrong_4 bt_user_blind "$out/train_wrong_4.jsonl" steps=80
train_one wrong_10 bt_user_blind "$out/train_wrong_10.jsonl" steps=80

# 3. The benchmark.
scores=()
for model in "${models[@]}"; do
  $prb evaluate "$model" --data "$test" --out "$model/scores" --no-progress
  scores+=("$model/scores")
done

# 4. Behaviours: best-of-16 of the policy's samples, policy accuracy, guided decoding.
$prb sample "$policy" --data "$test" --limit "${PROMPTS:-40}" --n 16 --max-new-tokens 32 --profile-posts 1 \
  --out "$out/samples" --no-progress
$prb best-of-n --samples "$out/samples" --rewards "${models[@]}" --out "$out/best" --no-progress
$prb policy-accuracy "$policy" --rewards "${models[@]}" --data "$test" --limit "${PAIRS:-120}" --profile-posts 1 \
  --candidates 5 --out "$out/policy_accuracy" --no-progress
behaviours=("$out/best" "$out/policy_accuracy")
for model in "${models[@]}"; do
  $prb guide "$policy" --reward "$model" --data "$test" --limit "${PROMPTS:-40}" --profile-posts 1 --weight 2 \
    --max-new-tokens 32 --out "$model/guided" --no-progress
  behaviours+=("$model/guided")
done

# 5. What predicts what.
$prb correlate --scores "${scores[@]}" --behaviour "${behaviours[@]}" --out "$out/correlation"
