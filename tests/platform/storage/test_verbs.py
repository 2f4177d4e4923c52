"""Every verb that opens a model, and those that read its runs: inputs and outputs at URLs, continued elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import prb_jax as prb
from prb_jax import cli
from prb_jax.errors import RunError
from prb_jax.serving import serve
from tests.behaviour.judges.stand_in import stand_in
from tests.behaviour.rl.tiny import write_tiny_policy
from tests.building.engine import engine, record
from tests.platform.storage.stores import below, contents, put_folder
from tests.serving.test_trainers import PEOPLE
from tests.tiny_encoders import write_encoder
from tests.training.tiny import rows, write_causal_model, write_model, write_rows

VERBS = """
aspects {i}/policy --data {i}/pairs.jsonl --limit 3 --max-new-tokens 5 --out {o}/aspects
judge {i}/policy --data {i}/pairs.jsonl --limit 3 --min-mass 0 --out {o}/judge
guide {i}/policy --reward {i}/tiny --data {i}/pairs.jsonl --limit 3 --max-new-tokens 4 --out {o}/guide
sample {i}/policy --data {i}/pairs.jsonl --n 3 --max-new-tokens 6 --out {o}/sample
best-of-n --samples {o}/sample --rewards {i}/tiny baseline:length baseline:random --out {o}/best
best-of-n --samples {i}/texts.jsonl --data {i}/pairs.jsonl --rewards {i}/tiny --quality {i}/tiny --out {o}/best-of-texts
distil {o}/best --reward {i}/tiny --out {o}/distilled
policy-accuracy {i}/policy --rewards {i}/tiny baseline:length baseline:random --data {i}/pairs.jsonl --out {o}/accuracy
features {i}/bert --data {i}/people.jsonl --out {o}/features
personalise --data {i}/people.jsonl --backbone {o}/features --methods offset,bayes --shots 0,2 --out {o}/study
ask {o}/study/fitted/bayes --candidates {i}/people.jsonl --out {o}/questions.json
evaluate {o}/study/fitted/offset --data {i}/tests.jsonl --history {i}/history.jsonl --out {o}/fitted
ppo profile_in_prompt model={i}/lm data={i}/pairs.jsonl reward={i}/tiny steps=2 \
    rollout.n=2 rollout.max_new_tokens=4 batch.prompts=4 --out {o}/ppo
train {i}/train.py --out {o}/train
convert {o}/train {o}/converted
evaluate {o}/train --data {i}/pairs.jsonl --out {o}/trained
evaluate baseline:length --data {i}/pairs.jsonl --out {o}/length
evaluate baseline:random --data {i}/pairs.jsonl --out {o}/random
evaluate {i}/tiny --data {i}/pairs.jsonl --controls none --out {o}/tiny
push {o}/train org/name --evaluations {o}/trained --dry-run
correlate --scores {o}/tiny {o}/length {o}/random --behaviour {o}/best --draws 100 --out {o}/correlate
compare {o}/trained {o}/length --out {o}/compare
report {o}/trained {o}/length --out {o}/page.html
report {o}/train {o}/study --out {o}/curves.html
rank-profiles --encoder {i}/bert --data {i}/pairs.jsonl --out {o}/ranked.jsonl.gz
build endpoint data={i}/records.jsonl generator.endpoint={e} generator.name=writer \
    judge.endpoint={e} judge.name=judge writing.candidates=2 writing.least_words=30 product.formats=parquet \
    --relax overlap --relax blind-reward --relax length --relax style --relax style-histogram --relax blind-judge \
    --out {o}/build
inspect {o}/train --data {i}/pairs.jsonl
bench load {i}/tiny --json {o}/load.json
"""

# What lies at the end below each name of --out.
WRITTEN = """
aspects/aspects.jsonl judge/judgements.jsonl guide/samples.jsonl best/rewards.jsonl best-of-texts/summary.json
distilled/pairs.jsonl accuracy/rows.jsonl study/results.json questions.json fitted/scores.jsonl
ppo/model/model.safetensors train/model/model.safetensors converted/model.safetensors correlate/correlate.json
compare/compare.json page.html curves.html ranked.jsonl.gz build/public.jsonl load.json
"""


def two_texts(pairs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Two responses to the question of each pair."""
    return [{"id": pair["id"], "sample": n, "text": "soup " * (n + 1)} for pair in pairs for n in range(2)]


def write_inputs(folder: Path, url: str) -> None:
    write_model(folder / "tiny")
    write_causal_model(folder / "policy")
    write_tiny_policy(folder / "lm")
    write_encoder(folder / "bert")
    files = {
        "people": PEOPLE,
        "history": [row for row in PEOPLE if int(row["id"][-1]) < 3],
        "tests": [row for row in PEOPLE if int(row["id"][-1]) >= 3],
        "pairs": rows(24, users=4),
        "texts": two_texts(rows(24)),
        "records": [record(number) for number in range(24)],
    }
    for name, lines in files.items():
        write_rows(folder / f"{name}.jsonl", lines)
    config = {"model": f"{url}/tiny", "data": f"{url}/pairs.jsonl", "steps": 2}
    (folder / "train.py").write_text(f"def get_config():\n    return {config!r}\n")


@pytest.mark.slow
def test_verbs_from_and_to_urls(tmp_path, store, monkeypatch, capsys):
    write_inputs(tmp_path / "in", "gs://b/in")
    put_folder(tmp_path / "in", "gs://b/in")
    reply, problems = engine(), []
    with stand_in(lambda body, tries: reply(body), whole=True) as endpoint:
        for line in VERBS.strip().splitlines():
            words = line.format(i="gs://b/in", o="gs://b/out", e=endpoint.url).split()
            status = cli.main(words)
            shown = capsys.readouterr()
            local = [text for text in (shown.out + shown.err).splitlines() if str(tmp_path) in text]
            if status or local:
                problems.append((line, status, local, shown.err[-2000:] if status else ""))
    assert not problems
    written = below("gs://b/out")
    assert not set(WRITTEN.split()) - written.keys()
    assert not [name for name in written if ".prb/" in name]
    named = {name for name, data in written.items() if str(tmp_path).encode() in data}
    assert {Path(name).name for name in named} <= {"commit_success.txt"}  # of Orbax


def test_a_reward_at_a_url_is_known_by_it_on_another_machine(tmp_path, store, monkeypatch, capsys):
    given, data = tmp_path / "in", rows(4, users=2)
    write_model(given / "tiny")
    write_rows(given / "pairs.jsonl", data)
    texts = two_texts(data)
    write_rows(given / "texts.jsonl", texts)
    write_rows(given / "quality.jsonl", [text | {"quality": text["sample"]} for text in texts])
    put_folder(given, "gs://b")
    best = "best-of-n --samples gs://b/texts.jsonl --data gs://b/pairs.jsonl --rewards gs://b/tiny baseline:length"
    best += " --quality gs://b/quality.jsonl --out gs://b/best"
    assert cli.main(best.split()) == 0, capsys.readouterr().err
    first = below("gs://b/best")
    lines = [json.loads(line) for line in first["rewards.jsonl"].splitlines()]
    assert {line["scorer"] for line in lines} == {"gs://b/tiny", "baseline:length"}

    copies = tmp_path / "another machine"
    monkeypatch.setenv("PRB_JAX_STORAGE", str(copies))
    distil = "distil gs://b/best --reward gs://b/tiny --data gs://b/pairs.jsonl --out gs://b/pairs"
    assert cli.main(distil.split()) == 0, capsys.readouterr().err
    pairs = contents()["/b/pairs/pairs.jsonl"]
    assert {json.loads(line)["meta"]["reward"] for line in pairs.splitlines()} == {"gs://b/tiny"}
    prb.distil("gs://b/best", reward="gs://b/tiny", data=["gs://b/pairs.jsonl"], out="gs://b/python")
    assert contents()["/b/python/pairs.jsonl"] == pairs
    assert not list(copies.glob("inputs/*/tiny"))  # a name needs no copy
    assert cli.main(best.split()) == 0, capsys.readouterr().err
    for name in ("rewards.jsonl", "summary.json"):
        assert below("gs://b/best")[name] == first[name]


def test_a_model_at_a_url_is_served(tmp_path, store, monkeypatch):
    put_folder(write_model(tmp_path / "in" / "tiny"), "gs://b/tiny")
    opened: list[Any] = []
    monkeypatch.setattr(serve, "serve", lambda model, **options: opened.append(model))
    assert cli.main(["serve", "gs://b/tiny", "--port", "0"]) == 0
    assert (Path(opened[0]) / "model.safetensors").exists()
    comparison = prb.Comparison(id="1", question="Tea?", responses=["walk"])
    served, local = prb.reward_fn("gs://b/tiny"), prb.load(tmp_path / "in" / "tiny")
    given = {"prompts": ["Tea?"], "completions": ["walk"]}
    assert served(**given) == pytest.approx(local.score(comparison).tolist(), abs=1e-5)


def test_what_needs_a_file_system_is_refused(tmp_path, store, capsys):
    (tmp_path / "in").mkdir()
    write_rows(tmp_path / "in" / "records.jsonl", [record(0)])
    put_folder(tmp_path / "in", "gs://b")
    message = "cache=gs://b/cache: several builds share the cache as files: expected a local folder"
    settings = ["data=gs://b/records.jsonl", "generator.endpoint=http://127.0.0.1:9/v1", "generator.name=x"]
    words = ["build", "endpoint", *settings, "cache=gs://b/cache", "--out", str(tmp_path / "out")]
    assert cli.main(words) == 2
    assert capsys.readouterr().err == f"prb: error: {message}\n"
    (tmp_path / "build.py").write_text("def get_config():\n    return {'cache': 'gs://b/cache'}\n")
    with pytest.raises(RunError, match=message):
        prb.build(tmp_path / "build.py", out=tmp_path / "out", overrides=settings)
