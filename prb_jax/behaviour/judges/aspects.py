"""`prb aspects`: a language model infers from profile and question what this user wants from an answer.

``aspects.jsonl`` holds a text for each comparison; `prb judge` and `prb evaluate` can include it in their prompts
(``planned:DIR``). The planner sees profile and question, but neither the responses nor the true rubric.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from prb_jax.behaviour.generation.sample import SampleRun
from prb_jax.behaviour.judges.chat import InWords, open_chat
from prb_jax.behaviour.judges.replies import without_thoughts
from prb_jax.behaviour.judges.scorer import Conversation, shown_texts
from prb_jax.errors import DataError
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.records.comparison import Comparison, Message
from prb_jax.runs.progress import Count, show_progress
from prb_jax.scoring.inputs import read_inputs
from prb_jax.scoring.options import Data
from prb_jax.scoring.prompt_extras import ASPECT_RUNS, asked_digest
from prb_jax.scoring.remote.endpoint import REPLIES
from prb_jax.scoring.remote.options import EndpointOptions
from prb_jax.scoring.unchanged import check_unchanged
from prb_jax.version import computing_versions

INSTRUCTION = (
    "Do not answer yet. What does this user want from an answer to this question? Infer it from what you know of the "
    'user. Reply with at most five short lines that begin with "- ", one wish in each, and with nothing else.'
)
TOGETHER = 64  # comparisons to plan at a time

_DEFINITIONS = {
    "empty": "replies without a word: judges and reward models get no aspects for these comparisons",
    "posts_dropped": "posts of profiles that did not fit into the planner's context",
}


def plan_aspects(
    model: str | Path | None,
    data: Data,
    *,
    out: str | Path,
    endpoint: EndpointOptions | None = None,
    loading: LoadOptions | None = None,
    profile_posts: int = 10,
    max_new_tokens: int = 200,
    subset: str | None = None,
    limit: int | None = None,
    progress: bool = True,
) -> SampleRun:
    """Write what each comparison's user wants from an answer, as inferred by a language model.

    The same call resumes a killed run; it raises an error if any input that determines the texts differs.

    Args:
      model: Folder or hub id of a causal language model; None for an endpoint.
      data, subset, limit, progress: Same as for :func:`prb_jax.evaluate`; responses and labels are ignored.
      out: Run folder.
      endpoint: Endpoint to use instead of a model on this machine.
      loading: Options to open a model on this machine.
      profile_posts: Maximum number of posts to show from each profile.
      max_new_tokens: Maximum tokens of a text, which is decoded greedily.

    Raises:
      PrbError: model, data, choices or folder cannot be used.
    """
    if profile_posts < 0:
        raise DataError(f"profile_posts: expected 0 or more, found {profile_posts}")
    path = ASPECT_RUNS.check(out)
    inputs = read_inputs(data, subset=subset, limit=limit)
    chat = open_chat(
        model, endpoint=endpoint, loading=loading or LoadOptions(), cache=path / REPLIES, verb="aspects"
    )
    planner = InWords(chat, max_new_tokens)
    identity = dict(planner.identity())
    name = identity.pop("name")
    decided = {
        "model": identity,
        "data": inputs.to_json(),
        "profile_posts": profile_posts,
        "max_new_tokens": max_new_tokens,
        "limit": limit,
        "instruction": INSTRUCTION,
        "versions": computing_versions(plain=endpoint is not None),
    }
    notes = {"model": name, "data": list(inputs.sources)}
    comparisons = list(inputs.comparisons)
    with ASPECT_RUNS.open(path, decided, notes=notes) as run:
        count = Count(len(comparisons), len(run.file.rows), unit="comparisons")
        with show_progress(name, count, enabled=progress) as display:
            left = [comparison for comparison in comparisons if comparison.id not in run.file.rows]
            for start in range(0, len(left), TOGETHER):
                part = left[start : start + TOGETHER]
                answers = planner.answers(part, [partial(_ask, one) for one in part], posts=profile_posts)
                new = [
                    {
                        "id": comparison.id,
                        "asked": asked_digest(comparison),
                        "text": (without_thoughts(answer.replies[0].text) or "").strip(),
                        "tokens": answer.replies[0].completion_tokens,
                        "posts_dropped": answer.posts_dropped,
                    }
                    for comparison, answer in zip(part, answers, strict=True)
                ]
                run.file.append(new)
                display.advance(len(new), sum(row["tokens"] or 0 for row in new))
        check_unchanged(inputs)
        rows = run.file.finish([comparison.id for comparison in comparisons])
        summary: dict[str, Any] = {
            "model": name,
            "data": list(inputs.sources),
            "n": len(rows),
            "empty": sum(not row["text"] for row in rows),
            "posts_dropped": sum(row["posts_dropped"] for row in rows),
            "definitions": _DEFINITIONS,
        }
        run.finish(summary)
    return SampleRun(path, summary)


def _ask(comparison: Comparison, posts: int) -> list[Conversation]:
    prompt, _ = shown_texts(comparison, profile_posts=posts)
    return [(Message("user", f"{prompt}\n\n{INSTRUCTION}"),)]
