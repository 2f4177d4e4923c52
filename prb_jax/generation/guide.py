"""`prb guide`: texts of a policy that a reward model guides token by token or chunk by chunk, beside the person's own.

The run folder is that of `prb sample`, so that `prb best-of-n` takes it too; ``summary.json`` also holds how near the
texts are to the preferred responses, and ``behaviour.json`` the figure that `prb correlate` reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from prb_jax.data.comparison import Comparison
from prb_jax.data.writing import write_json
from prb_jax.errors import DataError, quote
from prb_jax.generation.choose import SampleOptions
from prb_jax.generation.chunks import ChunkGuide
from prb_jax.generation.guided import Guide
from prb_jax.generation.policy import Policy
from prb_jax.generation.sample import (
    FIELDS,
    RUNS,
    SAMPLES,
    SampleRun,
    open_policy,
    row_key,
    sample_data,
)
from prb_jax.metrics.texts import TEXT_DEFINITIONS, TEXT_FIGURES, corpus_bleu, text_figures
from prb_jax.metrics.uncertainty import mean_interval
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.runs.behaviour import cluster_of, figure_of, reward_identity, write_behaviour
from prb_jax.runs.folder import SUMMARY
from prb_jax.runs.rows import read_rows
from prb_jax.scoring.inputs import Data, read_inputs
from prb_jax.scoring.load import open_scorer, read_history, with_history

FIGURES: Final = ("rouge1", "rougeL")
"""The figures that stand for the behaviour: ROUGE-1 is the headline of Personalised RewardBench."""


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
    """Write guided texts for every comparison's prompt, and how near they are to the preferred responses.

    A run that was killed is continued by the same call.

    Args:
      policy: a policy, or what :func:`prb_jax.load_policy` takes.
      reward: what :func:`prb_jax.load` takes or gives; to guide tokens, a reward model with the policy's tokenizer and
        a head that reads one token. None for the policy alone: with the user's own posts in its prompt that is the
        in-context baseline.
      data: what :func:`prb_jax.evaluate` takes, with labels: the preferred response is the person's own text.
      out: the run folder.
      weight: of the reward; 0 is the policy alone.
      candidates: most likely tokens of each step that are tried, or chunks that are drawn.
      chunk: tokens of a chunk; tokens are guided one by one if not given.
      options: how tokens are drawn; greedy, up to 128 tokens if not given. Guided tokens have no rule beside the
        temperature, and chunks are drawn at a temperature above 0.
      profile_posts: that the policy sees; the reward model sees what it was trained with.
      max_length, subset, limit, rows: as of `prb sample`.
      history: labelled comparisons of which a fitted method of personalisation as the reward learns the users.
      quality: a model whose score says how good a text is, as "baseline:persona-truth" of generated persons; its mean
        is a figure of behaviour, too. Texts without a letter are left out of it and counted.
      policy_loading, loading: how policy and reward model are opened.
      progress: shows progress on standard error.

    Raises:
      PrbError: models, data, choices or folder cannot be used.
    """
    chosen = options or SampleOptions(temperature=0.0, max_new_tokens=128)
    own = open_policy(policy, policy_loading or LoadOptions())
    model, guiding = None, None
    if reward is not None:
        model = _open(reward, loading or LoadOptions(), history)
        guiding = (
            Guide(model=model, weight=weight, candidates=candidates)
            if chunk is None
            else ChunkGuide(model=model, weight=weight, candidates=candidates, chunk=chunk)
        )
    elif chunk is not None:
        raise DataError("chunk: the policy alone has no chunks: expected a reward model, or no chunk")
    elif history is not None:
        raise DataError("history: the policy alone learns no users: expected a reward model, or no history")
    judge = None if quality is None else _open(quality, loading or LoadOptions(), None)
    result = sample_data(
        own,
        data,
        out=out,
        options=chosen,
        profile_posts=profile_posts,
        max_length=max_length,
        subset=subset,
        limit=limit,
        rows=rows,
        guide=guiding,
        progress=progress,
    )
    comparisons = read_inputs(data, subset=subset, limit=limit).comparisons
    samples = read_rows(result.out / SAMPLES, what="samples", key=row_key, fields=FIELDS)
    texts, references, clusters = [], [], []
    for each in comparisons:
        assert each.labels is not None
        best = each.responses[int(np.argmax(each.labels))]
        if not best.strip():
            raise DataError(
                f"comparison {quote(each.id)}: expected a preferred response with a word, found none"
            )
        for number in range(chosen.n):
            texts.append(samples[each.id, number]["text"])
            references.append(best)
            clusters.append(cluster_of(each.user_id, each.id))
    judged = None if judge is None else _judged(judge, comparisons, texts, chosen.n)
    found = [text_figures(text, reference) for text, reference in zip(texts, references, strict=True)]
    figures: dict[str, Any] = {}
    for name in TEXT_FIGURES:
        values = np.asarray([one[name] for one in found])
        figures[name] = {"value": float(values.mean()), **mean_interval(values, clusters).to_json()}
    summary = result.summary | {
        "text": figures,
        "corpus_bleu": corpus_bleu(texts, references),
        "text_definitions": dict(TEXT_DEFINITIONS),
    }
    if judge is not None and judged is not None:
        kept = np.flatnonzero(np.isfinite(judged))
        good, of = judged[kept], [clusters[place] for place in kept]
        summary["quality"] = {
            "model": judge.name,
            "value": float(good.mean()),
            **mean_interval(good, of).to_json(),
            "empty": len(texts) - len(kept),
        }
    if model is not None:
        chosen_by = {"weight": weight, "candidates": candidates} | ({} if chunk is None else {"chunk": chunk})
        summary |= {"reward_model": model.name, **chosen_by}
        inputs = RUNS.read_finished(result.out)["inputs"]
        setting = {key: value for key, value in inputs.items() if key not in ("guide", "versions")}
        shared: dict[str, Any] = {
            "label": model.name,
            "identity": model.identity(),
            "policy": inputs["model"].get("architecture"),
        }
        setting |= chosen_by
        figures_of = [
            figure_of(
                [one[name] for one in found], clusters, name=f"guided {name}", setting=setting, **shared
            )
            for name in FIGURES
        ]
        if judge is not None and judged is not None:
            by = {"quality": reward_identity(judge.identity())}
            kept = np.flatnonzero(np.isfinite(judged))
            own = [clusters[place] for place in kept]
            figures_of.append(
                figure_of(judged[kept].tolist(), own, name="guided quality", setting=setting | by, **shared)
            )
        write_behaviour(result.out, figures_of)
    write_json(result.out / SUMMARY, summary)
    return SampleRun(result.out, summary)


def _open(model: Any, loading: LoadOptions, history: Data | None) -> Any:
    """A model by name, or as it is given."""
    if not isinstance(model, str | Path):
        return model
    known = read_history(history)
    return with_history({str(model): open_scorer(model, loading)}, known)[str(model)]


def _judged(judge: Any, comparisons: Sequence[Comparison], texts: Sequence[str], n: int) -> np.ndarray:
    """The quality of every text, n of each comparison; NaN for one without a letter, which no model can score."""
    found = np.full(len(texts), np.nan)
    places = [
        [at for at in range(number * n, (number + 1) * n) if texts[at].strip()]
        for number in range(len(comparisons))
    ]
    asked = [
        (own, replace(each, responses=tuple(texts[at] for at in own), labels=None))
        for own, each in zip(places, comparisons, strict=True)
        if own
    ]
    scores = judge.score([each for _, each in asked]) if asked else []
    for (own, each), values in zip(asked, scores, strict=True):
        if not np.isfinite(values).all():
            raise DataError(
                f"comparison {quote(each.id)}: a quality is {values.tolist()}; expected finite numbers"
            )
        found[own] = values
    if not np.isfinite(found).any():
        raise DataError("every text is empty: there is nothing whose quality could be told")
    return found
