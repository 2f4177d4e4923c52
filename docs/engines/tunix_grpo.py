"""GRPO by tunix (JAX, TPU pods) for people: a personalised reward, and a gold reward that only watches.

    prb serve REWARD_MODEL --port 8000
    prb serve GOLD_MODEL --port 8001
    python docs/engines/tunix_grpo.py --policy Qwen/Qwen3-0.6B --data people.jsonl \
        --reward http://127.0.0.1:8000 --gold http://127.0.0.1:8001

A folder in place of a URL is opened on the learner's devices. The policy is a folder of Qwen 3 files.
Written for google-tunix 0.1.7 with jax 0.10.2 and flax 0.12.8.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import optax
from transformers import AutoTokenizer
from tunix.models.qwen3 import model as qwen3
from tunix.models.qwen3 import params as qwen3_files
from tunix.rl import rl_cluster as clusters
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

import prb_jax as prb


def load_policy(folder: Path, mesh: jax.sharding.Mesh) -> qwen3.Qwen3:
    given = json.loads((folder / "config.json").read_text())
    theta = given.get("rope_theta") or given["rope_parameters"]["rope_theta"]
    config = qwen3.ModelConfig(
        num_layers=given["num_hidden_layers"],
        vocab_size=given["vocab_size"],
        embed_dim=given["hidden_size"],
        hidden_dim=given["intermediate_size"],
        num_heads=given["num_attention_heads"],
        head_dim=given["head_dim"],
        num_kv_heads=given["num_key_value_heads"],
        rope_theta=theta,
        norm_eps=given["rms_norm_eps"],
        use_tied_embedding=given["tie_word_embeddings"],
    )
    return qwen3_files.create_model_from_safe_tensors(str(folder), config, mesh)


def batches(file: Path, tokenizer: AutoTokenizer, size: int, longest: int) -> Iterator[dict[str, np.ndarray]]:
    """Columns as arrays, which tunix repeats for the generations: the prompt as the policy sees it, and the person.

    The reward reads the column `question`: the prompt is in the policy's template.
    """
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": row["question"]}], tokenize=False, add_generation_prompt=True
        )
        for row in rows
    ]
    fits = [k for k, prompt in enumerate(prompts) if len(tokenizer.encode(prompt)) <= longest]
    for start in range(0, len(fits) - size + 1, size):
        part = fits[start : start + size]
        profiles = np.empty(size, object)  # an array of lists: one list a row, however many posts it has
        profiles[:] = [rows[k].get("profile") or [] for k in part]
        yield {
            "prompts": np.array([prompts[k] for k in part]),
            "question": np.array([rows[k]["question"] for k in part]),
            "user_id": np.array([rows[k]["user_id"] for k in part]),
            "profile": profiles,
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--reward", required=True)
    parser.add_argument("--gold", required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--prompts", type=int, default=8, help="of a step")
    parser.add_argument("--generations", type=int, default=8, help="of a prompt")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--rollouts", type=Path, help="a file that keeps each step's rollouts and rewards")
    options = parser.parse_args()

    devices = jax.device_count()
    mesh = jax.make_mesh((devices, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    tokenizer = AutoTokenizer.from_pretrained(options.policy)
    with mesh:
        policy, reference = load_policy(options.policy, mesh), load_policy(options.policy, mesh)
        cluster = clusters.RLCluster(
            actor=policy,
            reference=reference,
            tokenizer=tokenizer,
            cluster_config=clusters.ClusterConfig(
                role_to_mesh=dict.fromkeys(
                    (clusters.Role.ACTOR, clusters.Role.REFERENCE, clusters.Role.ROLLOUT), mesh
                ),
                training_config=clusters.RLTrainingConfig(
                    actor_optimizer=optax.adamw(1e-6),
                    eval_every_n_steps=options.steps + 1,
                    max_steps=options.steps,
                    mini_batch_size=options.prompts,
                    train_micro_batch_size=options.prompts,
                ),
                rollout_config=RolloutConfig(
                    max_tokens_to_generate=options.new_tokens,
                    max_prompt_length=options.prompt_tokens,
                    kv_cache_size=options.prompt_tokens + options.new_tokens + 16,
                    temperature=1.0,
                ),
            ),
        )

    def open_reward(name):
        """A server's reward; or the reward of a folder, whose model then shares the learner's devices."""
        # an empty completion has no score of the model: it is worth less than any other here
        return prb.reward_fn(name, empty=-10.0, mesh=None if "://" in name else mesh)

    reward, gold = open_reward(options.reward), open_reward(options.gold)

    def watch(prompts, completions, rewards, advantages, **columns):
        """The gold reward of the same rollouts: trained on by nobody, it shows when the reward is being hacked."""
        held_out = gold(prompts=prompts, completions=completions, **columns)
        if options.rollouts:
            kept = {"question": columns["question"].tolist(), "text": list(completions)}
            kept |= {"reward": np.asarray(rewards).tolist(), "gold": held_out}
            with options.rollouts.open("a") as file:
                file.write(json.dumps(kept) + "\n")
        print(f"reward {np.mean(rewards):.4f}  gold {np.mean(held_out):.4f}", flush=True)
        return {"gold/mean": (np.mean(held_out), np.mean)}

    learner = GRPOLearner(
        rl_cluster=cluster,
        algo_config=GRPOConfig(num_generations=options.generations, beta=0.04),
        reward_fns=[reward],
        metric_fns=[watch],
    )
    learner.train(batches(options.data, tokenizer, options.prompts, options.prompt_tokens))


if __name__ == "__main__":
    main()
