"""GRPO by TRL (PyTorch, GPUs) for people: a personalised reward, and a gold reward that only watches.

    prb serve REWARD_MODEL --port 8000
    prb serve GOLD_MODEL --port 8001
    accelerate launch --num_processes 8 docs/engines/trl_grpo.py --policy Qwen/Qwen3-0.6B --data people.jsonl \
        --reward http://127.0.0.1:8000 --gold http://127.0.0.1:8001 --out runs/grpo

Written for TRL 1.16. Each rank asks the servers for the rewards of its own rollouts: no rank opens a reward model.
"""

import argparse
import json
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import prb_jax as prb


def people(file: Path) -> Dataset:
    """The rows that TRL hands to the reward: the prompt as messages, and the person."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": row["question"]}],
                "user_id": row["user_id"],
                "profile": row.get("profile") or [],
            }
            for row in rows
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--reward", required=True)
    parser.add_argument("--gold", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rollouts", type=int, default=64, help="of a step, on each rank")
    parser.add_argument("--generations", type=int, default=8, help="of a prompt")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--keep-rollouts", action="store_true", help="as parquet files in OUT/completions")
    options = parser.parse_args()

    # an empty completion has no score of the model: it is worth less than any other here
    reward = prb.reward_fn(options.reward, name="reward", empty=-10.0)
    gold = prb.reward_fn(options.gold, name="gold", empty=-10.0)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.policy),
        processing_class=AutoTokenizer.from_pretrained(options.policy),
        train_dataset=people(options.data),
        reward_funcs=[reward, gold],
        args=GRPOConfig(
            output_dir=options.out,
            # The gold reward has no weight: nobody trains on it, and where it falls while the reward rises, the reward
            # is being hacked. Both means are logged as rewards/reward/mean and rewards/gold/mean.
            reward_weights=[1.0, 0.0],
            per_device_train_batch_size=options.rollouts,
            num_generations=options.generations,
            max_completion_length=options.new_tokens,
            max_steps=options.steps,
            learning_rate=1e-6,
            logging_steps=1,
            log_completions=options.keep_rollouts,
            save_strategy="no",
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            bf16=torch.cuda.is_available(),
        ),
    )
    trainer.train()
    if trainer.is_world_process_zero():
        logged = [row for row in trainer.state.log_history if "rewards/gold/mean" in row]
        (Path(options.out) / "rewards.json").write_text(json.dumps(logged, indent=1))


if __name__ == "__main__":
    main()
