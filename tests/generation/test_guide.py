"""`prb guide`: weight 0 is the policy, a reward that loves one token forces it, and steps equal k forward passes."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest

import prb_jax as prb
from prb_jax import cli
from prb_jax.generation.guided import Guide
from prb_jax.generation.rules import SampleOptions
from prb_jax.generation.token_scores import why_other_tokenizer
from prb_jax.metrics.texts import corpus_bleu, text_figures
from prb_jax.scoring.reward_model import RewardModel
from prb_jax.text.view import ViewOptions
from prb_jax.trees.tree import Tree
from tests.json_lines import read_lines, write_lines
from tests.scoring.records import write_model
from tests.tiny_policies import write_policy

TOKENS, CANDIDATES = 6, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy, a reward model of another size with sliding windows, and three comparisons."""
    top = tmp_path_factory.mktemp("guide")
    write_policy(top / "policy", "qwen3", eos=3, num_hidden_layers=2)
    write_model(top / "rm", "gemma2", num_hidden_layers=2)
    rows = [
        {"id": f"q{k}", "user_id": f"u{k}", "question": "What should I cook" + " tonight" * k,
         "chosen": "A quick soup.", "rejected": "No.", "profile": [{"id": "p", "category": "", "text": "I like rice."}]}
        for k in range(3)
    ]  # fmt: skip
    write_lines(top / "pairs.jsonl", rows)
    return top


def drawn(policy: prb.Policy, guide: Guide, folder: Path, **options: float) -> list[list[int]]:
    """The token ids of every prompt's only guided sample."""
    comparisons = list(prb.read_comparisons(str(folder / "pairs.jsonl")))
    chosen = SampleOptions(**{"temperature": 0.0, "max_new_tokens": TOKENS, "stop_ids": ()} | options)  # pyright: ignore[reportArgumentType]
    prompts = policy.encode(comparisons, profile_posts=0, limit=200)
    found: dict[int, list[int]] = {}
    for batch in guide.checked(policy).draw(policy, comparisons, prompts, chosen, rows=2):
        found |= {one.prompt: one.tokens.tolist() for one in batch}
    return [found[place] for place in range(len(comparisons))]


def naive(policy: prb.Policy, model: RewardModel, folder: Path, weight: float) -> list[list[int]]:
    """The same by k forward passes a step: logits from scratch, and the reward of every candidate's whole sequence."""
    import jax
    import jax.numpy as jnp

    from prb_jax.models.decoder import decode_tree
    from prb_jax.models.decoder_layer import last_norm
    from prb_jax.text.tokenizer import encode_prompts
    from prb_jax.text.visible import visible

    comparisons = list(prb.read_comparisons(str(folder / "pairs.jsonl")))
    view = model.reader.view(ViewOptions())
    decode = jax.jit(functools.partial(decode_tree, config=policy.config, dtype=jnp.dtype(jnp.float32)))
    found = []
    for each in comparisons:
        prompt = encode_prompts(policy.tokenizer, [each.prompt])[0]
        messages = visible(each, profile_posts=view.profile_posts, protocol=view.protocol).prefix_messages
        shown = encode_prompts(model.tokenizer, [messages])[0]  # pyright: ignore[reportArgumentType]
        ids: list[int] = []
        for _ in range(TOKENS):
            so_far = np.asarray([*prompt, *ids], np.int32)
            batch = model.batch([Tree(so_far[:-1], (so_far[-1:],), (0,))])
            states = decode(policy.params, batch)
            state = states[0, batch.prefix.shape[1]]
            logits = policy.program.head.next_token(
                policy.params, last_norm(policy.params, state, policy.config)
            )
            best = np.argsort(-np.asarray(logits), kind="stable")[:CANDIDATES]
            trees = [
                Tree(np.asarray([*shown, *ids], np.int32), (np.asarray([v], np.int32),), (0,)) for v in best
            ]
            rewards = np.asarray(model.score_fn(model.params, model.batch(trees)))[: len(best), 0]
            logprobs = np.asarray(logits)[best] - np.logaddexp.reduce(np.asarray(logits, np.float64))
            ids.append(int(best[np.argmax(logprobs + weight * rewards)]))
        found.append(ids)
    return found


def test_guided_tokens(folder: Path) -> None:
    policy, model = prb.load_policy(folder / "policy"), prb.load(folder / "rm")
    comparisons = list(prb.read_comparisons(str(folder / "pairs.jsonl")))
    plain, alone = {"max_new_tokens": TOKENS, "stop_ids": (), "profile_posts": 0}, []
    for rules in ({"temperature": 0.0}, {"temperature": 0.9, "seed": 5}):
        samples = policy.sample(comparisons, **plain, **rules)
        alone.append(drawn(policy, Guide(model=model, weight=0.0, candidates=2), folder, **rules))
        assert alone[-1] == [own[0].token_ids.tolist() for own in samples]
    guided = drawn(policy, Guide(model=model, weight=1.5, candidates=CANDIDATES), folder)
    assert guided == naive(policy, model, folder, 1.5)
    assert guided != alone[0]


def test_a_reward_that_loves_one_token_forces_it(folder: Path) -> None:
    """Its embedding points where the head looks, and all layers are switched off."""
    policy, model = prb.load_policy(folder / "policy"), prb.load(folder / "rm")
    loved = 123
    head = np.asarray(model.params["score"])[:, 0]
    embed = np.array(model.params["embed"])
    embed[:] = -head
    embed[loved] = head
    silent = {name: np.zeros_like(leaf) for name, leaf in model.params["layers"].items()}
    own = {
        **model.params,
        "embed": embed,
        "layers": silent,
        "final_norm": np.zeros_like(model.params["final_norm"]),
    }
    lover = prb.RewardModel(**{**vars(model), "params": own})
    found = drawn(policy, Guide(model=lover, weight=1e4, candidates=policy.config.vocab_size), folder)
    assert found == [[loved] * TOKENS] * 3


def test_a_run_has_texts_and_figures(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, data = tmp_path / "out", str(folder / "pairs.jsonl")
    command = [
        "guide", str(folder / "policy"), "--reward", str(folder / "rm"), "--data", data, "--out", str(out),
        "--weight", "1.5", "--candidates", str(CANDIDATES), "--max-new-tokens", str(TOKENS), "--quality",
        "baseline:length", "--no-progress",
    ]  # fmt: skip
    assert cli.main(command) == 0
    shown = capsys.readouterr().out
    for figure in (
        "ROUGE-L F1, stemmed (0 to 1)",
        "BLEU of all texts together (0 to 100)",
        "quality: baseline:length",
    ):
        assert figure in shown
    summary, rows = json.loads((out / "summary.json").read_text()), read_lines(out / "samples.jsonl")
    assert (len(rows), summary["n"], summary["weight"]) == (3, 3, 1.5)
    headline, figure, quality = json.loads((out / "behaviour.json").read_text())["figures"]
    for name, shown in (("rouge1", headline), ("rougeL", figure)):
        expected = [text_figures(row["text"], "A quick soup.")[name] for row in rows]
        assert summary["text"][name]["value"] == pytest.approx(np.mean(expected))
        assert (shown["name"], sum(shown["sums"])) == (f"guided {name}", pytest.approx(sum(expected)))
    lengths = [len(row["text"]) for row in rows if row["text"].strip()]
    assert summary["quality"]["value"] == pytest.approx(np.mean(lengths))
    assert summary["quality"]["empty"] == len(rows) - len(lengths)
    assert (quality["name"], sum(quality["sums"]), sum(quality["counts"])) == (
        "guided quality", sum(lengths), len(lengths)
    )  # fmt: skip
    assert figure["counts"] == [1, 1, 1]
    assert (figure["label"], figure["policy"]) == (str(folder / "rm"), "Qwen3ForCausalLM")
    # the policy alone writes other texts, with the same figures, and no behaviour under a reward model
    options = SampleOptions(temperature=0.0, max_new_tokens=TOKENS)
    given = {"options": options, "progress": False}
    alone = prb.guide(folder / "policy", None, data, out=tmp_path / "alone", **given)  # pyright: ignore[reportArgumentType]
    assert alone.summary["text"].keys() == summary["text"].keys()
    assert "weight" not in alone.summary
    assert not (tmp_path / "alone" / "behaviour.json").exists()
    # best-of-n reads the folder as any other samples; another weight is another run
    assert [row["id"] for row in rows] == [comparison.id for comparison in prb.read_comparisons(data)]
    with pytest.raises(prb.RunError, match=r"guide\.weight: 1\.5 -> 2\.0"):
        prb.guide(folder / "policy", folder / "rm", data, out=out, weight=2.0, candidates=CANDIDATES, **given)  # pyright: ignore[reportArgumentType]


def test_what_cannot_guide_is_one_error(folder: Path) -> None:
    policy, model = prb.load_policy(folder / "policy"), prb.load(folder / "rm")
    for candidates in (0, 100_000):
        with pytest.raises(prb.DataError, match=rf"candidates: expected 1 to \d+, .* found {candidates}"):
            Guide(model=model, weight=1.0, candidates=candidates).checked(policy)
    with pytest.raises(prb.DataError, match="weight: expected a finite number"):
        Guide(model=model, weight=float("nan"), candidates=1).checked(policy)
    with pytest.raises(prb.DataError, match=r"cannot guide .*: it is no reward model with weights"):
        Guide(model=prb.load("baseline:length"), weight=1.0, candidates=1).checked(policy)  # pyright: ignore[reportArgumentType]
    with pytest.raises(prb.DataError, match="no rule beside the temperature"):
        drawn(policy, Guide(model=model, weight=1.0, candidates=2), folder, top_p=0.5)

    class Other:
        name = "other"

        class tokenizer:
            @staticmethod
            def get_vocab() -> dict[str, int]:
                return {**policy.tokenizer.tokenizer.get_vocab(), "new": 5000}

    said = why_other_tokenizer(policy.tokenizer, Other)  # pyright: ignore[reportArgumentType]
    assert said is not None
    assert said.endswith("token 'new' is 5000, expected None")


def test_figures_of_texts() -> None:
    text, reference = "Cats are running quickly home.", "The cat runs home quickly, all cats run."
    found = text_figures(text, reference)
    assert found["rouge1"] == pytest.approx(6 / 13)  # three words of 5 and of 8
    assert found["rougeL"] == pytest.approx(2 / 13)  # one, in order
    assert found["rouge1_stemmed"] > found["rouge1"]
    assert found["length_ratio"] == 5 / 8
    same = text_figures(reference, reference)
    assert all(same[name] == pytest.approx(1) for name in ("rouge2", "rougeL_stemmed", "length_ratio"))
    assert same["bleu"] == pytest.approx(100)
    assert corpus_bleu([reference], [reference]) == pytest.approx(100)
    assert text_figures("", reference)["rougeL"] == text_figures("", reference)["bleu"] == 0
