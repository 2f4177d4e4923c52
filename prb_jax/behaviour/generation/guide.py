"""`prb guide`: a reward model guides a policy token by token or chunk by chunk; compare with the person's own texts.

The run folder has the format of `prb sample`, so `prb best-of-n` accepts it too. ``summary.json`` adds how similar the
texts are to the preferred responses, and ``behaviour.json`` the figure that `prb correlate` reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from prb_jax.behaviour.generation.guided import Guide
from prb_jax.behaviour.generation.policy import Policy, open_policy
from prb_jax.behaviour.generation.rules import SampleOptions
from prb_jax.behaviour.generation.sample import RUNS, SampleRun, read_samples, sample_data
from prb_jax.errors import DataError, quote
from prb_jax.metrics.texts import TEXT_DEFINITIONS, TEXT_FIGURES, corpus_bleu, text_figures
from prb_jax.metrics.uncertainty import mean_interval
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.platform.extras import need_extra
from prb_jax.platform.processes.sharing import on_first_process
from prb_jax.records.comparison import Comparison
from prb_jax.runs.behaviour import cluster_of, figure_of, reward_identity, write_behaviour
from prb_jax.scoring.history import read_history, tell_strangers
from prb_jax.scoring.inputs import read_inputs
from prb_jax.scoring.open_scorer import open_scorer
from prb_jax.scoring.options import Data
from prb_jax.scoring.same_choices import check_same_choices

FIGURES: Final = ("rouge1", "rougeL")
"""Figures that represent the behaviour: ROUGE-1 is the headline of Personalised RewardBench."""


def guide(
    policy: str | Path | Policy,
    reward: str | Path | Any | None,
    data: Data,
    *,
    out: str | Path,
    weight: float = 1.0,
    candidates: int = 10,
    chunk: int | None = None,
    options: SampleOptions | None = None,
    profile_posts: int = 10,
    max_length: int | None = None,
    subset: str | None = None,
    limit: int | None = None,
    history: Data | None = None,
    quality: str | None = None,
    rows: int | None = None,
    policy_loading: LoadOptions | None = None,
    loading: LoadOptions | None = None,
    progress: bool = True,
) -> SampleRun:
    """Write guided texts for every comparison's prompt, and their similarity to the preferred responses.

    The same call resumes a killed run. Several processes draw together, and process 0 writes.

    Args:
      policy: Policy, or any model that :func:`prb_jax.load_policy` accepts.
      reward: Anything that :func:`prb_jax.load` accepts or returns. Guiding tokens requires a reward model with the
        policy's tokenizer and a head that reads one token. None draws from the policy only: with the user's own posts
        in its prompt, this is the in-context baseline.
      data: Labelled data, as for :func:`prb_jax.evaluate`: the preferred response is the person's own text.
      out: Run folder.
      weight: Weight of the reward; 0 uses only the policy.
      candidates: Number of most likely tokens to try at each step, or of chunks to draw.
      chunk: Tokens of a chunk. By default tokens are guided one by one.
      options: How tokens are drawn; greedy, up to 128 tokens by default. Guided tokens accept no rule except the
        temperature, and chunks require a temperature above 0.
      profile_posts: Number of posts that the policy sees; the reward model sees as many as in its training.
      max_length, subset, limit, rows: Same as in `prb sample`.
      history: Labelled comparisons from which a fitted personalisation method, used as the reward, learns the users.
      quality: Model whose score measures text quality, e.g. "baseline:persona-truth" for generated persons. The mean
        becomes another figure of behaviour. Texts without a letter are excluded and counted.
      policy_loading, loading: Options to open the policy and the reward model. With `reference` or `reference_free` in
        `loading`, the reward is a policy's implicit reward, which guides chunks.
      progress: Show progress on standard error.

    Raises:
      PrbError: models, data, choices or folder cannot be used.
    """
    need_extra("texts", "ROUGE and BLEU of prb guide")
    options = options or SampleOptions(temperature=0.0, max_new_tokens=128)
    guidance = {"weight": weight, "candidates": candidates} | ({} if chunk is None else {"chunk": chunk})
    loading = loading or LoadOptions()
    of_quality = loading.devices if loading.is_implicit else loading
    named = {
        "policy": (policy, policy_loading),
        "reward": (reward, loading),
        "quality": (quality, of_quality),
    }
    models = {what: one for what, one in named.items() if isinstance(one[0], str | Path)}
    asked = {
        **guidance,
        "sampling": asdict(options),
        "posts": profile_posts,
        "max_length": max_length,
        "rows": rows,
    }
    check_same_choices("guide", models, asked)
    opened = open_policy(policy, policy_loading or LoadOptions())
    model, guiding = None, None
    if reward is not None:
        model: Any = open_scorer(reward, loading, history=read_history(history))
        guiding = Guide(model=model, weight=weight, candidates=candidates, chunk=chunk)
    elif chunk is not None:
        raise DataError("chunk: requires a reward model; add one, or remove chunk")
    elif loading.is_implicit:
        raise DataError("reference: requires a reward model; add one, or remove reference")
    elif history is not None:
        raise DataError("history: requires a reward model that learns users; add one, or remove history")
    judge: Any = None if quality is None else open_scorer(quality, of_quality)
    comparisons = read_inputs(data, subset=subset, limit=limit).comparisons
    tell_strangers([] if model is None else [model], comparisons)
    result = sample_data(
        opened,
        data,
        out=out,
        options=options,
        profile_posts=profile_posts,
        max_length=max_length,
        subset=subset,
        limit=limit,
        rows=rows,
        guide=guiding,
        progress=progress,
    )
    texts = on_first_process(lambda: [row["text"] for row in read_samples(result.out).values()])
    judged = None if judge is None else _judged(judge, comparisons, texts, options.n)

    def finish() -> dict[str, Any]:
        references = list[str]()
        for comparison in comparisons:
            assert comparison.labels is not None
            best = comparison.responses[int(np.argmax(comparison.labels))]
            if not best.strip():
                raise DataError(
                    f"comparison {quote(comparison.id)}: expected a preferred response with a word, found none"
                )
            references += [best] * options.n
        clusters = [cluster_of(one.user_id, one.id) for one in comparisons for _ in range(options.n)]
        by_text = [text_figures(text, reference) for text, reference in zip(texts, references, strict=True)]
        values = {name: [figures[name] for figures in by_text] for name in TEXT_FIGURES}
        summary = result.summary | {
            "text": {name: _mean(values[name], clusters) for name in TEXT_FIGURES},
            "corpus_bleu": corpus_bleu(texts, references),
            "text_definitions": dict(TEXT_DEFINITIONS),
        }
        behaviour: dict[str, tuple[Sequence[float], list[str], dict[str, Any]]] = {
            f"guided {name}": (values[name], clusters, {}) for name in FIGURES
        }
        if judge is not None and judged is not None:
            scored = np.flatnonzero(np.isfinite(judged))
            good, good_clusters = judged[scored].tolist(), [clusters[place] for place in scored]
            mean, empty = _mean(good, good_clusters), len(texts) - len(scored)
            summary["quality"] = {"model": judge.name, **mean, "empty": empty}
            setting = {"quality": reward_identity(judge.identity())}
            behaviour["guided quality"] = (good, good_clusters, setting)
        if model is not None:
            summary |= {"reward_model": model.name, **guidance}
            inputs = RUNS.read_finished(result.out)["inputs"]
            setting = {key: value for key, value in inputs.items() if key not in ("guide", "versions")}
            figures = [
                figure_of(
                    numbers,
                    users,
                    name=name,
                    label=model.name,
                    identity=model.identity(),
                    setting=setting | guidance | more,
                    policy=inputs["model"].get("architecture"),
                )
                for name, (numbers, users, more) in behaviour.items()
            ]
            RUNS.reopen(result.out)
            write_behaviour(result.out, figures)
        RUNS.finish(result.out, summary)
        return summary

    return SampleRun(result.out, on_first_process(finish))


def _mean(values: Sequence[float], clusters: Sequence[str]) -> dict[str, Any]:
    return {"value": float(np.mean(values)), **mean_interval(np.asarray(values), clusters).to_json()}


def _judged(judge: Any, comparisons: Sequence[Comparison], texts: Sequence[str], n: int) -> np.ndarray:
    """Quality of every text, n for each comparison; NaN for texts without a letter, which no model can score."""
    qualities = np.full(len(texts), np.nan)
    asked: list[Comparison] = []
    asked_of: list[list[int]] = []
    for number, comparison in enumerate(comparisons):
        places = [place for place in range(number * n, (number + 1) * n) if texts[place].strip()]
        if places:
            asked.append(replace(comparison, responses=[texts[place] for place in places], labels=None))
            asked_of.append(places)
    if not asked:
        raise DataError("every text is empty: there is no text to judge; expected at least one with a letter")
    for comparison, places, values in zip(asked, asked_of, judge.score(asked), strict=True):
        if not np.isfinite(values).all():
            raise DataError(
                f"comparison {quote(comparison.id)}: a quality is {values.tolist()}; expected finite numbers"
            )
        qualities[places] = values
    return qualities
