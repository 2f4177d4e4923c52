"""`prb guide`: texts of a policy that a reward model guides token by token or chunk by chunk, beside the person's own.

The run folder is that of `prb sample`, so that `prb best-of-n` takes it too; ``summary.json`` also holds how near the
texts are to the preferred responses, and ``behaviour.json`` the figure that `prb correlate` reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from prb_jax.data.writing import write_json
from prb_jax.errors import DataError, quote
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
from prb_jax.generation.settings import SampleOptions
from prb_jax.metrics.texts import TEXT_DEFINITIONS, TEXT_FIGURES, corpus_bleu, text_figures
from prb_jax.metrics.uncertainty import mean_interval
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.runs.behaviour import cluster_of, figure_of, write_behaviour
from prb_jax.runs.folder import SUMMARY
from prb_jax.runs.rows import read_rows
from prb_jax.scoring.load import load
from prb_jax.scoring.read_inputs import Data, read_inputs
from prb_jax.scoring.reward_model import RewardModel

FIGURE: Final = "rougeL"
"""The figure that stands for the behaviour."""


def guide(
    policy: str | Path | Policy,
    reward: str | Path | RewardModel | None,
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
    rows: int | None = None,
    policy_loading: LoadOptions | None = None,
    loading: LoadOptions | None = None,
    progress: bool = True,
    command: Sequence[str] = (),
) -> SampleRun:
    """Write guided texts for every comparison's prompt, and how near they are to the preferred responses.

    A run that was killed is continued by the same call.

    Args:
      policy: a policy, or what :func:`prb_jax.load_policy` takes.
      reward: a reward model, or what :func:`prb_jax.load` takes; to guide tokens, one with the policy's tokenizer and a
        head that reads one token. None for the policy alone: with the user's own posts in its prompt that is the
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
      policy_loading, loading: how policy and reward model are opened.
      progress: shows progress on standard error.
      command: the command line, for the record.

    Raises:
      PrbError: models, data, choices or folder cannot be used.
    """
    chosen = options or SampleOptions(temperature=0.0, max_new_tokens=128)
    own = open_policy(policy, policy_loading or LoadOptions())
    model, guiding = None, None
    if reward is not None:
        model = reward if isinstance(reward, RewardModel) else load(reward, **vars(loading or LoadOptions()))
        guiding = (
            Guide(model=model, weight=weight, candidates=candidates)
            if chunk is None
            else ChunkGuide(model=model, weight=weight, candidates=candidates, chunk=chunk)
        )
    elif chunk is not None:
        raise DataError("chunk: the policy alone has no chunks: expected a reward model, or no chunk")
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
        command=command,
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
    if model is not None:
        chosen_by = {"weight": weight, "candidates": candidates} | ({} if chunk is None else {"chunk": chunk})
        summary |= {"reward_model": model.name, **chosen_by}
        inputs = RUNS.read_finished(result.out)["inputs"]
        setting = {key: value for key, value in inputs.items() if key not in ("guide", "versions")}
        behaviour = figure_of(
            [one[FIGURE] for one in found],
            clusters,
            name=f"guided {FIGURE}",
            label=model.name,
            identity=model.identity(),
            setting=setting | chosen_by,
            policy=inputs["model"].get("architecture"),
        )
        write_behaviour(result.out, [behaviour])
    write_json(result.out / SUMMARY, summary)
    return SampleRun(result.out, summary)
