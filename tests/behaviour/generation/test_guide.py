"""`prb guide`: weight 0 is the policy, a reward that loves one token forces it, and steps equal k forward passes."""

import functools
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import prb_jax as prb
from prb_jax import cli
from prb_jax.behaviour.generation.guided import Guide
from prb_jax.behaviour.generation.rules import SampleOptions
from prb_jax.behaviour.generation.token_scores import why_other_tokenizer
from prb_jax.metrics.texts import corpus_bleu, text_figures
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.scoring.reward_model import RewardModel
from prb_jax.text.view import ViewOptions
from prb_jax.trees.packing import pack_streams
from prb_jax.trees.streams import StreamBatch, StreamOptions, StreamShape, make_stream_batch
from prb_jax.trees.tree import Tree
from tests.json_lines import read_lines

TOKENS, CANDIDATES = 6, 4


@pytest.fixture(scope="module")
def three(comparisons) -> list[prb.Comparison]:
    return comparisons[:3]


def drawn(
    policy: prb.Policy, guide: Guide, comparisons: list[prb.Comparison], **options: float
) -> list[list[int]]:
    """The token ids of every prompt's only guided sample."""
    chosen = SampleOptions(**{"temperature": 0.0, "max_new_tokens": TOKENS, "stop_ids": ()} | options)  # pyright: ignore[reportArgumentType]
    prompts = policy.encode(comparisons, profile_posts=0, limit=200)
    tokens: dict[int, list[int]] = {}
    for batch in guide.checked(policy).draw(policy, comparisons, prompts, chosen, rows=2):
        tokens |= {text.prompt: text.tokens.tolist() for text in batch}
    return [tokens[place] for place in range(len(comparisons))]


def naive(
    policy: prb.Policy, model: RewardModel, comparisons: list[prb.Comparison], weight: float
) -> list[list[int]]:
    """The same by k forward passes a step: logits from scratch, and the reward of every candidate's whole sequence."""
    import jax
    import jax.numpy as jnp

    from prb_jax.models.decoder import decode_stream
    from prb_jax.models.model import bind
    from prb_jax.text.prompts import encode_prompts
    from prb_jax.text.view import visible

    view = model.reader.view(ViewOptions())
    options: dict[str, Any] = {"dtype": jnp.dtype(jnp.float32), "reads_only": True}
    decode, decoder = jax.jit(functools.partial(decode_stream, **options)), bind(policy.config, policy.params)
    shape = StreamShape(256, 16)

    def packed(trees: list[Tree], model: DecoderConfig) -> StreamBatch:
        layout = StreamOptions(tokens=shape.tokens, window=model.sliding_window)
        (streams,) = pack_streams(trees, shape, layout)
        return make_stream_batch(trees, streams, layout)

    texts = []
    for comparison in comparisons:
        prompt = encode_prompts(policy.tokenizer, [comparison.prompt])[0]
        messages = visible(
            comparison, profile_posts=view.profile_posts, protocol=view.protocol
        ).prefix_messages
        shown = encode_prompts(model.tokenizer, [messages])[0]  # pyright: ignore[reportArgumentType]
        ids: list[int] = []
        for _ in range(TOKENS):
            so_far = np.asarray([*prompt, *ids], np.int32)
            batch = packed([Tree(so_far[:-1], (so_far[-1:],), (0,))], policy.config)
            state = decode(decoder, batch)[0, 0]
            normed = decoder.normed(state)
            logits = np.asarray(policy.program.head.next_token(policy.params, normed))
            best = np.argsort(-logits, kind="stable")[:CANDIDATES]
            tried = tuple(np.asarray([v], np.int32) for v in best)
            tree = Tree(np.asarray([*shown, *ids], np.int32), tried, (0,) * len(tried))
            rewards = np.asarray(model.run(packed([tree], model.decoder)))[0, : len(best)]
            logprobs = logits[best] - np.logaddexp.reduce(logits.astype(np.float64))
            ids.append(int(best[np.argmax(logprobs + weight * rewards)]))
        texts.append(ids)
    return texts


def test_guided_tokens(policy, model, three):
    alone = []
    for rules in ({"temperature": 0.0}, {"temperature": 0.9, "seed": 5}):
        samples = policy.sample(three, max_new_tokens=TOKENS, stop_ids=(), profile_posts=0, **rules)
        alone.append(drawn(policy, Guide(model=model, weight=0.0, candidates=2), three, **rules))
        assert alone[-1] == [of_prompt[0].token_ids.tolist() for of_prompt in samples]
    guided = drawn(policy, Guide(model=model, weight=1.5, candidates=CANDIDATES), three)
    assert guided == naive(policy, model, three, 1.5)
    assert guided != alone[0]


def test_a_reward_that_loves_one_token_forces_it(policy, model, three):
    """Its embedding points where the head looks, and all layers are switched off."""
    loved, head = 123, np.asarray(model.params["score"])[:, 0]
    embed = np.tile(-head, (len(model.params["embed"]), 1))
    embed[loved] = head
    silent = {name: np.zeros_like(leaf) for name, leaf in model.params["layers"].items()}
    norm = np.zeros_like(model.params["final_norm"])
    lover = prb.RewardModel(
        **vars(model) | {"params": {**model.params, "embed": embed, "layers": silent, "final_norm": norm}}
    )
    guide = Guide(model=lover, weight=1e4, candidates=policy.config.vocab_size)
    assert drawn(policy, guide, three) == [[loved] * TOKENS] * 3


def test_a_run_has_texts_and_figures(folder, three, tmp_path, capsys):
    out, policy, model, data = tmp_path / "out", folder / "policy", folder / "rm", str(folder / "pairs.jsonl")
    command = [
        "guide", str(policy), "--reward", str(model), "--data", data, "--limit", "3", "--out", str(out),
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
        expected = [
            text_figures(row["text"], comparison.responses[0])[name]
            for row, comparison in zip(rows, three, strict=True)
        ]
        assert summary["text"][name]["value"] == pytest.approx(np.mean(expected))
        assert (shown["name"], sum(shown["sums"])) == (f"guided {name}", pytest.approx(sum(expected)))
    lengths = [len(row["text"]) for row in rows if row["text"].strip()]
    assert summary["quality"]["value"] == pytest.approx(np.mean(lengths))
    assert summary["quality"]["empty"] == len(rows) - len(lengths)
    assert (quality["name"], sum(quality["sums"]), sum(quality["counts"])) == (
        "guided quality", sum(lengths), len(lengths)
    )  # fmt: skip
    assert figure["counts"] == [1, 1, 1]
    assert (figure["label"], figure["policy"]) == (str(model), "Qwen3ForCausalLM")
    # the policy alone writes other texts, with the same figures, and no behaviour under a reward model
    options = SampleOptions(temperature=0.0, max_new_tokens=TOKENS)
    given = {"options": options, "limit": 3, "progress": False}
    alone = prb.guide(policy, None, data, out=tmp_path / "alone", **given)
    assert alone.summary["text"].keys() == summary["text"].keys()
    assert "weight" not in alone.summary
    assert not (tmp_path / "alone" / "behaviour.json").exists()
    # best-of-n reads the folder as any other samples; another weight is another run
    assert [row["id"] for row in rows] == [comparison.id for comparison in three]
    with pytest.raises(prb.RunError, match=r"guide\.weight: 1\.5 -> 2\.0"):
        prb.guide(policy, model, data, out=out, weight=2.0, candidates=CANDIDATES, **given)


def test_what_cannot_guide_is_one_error(policy, model, three):
    for given, message in (
        ({"candidates": 0}, r"candidates: expected 1 to \d+, .* found 0"),
        ({"candidates": 100_000}, r"candidates: expected 1 to \d+, .* found 100000"),
        ({"weight": float("nan")}, "weight: expected a finite number"),
        ({"model": prb.load("baseline:length")}, r"cannot guide .*: it is no reward model with weights"),
    ):
        with pytest.raises(prb.DataError, match=message):
            Guide(**{"model": model, "weight": 1.0, "candidates": 1} | given).checked(policy)
    with pytest.raises(prb.DataError, match="remove all rules except the temperature"):
        drawn(policy, Guide(model=model, weight=1.0, candidates=2), three, top_p=0.5)

    vocabulary = {**policy.tokenizer.tokenizer.get_vocab(), "new": 5000}
    other: Any = SimpleNamespace(tokenizer=SimpleNamespace(get_vocab=lambda: vocabulary))
    said = why_other_tokenizer(policy.tokenizer, other) or ""
    assert said.endswith("token 'new' is 5000, expected None")


def test_figures_of_texts():
    text, reference = "Cats are running quickly home.", "The cat runs home quickly, all cats run."
    figures = text_figures(text, reference)
    assert figures["rouge1"] == pytest.approx(6 / 13)  # three words of 5 and of 8
    assert figures["rougeL"] == pytest.approx(2 / 13)  # one, in order
    assert figures["rouge1_stemmed"] > figures["rouge1"]
    assert figures["length_ratio"] == 5 / 8
    same = text_figures(reference, reference)
    assert all(same[name] == pytest.approx(1) for name in ("rouge2", "rougeL_stemmed", "length_ratio"))
    assert same["bleu"] == pytest.approx(100)
    assert corpus_bleu([reference], [reference]) == pytest.approx(100)
    assert text_figures("", reference)["rougeL"] == text_figures("", reference)["bleu"] == 0
