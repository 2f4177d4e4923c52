"""`prb sample` and `Policy.sample`: what is written, continued, refused; a sample depends on nothing beside it."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prb_jax as prb
from prb_jax import cli
from prb_jax.behaviour.generation.rules import SampleOptions
from prb_jax.behaviour.generation.sample import read_samples, sample_data
from prb_jax.errors import RunError
from prb_jax.models.config.decoder import read_raw_config
from tests.behaviour.generation.mesh_samples import PROMPTS, SAMPLING, tokens
from tests.behaviour.judges.stand_in import completion, stand_in
from tests.json_lines import read_lines, write_lines
from tests.plain_process import ROOT, plain_environment
from tests.tiny_models import write_model_without_torch
from tests.tiny_policies import write_policy

END = 3  # <|end|> of the tiny tokenizer
OUT_OF_RANGE = {
    "temperature": (-1, float("nan")),
    "top_k": (-1, 1.5),
    "top_p": (0, 1.1),
    "min_p": (-0.1,),
    "repetition_penalty": (0,),
}
OPTIONS = SampleOptions(n=3, temperature=0.9, top_k=60, max_new_tokens=12, seed=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    write_policy(path, "qwen3", eos=END, num_hidden_layers=2, max_position_embeddings=300)
    return path


@pytest.fixture(scope="module")
def policy(folder) -> prb.Policy:
    return prb.load_policy(folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    posts = [{"id": str(k), "text": f"I like walking number {k}, and vegetables."} for k in range(14)]
    rows = [
        {"id": f"q{k}", "user_id": "u", "question": f"What should I cook {'tonight ' * k}?", "chosen": "Tea.",
         "rejected": "No.", "profile": posts}
        for k in range(11)
    ]  # fmt: skip
    return write_lines(tmp_path_factory.mktemp("data") / "pairs.jsonl", rows)


def test_a_run_is_written_and_another_is_refused(folder, data, policy, tmp_path, capsys):
    out = tmp_path / "run"
    command = [
        "sample", str(folder), "--data", data, "--n", "3", "--temperature", "0.9", "--top-k", "60",
        "--max-new-tokens", "12", "--seed", "5", "--rows", "6", "--out", str(out), "--no-progress",
    ]  # fmt: skip
    assert cli.main(command) == 0
    assert "11 prompts, 3 samples of each" in capsys.readouterr().out
    rows = read_lines(out / "samples.jsonl")
    assert [(row["id"], row["sample"]) for row in rows] == [(f"q{k}", s) for k in range(11) for s in range(3)]
    assert list(rows[0]) == [
        "id", "sample", "prompt_token_ids", "token_ids", "text", "logprob", "sampled_logprob", "finish"
    ]  # fmt: skip
    summary = json.loads((out / "summary.json").read_text())
    assert summary["finish"] == Counter(row["finish"] for row in rows)
    assert summary["posts_dropped"]["prompts"] > 0  # 300 tokens hold some of the posts only
    for row in rows:
        assert len(row["prompt_token_ids"]) <= 300 - 12
        assert (row["token_ids"][-1] == END) == (row["finish"] == "stop")
        assert END not in row["token_ids"][:-1]
        assert row["text"] == policy.decode(np.asarray(row["token_ids"]))
    prompt = policy.decode(np.asarray(rows[0]["prompt_token_ids"]))
    assert prompt.endswith("What should I cook ?\nassistant\n")  # the assistant's turn is open
    assert "walking number 0" in prompt
    assert "Tea." not in prompt

    # Other batches: the same texts.
    again = sample_data(policy, data, out=tmp_path / "again", options=OPTIONS, rows=2, progress=False)
    texts = [row["token_ids"] for row in read_lines(again.out / "samples.jsonl")]
    assert texts == [row["token_ids"] for row in rows]
    assert cli.main([*command, "--min-p", "0.5"]) == 2
    assert "sampling.min_p: 0.0 -> 0.5" in capsys.readouterr().err


def test_a_sample_depends_on_its_prompt_place_and_seed_alone(policy):
    drawn = tokens(policy.sample(PROMPTS, **SAMPLING))
    assert len({tuple(ids) for samples in drawn for ids in samples}) == 12  # all different
    others = [[7, 8], PROMPTS[1], [9] * 60, PROMPTS[3]]
    assert tokens(policy.sample(others, **SAMPLING))[1::2] == drawn[1::2]
    assert tokens(policy.sample(PROMPTS, **(SAMPLING | {"seed": 10}))) != drawn


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["default", "fsdp=2,tensor=2", "data=2,sequence=2"])
def test_samples_do_not_depend_on_the_mesh(folder, policy, tmp_path, mesh):
    command = [
        sys.executable,
        "-m",
        "tests.behaviour.generation.mesh_samples",
        folder,
        tmp_path / "out.json",
        mesh,
    ]
    settings = {"cwd": ROOT, "env": plain_environment(), "timeout": 600}
    done = subprocess.run(command, capture_output=True, text=True, **settings)
    assert done.returncode == 0, done.stderr
    on_mesh = json.loads((tmp_path / "out.json").read_text())
    assert on_mesh["samples"] == tokens(policy.sample(PROMPTS, **SAMPLING))
    # The prompts of a part are taken from its own stream, but where devices share the columns of one.
    assert on_mesh["moved"] == [] or "sequence" in mesh
    weights = policy.params["layers"]["q"][0].size  # of the smallest matrix, but for keys and values
    if mesh == "default":
        # Two kv heads: two devices split them, two have copies. No weights and no caches are gathered.
        assert on_mesh["axes"] == {"data": 2, "tensor": 2}
        assert max(on_mesh["gathered"], default=0) < weights
    elif "fsdp" in mesh:
        assert max(on_mesh["gathered"]) >= weights


def test_texts_conversations_and_comparisons_are_prompts(policy):
    question = "What should I cook?"
    comparison = prb.Comparison(id="1", question=question, responses=["a", "b"])
    given = [question, [{"role": "user", "content": question}], comparison]
    samples = [sample for (sample,) in policy.sample(given, temperature=0, max_new_tokens=4)]
    ids = [sample.prompt_token_ids.tolist() for sample in samples]
    assert ids[0] == ids[1] == ids[2]
    assert samples[0].text == samples[2].text
    assert samples[0].logprob == pytest.approx(float(samples[0].logprobs.sum()))


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([5] * 296, {}, r"prompt 0: has 296 tokens; expected at most 292"),
        ([400], {}, r"token ids of 0 to 399, found the id 400"),
        ([], {}, r"prompt 0: expected a text"),
        ([5], {"max_new_tokens": 300}, r"max_new_tokens: expected less than the 300 tokens"),
        ([5], {"temperature": 0.0, "n": 2}, r"n: expected 1 at temperature 0, found 2"),
        ([5], {"stop": [""]}, r"stop: expected texts"),
        ([5], {"stop_ids": [400]}, r"stop_ids: expected ids of 0 to 399, found 400"),
        *(
            ([5], {rule: value}, f"^{rule}: expected")
            for rule, values in OUT_OF_RANGE.items()
            for value in values
        ),
    ],
)
def test_bad_input_is_one_clear_error(policy, prompt, options, message):
    with pytest.raises(prb.DataError, match=message):
        policy.sample([prompt], **({"max_new_tokens": 8} | options))


def test_a_policy_needs_a_causal_head_and_a_stop(tmp_path, folder):
    reward = write_model_without_torch(tmp_path / "reward", "qwen3")
    message = "architectures: expected 'Qwen3ForCausalLM', found 'Qwen3ForSeq"
    with pytest.raises(prb.CheckpointError, match=message):
        prb.load_policy(reward)
    with pytest.raises(prb.CheckpointError, match="is a causal language model, not a reward model"):
        prb.load(folder)
    endless = shutil.copytree(folder, tmp_path / "endless")
    (endless / "generation_config.json").unlink(missing_ok=True)
    (endless / "config.json").write_text(json.dumps(read_raw_config(folder) | {"eos_token_id": None}))
    settings = json.loads((endless / "tokenizer_config.json").read_text())
    settings["eos_token"] = None
    (endless / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(prb.DataError, match="no stop token"):
        prb.load_policy(endless).sample([[5]], max_new_tokens=2)


def test_a_template_without_an_opened_turn_ends_where_the_answer_begins(folder):
    policy = prb.load_policy(folder, chat_template="plain")
    comparison = prb.Comparison(id="1", question="What should I cook?", responses=["a", "b"])
    (prompt,) = policy.encode([comparison], profile_posts=0, limit=100)
    text = policy.tokenizer.tokenizer.decode(prompt.ids)
    assert text == "<|bos|>User: What should I cook?\n\nAssistant: "


def test_an_endpoint_draws_into_the_same_folder_and_continues(tmp_path):
    """A run whose endpoint refuses half way is continued by the same command: nothing is asked twice."""
    rows = [
        {"id": f"q{k}", "user_id": "u", "question": f"Why {k}?", "chosen": "a", "rejected": "b",
         "profile": [{"id": "1", "category": "", "text": "I like tea."}]}
        for k in range(5)
    ]  # fmt: skip
    data, broken = write_lines(tmp_path / "pairs.jsonl", rows), True

    def reply(body: Any, tries: int) -> Any:
        if broken and len(server.asked) > 9:
            return 404, b"gone", {}
        return 200, completion(f"{body['seed']} {body['messages'][-1]['content']}", finish_reason="stop"), {}

    with stand_in(reply, whole=True) as server:
        command = [
            "sample", "--endpoint", server.url, "--model", "m", "--data", data, "--n", "3", "--temperature", "0.7",
            "--top-p", "0.9", "--concurrency", "1", "--out", str(tmp_path / "run"), "--no-progress",
        ]  # fmt: skip
        assert cli.main(command) != 0
        assert len(read_lines(tmp_path / "run" / "samples.jsonl")) == 8
        broken, before = False, len(server.asked)
        assert cli.main(command) == 0
        assert len(server.asked) - before == 15 - 8
        bodies = [body for _, body in server.asked]
    assert {body["temperature"] for body in bodies} == {0.7}
    assert {body["top_p"] for body in bodies} == {0.9}
    assert not {"top_k", "min_p", "stop"} & bodies[0].keys()
    samples = read_samples(tmp_path / "run")
    assert list(samples) == [(f"q{k}", sample) for k in range(5) for sample in range(3)]
    assert len({row["text"] for row in samples.values()}) == 15
    for (name, _), row in samples.items():
        assert "I like tea." in row["text"]
        assert f"Why {name[1:]}?" in row["text"]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["tokens"], summary["prompt_tokens"], summary["finish"]) == (30, 50, {"stop": 15})
    assert summary["mean_logprob_per_token"] is summary["posts_dropped"] is None
    chosen = prb.best_of_n(tmp_path / "run", ["baseline:length"], out=tmp_path / "best", progress=False)
    assert chosen.summary["n"] == 5
    endpoint = prb.EndpointOptions(url="http://h", model="m")
    options, plain = SampleOptions(temperature=0.5), replace(endpoint, no_temperature=True)
    for given, message in (
        ({"rows": 3, "endpoint": endpoint}, "rows: decided by the server"),
        ({}, "expected either a MODEL, or --endpoint"),
        ({"endpoint": plain}, "--no-temperature: samples are drawn at temperature 0.5"),
    ):
        with pytest.raises(RunError, match=message):
            sample_data(None, data, out=tmp_path / "no", options=options, progress=False, **given)
