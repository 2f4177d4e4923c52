"""Implicit rewards of a policy, against log-probabilities that transformers computes of each conversation alone."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

import prb_jax as prb
from prb_jax.cli import main
from prb_jax.scoring.implicit import ImplicitRewards
from prb_jax.serving.item_scorer import comparison_scores
from prb_jax.serving.items import ChatItem
from prb_jax.serving.reward_fn import reward_fn
from prb_jax.text.view import ViewOptions
from tests.sweeps import sweep
from tests.tiny_policies import write_policy

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3")
POSTS = [{"id": "p", "category": "food", "text": "I drink black tea and nothing else."}]
COMPARISONS = [
    prb.Comparison(
        id="1", question="Tea?", responses=["yes", "yes, a lot"], labels=[1.0, 0.0], profile=POSTS
    ),
    prb.Comparison(
        id="2", question="And bread?", responses=["here", "b", "there it is"], labels=[0.0, 1.0, 0.5]
    ),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A policy and its reference, each with transformers' model."""
    folder = tmp_path_factory.mktemp("models")
    return {
        name: (folder / name, write_policy(folder / name, "llama", seed=seed))
        for name, seed in (("policy", 1), ("reference", 2))
    }


def logprobs(model, rm):
    """The log-probabilities of each response's tokens, end of turn included, from the text of its conversation."""
    import torch

    found = []
    for comparison, tree in zip(
        COMPARISONS, rm.reader.encode(COMPARISONS, view=rm.reader.view(ViewOptions())), strict=True
    ):
        for k, response in enumerate(comparison.responses):
            ids = tree.sequence(k).astype(np.int64)
            text = rm.tokenizer.tokenizer.decode(ids)
            tail = text[text.rindex(response) :]
            assert tail != response  # the end of the turn
            count = len(rm.tokenizer.tokenizer(tail, add_special_tokens=False)["input_ids"])
            with torch.inference_mode():
                logits = model(torch.tensor(ids[None])).logits[0].double().log_softmax(-1).numpy()
            found.append(logits[np.arange(len(ids) - 1), ids[1:]][-count:])
    return found


@pytest.mark.parametrize("family", sweep(FAMILIES, few=[5]))
def test_rewards_are_those_of_transformers(family, tmp_path):
    models = [
        write_policy(tmp_path / name, family, seed=seed) for name, seed in (("policy", 1), ("reference", 2))
    ]
    rm = prb.load(tmp_path / "policy", reference=tmp_path / "reference", beta=0.3)
    each = [logprobs(model, rm) for model in models]
    expected = [0.3 * (policy.sum() - reference.sum()) for policy, reference in zip(*each, strict=True)]
    np.testing.assert_allclose(np.concatenate(rm.score(COMPARISONS)), expected, atol=2e-5)


def test_without_a_reference_they_are_the_sum_the_average_or_the_norm(models):
    policy, model = models["policy"]
    rm = prb.load(policy, reference_free=True)
    each = logprobs(model, rm)
    rules = {"sum": np.sum, "average": np.mean, "norm": lambda values: -np.linalg.norm(values)}
    for name, rule in rules.items():
        rm = prb.load(policy, reference_free=True, beta=1.0, logprobs=name)
        np.testing.assert_allclose(
            np.concatenate(rm.score(COMPARISONS)), [rule(one) for one in each], atol=2e-5
        )


def test_a_reward_does_not_depend_on_the_other_responses_or_the_batch(models):
    rm = prb.load(models["policy"][0], reference=models["reference"][0])
    together = rm.score(COMPARISONS)
    for comparison, scores in zip(COMPARISONS, together, strict=True):
        alone = [
            rm.reward(comparison.question, one, profile=comparison.profile) for one in comparison.responses
        ]
        np.testing.assert_allclose(alone, scores, atol=1e-5)
    many = COMPARISONS * 20  # equal beginnings and equal responses share their tokens
    for scores, expected in zip(rm.score(many, batch_tokens=256), together * 20, strict=True):
        np.testing.assert_allclose(scores, expected, atol=1e-5)
    assert isinstance(rm, ImplicitRewards)
    assert prb.load(models["policy"][0], reference=models["policy"][0]).score(COMPARISONS[0]).tolist() == [
        0.0,
        0.0,
    ]


def test_the_command_line_evaluates_and_records_both_models(models, tmp_path):
    (policy, _), (reference, _) = models["policy"], models["reference"]
    expected = np.concatenate(prb.load(policy, reference=reference, beta=0.5).score(COMPARISONS))
    data, out = tmp_path / "pairs.jsonl", tmp_path / "run"
    rows = [
        {"id": one.id, "question": one.question, "responses": list(one.responses), "labels": list(one.labels)}
        | ({"profile": POSTS} if one.profile else {})
        for one in COMPARISONS
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        "--reference",
        str(reference),
        "--beta",
        "0.5",
        "--data",
        str(data),
        "--out",
        str(out),
        "--no-progress",
    ]
    assert main(["evaluate", str(policy), *words]) == 0
    written = [json.loads(line)["scores"] for line in (out / "scores.jsonl").read_text().splitlines()]
    np.testing.assert_allclose(np.concatenate(written), expected, atol=1e-5)
    recorded = json.loads((out / "run.json").read_text())["inputs"]["model"]
    assert (recorded["beta"], recorded["logprobs"], recorded["readout"]) == (0.5, "sum", "implicit")
    assert {"files", "revision"} <= recorded["reference"].keys()
    held = json.loads((out / "summary.json").read_text())["implicit"]["bytes_held"]
    assert held["policy"] == held["reference"] > 0


def test_data_without_profiles_have_no_blind_control(models, tmp_path):
    rm = prb.load(models["policy"][0], reference_free=True)
    named = [replace(one, profile=(), user_id=f"u{one.id}") for one in COMPARISONS]
    for data, controls in ((named, set()), (COMPARISONS, {"blind"})):
        out = tmp_path / str(len(controls))
        assert prb.evaluate(rm, data, out=out, progress=False).summary.get("controls", {}).keys() == controls
        assert (out / "controls").exists() == bool(controls)
    with pytest.raises(prb.RunError, match="controls=blind: the model sees no user information"):
        prb.evaluate(rm, named, controls="blind", progress=False)


def test_a_loaded_model_rewards_what_trainers_write(models):
    rm = prb.load(models["policy"][0], reference=models["reference"][0])
    rewards = reward_fn(rm)(prompts=["Tea?"] * 2, completions=["yes", "no"])
    expected = [rm.reward("Tea?", one) for one in ("yes", "no")]
    np.testing.assert_allclose(rewards, expected, atol=1e-5)


def test_a_served_reward_counts_the_tokens_of_each_conversation(models):
    rm = prb.load(models["policy"][0], reference_free=True)
    score, _ = comparison_scores(rm, ViewOptions())
    items = [ChatItem(COMPARISONS[1].prompt, text) for text in COMPARISONS[1].responses]
    view = rm.reader.view(ViewOptions())
    (tree,) = rm.reader.encode(COMPARISONS[1:], view=view)
    assert [one.tokens for one in score(items)] == [len(tree.sequence(k)) for k in range(3)]


def test_an_adapter_is_a_policy_and_its_base_the_reference(models, tmp_path):
    peft = pytest.importorskip("peft")
    import torch

    base, model = models["reference"]
    adapted = peft.get_peft_model(
        type(model).from_pretrained(base),
        peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "up_proj"]),
    )
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    adapted.save_pretrained(tmp_path / "adapter")
    rm = prb.load(tmp_path / "adapter", reference=base, beta=1.0)
    each = [logprobs(one, rm) for one in (adapted.eval(), model)]
    expected = [policy.sum() - reference.sum() for policy, reference in zip(*each, strict=True)]
    np.testing.assert_allclose(np.concatenate(rm.score(COMPARISONS)), expected, atol=3e-5)


def test_what_does_not_go_together_is_refused(models, tmp_path):
    (policy, _), (reference, _) = models["policy"], models["reference"]
    refused = {
        "require --reference BASE or --reference-free": {"beta": 2.0},
        "expected only one of --reference and --reference-free": {
            "reference": reference,
            "reference_free": True,
        },
        "logprobs: average is for --reference-free": {"reference": reference, "logprobs": "average"},
        "beta: expected a number above 0, found 0": {"reference": reference, "beta": 0},
        "beta: expected a number above 0, found -1.0": {"reference": reference, "beta": -1.0},
        "beta: expected a number above 0, found nan": {"reference_free": True, "beta": float("nan")},
        "beta: expected a number above 0, found inf": {"reference": reference, "beta": float("inf")},
        "has no head to read": {"reference": reference, "readout": "linear"},
    }
    for message, options in refused.items():
        with pytest.raises(prb.RunError, match=message):
            prb.load(policy, **options)
    with pytest.raises(prb.RunError, match="reference"):
        prb.load("baseline:length", reference=reference)
    rm = prb.load(policy, reference=reference)
    with pytest.raises(prb.DataError, match="protocol paper: reads reward models with a head"):
        prb.evaluate(rm, COMPARISONS, protocol="paper", progress=False)

    other = shutil.copytree(reference, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    one, two = list(vocabulary)[-2:]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(prb.CheckpointError, match="its tokenizer is another one than the policy's"):
        prb.load(policy, reference=other)


def test_a_conversation_that_is_too_long_for_the_reference_is_refused(models, tmp_path):
    short = shutil.copytree(models["reference"][0], tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16}))
    rm = prb.load(models["policy"][0], reference=short)
    with pytest.raises(prb.DataError, match="16"):
        rm.score(COMPARISONS)


def test_new_input_embeddings_beside_tied_output_embeddings_are_refused(tmp_path):
    peft = pytest.importorskip("peft")

    model = write_policy(tmp_path / "base", "llama", tie_word_embeddings=True)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    peft.get_peft_model(type(model).from_pretrained(tmp_path / "base"), lora).save_pretrained(
        tmp_path / "adapter"
    )
    with pytest.raises(prb.CheckpointError, match="the base ties its output embeddings to it"):
        prb.load(tmp_path / "adapter", reference=tmp_path / "base")
