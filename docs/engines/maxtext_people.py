"""GRPO by MaxText (JAX, TPU pods) for people: data that keep the person, and a reward that reads them.

MaxText's own `process_data` keeps the columns `question` and `answer`. The one of this file keeps `user_id` and
`profile` too, and the trainer hands every column to the rewards:

    export PRB_REWARD=http://127.0.0.1:8000
    python -m maxtext.trainers.post_train.rl.train_rl maxtext/configs/post_train/rl.yml \\
        dataset_name=people hf_train_files=people.parquet num_test_batches=0 \\
        dataset_processor_path=docs/engines/maxtext_people.py \\
        reward_functions_path=docs/engines/maxtext_people.py reward_functions=reward ...

Written for MaxText 0.2.5. The data are a parquet file with the columns `question`, `user_id` and `profile`.
"""

import json
import os
from typing import Any

import prb_jax as prb


def process_data(
    dataset_name: str, model_tokenizer: Any, template_config: Any, tmvp_config: Any, x: dict[str, Any]
) -> dict[str, str]:
    """A row as texts, which grain can batch: the profile is JSON, which the reward reads."""
    messages = [{"role": "user", "content": x["question"]}]
    return {
        "prompts": model_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True),
        "question": x["question"],
        "answer": "[]",
        "user_id": str(x["user_id"]),
        "profile": json.dumps(x.get("profile") or []),
    }


reward = prb.reward_fn(os.environ["PRB_REWARD"], name="reward", empty=-10.0, require=("user_id",))
