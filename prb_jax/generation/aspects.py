"""`prb aspects`: a language model infers from profile and question what this user wants from an answer.

``aspects.jsonl`` holds a text for each comparison, which `prb judge` and `prb evaluate` show in their prompts
(``planned:DIR``). The planner sees profile and question, and neither responses nor the true rubric.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from prb_jax.data.comparison import Comparison, Message
from prb_jax.data.writing import held_folder, refuse_file, write_json
from prb_jax.errors import DataError
from prb_jax.generation.endpoint import REPLIES, Endpoint, EndpointOptions, check_one_model
from prb_jax.generation.sample import SampleRun
from prb_jax.generation.speakers import EndpointSpeaker, Speaker, all_fitted, local_speaker
from prb_jax.generation.verdicts import shown_texts
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.runs.command_line import command_line
from prb_jax.runs.folder import SUMMARY
from prb_jax.runs.progress import Count, show_progress
from prb_jax.runs.rows import Row, open_rows
from prb_jax.scoring.inputs import Data, check_unchanged, read_inputs
from prb_jax.scoring.prompt_extras import ASPECT_FIELDS, ASPECT_RUNS, ASPECTS, asked_digest
from prb_jax.scoring.run import computing_versions

INSTRUCTION = (
    "Do not answer yet. What does this user want from an answer to this question? Infer it from what you know of the "
    'user. Reply with at most five short lines that begin with "- ", one wish in each, and with nothing else.'
)
TOGETHER = 64
"""Comparisons that are planned at a time."""

_DEFINITIONS = {
    "empty": "replies without a word: a judge or a reward model is told nothing of these comparisons",
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
    """Write for every comparison what its user wants from an answer, as a language model infers it.

    A run that was killed is continued by the same call. It is refused where anything differs that decides the texts.

    Args:
      model: folder or hub id of a causal language model; None for an endpoint.
      data, subset, limit, progress: as of :func:`prb_jax.evaluate`; responses and labels are not looked at.
      out: the run folder.
      endpoint: what is asked instead of a model on this machine.
      loading: how a model on this machine is opened.
      profile_posts: at most this many posts of each profile are shown.
      max_new_tokens: of a text; it is the most probable one.

    Raises:
      PrbError: model, data, choices or folder cannot be used.
    """
    check_one_model(model, endpoint, verb="aspects")
    if profile_posts < 0:
        raise DataError(f"profile_posts: expected 0 or more, found {profile_posts}")
    path = Path(out)
    refuse_file(out)
    ASPECT_RUNS.read(path)
    inputs = read_inputs(data, subset=subset, limit=limit)
    if endpoint is None:
        assert model is not None
        speaker: Speaker = local_speaker(model, loading or LoadOptions())
    else:
        speaker = EndpointSpeaker(Endpoint(endpoint, cache=path / REPLIES))
    identity = dict(speaker.identity())
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
    notes = {"command": command_line(), "model": name, "data": list(inputs.sources)}
    comparisons = list(inputs.comparisons)
    with held_folder(path):
        ASPECT_RUNS.start(path, decided, notes=notes)
        with open_rows(
            path / ASPECTS, what="aspects", key=lambda row: row["id"], fields=ASPECT_FIELDS
        ) as file:
            count = Count(len(comparisons), len(file.rows), unit="comparisons")
            with show_progress(name, count, enabled=progress) as display:
                left = [each for each in comparisons if each.id not in file.rows]
                for rows in _plan(speaker, left, posts=profile_posts, max_new_tokens=max_new_tokens):
                    file.append(rows)
                    display.advance(len(rows), sum(row["tokens"] or 0 for row in rows))
            check_unchanged(inputs)
            found = file.finish([each.id for each in comparisons])
        summary: dict[str, Any] = {
            "model": name,
            "data": list(inputs.sources),
            "n": len(found),
            "empty": sum(not row["text"] for row in found),
            "posts_dropped": sum(row["posts_dropped"] for row in found),
            "definitions": _DEFINITIONS,
        }
        write_json(path / SUMMARY, summary)
    return SampleRun(path, summary)


def _plan(
    speaker: Speaker, comparisons: Sequence[Comparison], *, posts: int, max_new_tokens: int
) -> Iterator[list[Row]]:
    """Yield the rows of comparisons, some at a time."""
    for start in range(0, len(comparisons), TOGETHER):
        part = comparisons[start : start + TOGETHER]
        asked, dropped = all_fitted(speaker, part, _asked, posts=posts, max_new_tokens=max_new_tokens)
        replies = speaker.replies(asked, max_new_tokens=max_new_tokens)
        yield [
            {
                "id": each.id,
                "asked": asked_digest(each),
                "text": _said(reply.text),
                "tokens": reply.completion_tokens,
                "posts_dropped": lost,
            }
            for each, reply, lost in zip(part, replies, dropped, strict=True)
        ]


def _asked(each: Comparison, posts: int) -> list[tuple[Message, ...]]:
    text, _ = shown_texts(each, profile_posts=posts)
    return [(Message("user", f"{text}\n\n{INSTRUCTION}"),)]


def _said(reply: str) -> str:
    """The reply without thoughts; one that is not closed says nothing."""
    _, closed, said = reply.rpartition("</think>")
    return "" if not closed and "<think>" in reply else said.strip()
