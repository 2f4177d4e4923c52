"""`prb.reward_fn` in the call shapes of TRL, verl and AReaL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import prb_jax as prb
from tests.scoring.records import write_model

QUESTION, ANSWERS = "Tea or coffee?", ["Tea, of course.", "Coffee.", "Tea, of course."]
POSTS = [{"id": "1", "category": "food", "text": "Coffee keeps me awake."}]
MESSAGES = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> prb.RewardModel:
    return prb.load(write_model(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=1))


def test_each_trainer_s_call_gives_the_model_s_rewards(model: prb.RewardModel) -> None:
    def offline(posts: Any = ()) -> Any:
        given = prb.Comparison(id="1", question=QUESTION, responses=ANSWERS, profile=posts)
        return pytest.approx(model.score(given).tolist(), abs=1e-5)

    reward = prb.reward_fn(model, batch_tokens=512)
    common: dict[str, Any] = {"completion_ids": [[1]] * 3, "trainer_state": None, "chosen": ["x"] * 3}
    assert reward(prompts=[QUESTION] * 3, completions=ANSWERS, **common) == offline()
    spoken = [[{"role": "assistant", "content": answer}] for answer in ANSWERS]
    profiles = {"profile": [POSTS] * 3, "user_id": ["u"] * 3}
    assert reward(prompts=[MESSAGES] * 3, completions=spoken, **profiles, **common) == offline(POSTS)

    def verl(answer: str, **extra: Any) -> float:
        return reward(data_source="d", solution_str=answer, ground_truth=None, extra_info=extra)

    assert [verl(answer, query=QUESTION, index=3) for answer in ANSWERS] == offline()
    assert [verl(answer, prompt=MESSAGES, profile=POSTS) for answer in ANSWERS] == offline(POSTS)
    as_text = model.reward(QUESTION + "Post 1: tea", ANSWERS[0])
    assert verl(ANSWERS[0], query=QUESTION, profile="Post 1: tea") == pytest.approx(as_text, abs=1e-5)
    areal = [reward(QUESTION, answer, [1], [2], profile=POSTS, task_id=7) for answer in ANSWERS]
    assert areal == offline(POSTS)


def test_there_is_no_default_reward(model: prb.RewardModel) -> None:
    reward = prb.reward_fn(model, batch_tokens=512, max_length=64)
    for given, message in (
        ({"prompts": [QUESTION], "completions": [""]}, "completion 0 is empty"),
        ({"prompts": [QUESTION] * 2, "completions": ["a"]}, "one for each of the 2 prompts"),
        ({"prompts": [QUESTION] * 2, "completions": ["a", "tea " * 200]}, "completion 1: "),
        ({"solution_str": "a", "extra_info": {"index": 1}}, "expected the question as query or question or prompt"),
        ({"solution_str": "a", "extra_info": None}, "extra_info"),
        ({"texts": ["a"]}, "found texts"),
        ({"prompts": [MESSAGES], "completions": [MESSAGES]}, "the assistant's message at the end"),
    ):  # fmt: skip
        with pytest.raises(prb.DataError, match=message):
            reward(**given)
    kind = prb.reward_fn(model, batch_tokens=512, empty=-3.0)
    found = kind(prompts=[QUESTION] * 2, completions=["", ANSWERS[1]])
    assert found == [-3.0, pytest.approx(model.reward(QUESTION, ANSWERS[1]), abs=1e-5)]


def test_trl_trains_with_it(model: prb.RewardModel, tmp_path: Path) -> None:
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(model.name)
    config = Qwen2Config(
        vocab_size=400, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    rows = [{"prompt": MESSAGES, "profile": POSTS, "user_id": "u"}] * 4
    seen: list[Any] = []
    reward = prb.reward_fn(model, batch_tokens=512, empty=0.0)

    def watched(**given: Any) -> list[float]:
        found = reward(**given)
        seen.append((given["prompts"], given["completions"], given["profile"], found))
        return found

    arguments = trl.GRPOConfig(
        output_dir=str(tmp_path / "out"), per_device_train_batch_size=2, num_generations=2, max_completion_length=8,
        max_steps=2, report_to=[], use_cpu=True, bf16=False, logging_steps=1,
        save_strategy="no", temperature=1.0,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=Qwen2ForCausalLM(config),
        reward_funcs=[reward, watched],
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    logged = [row for row in trainer.state.log_history if "rewards/prb_reward/mean" in row]
    assert len(logged) == 2
    for (prompts, completions, profiles, found), row in zip(seen, logged, strict=True):
        for prompt, completion, profile, value in zip(prompts, completions, profiles, found, strict=True):
            text = completion[0]["content"]
            expected = model.reward(prompt, text, profile=profile) if text else 0.0
            assert value == pytest.approx(expected, abs=1e-5)
        assert row["rewards/prb_reward/mean"] == pytest.approx(sum(found) / len(found), abs=1e-5)
