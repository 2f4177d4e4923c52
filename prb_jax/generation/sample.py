"""`prb sample`: samples of every prompt of a data set in a run folder; resumable to the byte.

``run.json`` holds what decides the samples, ``samples.jsonl`` a row for each sample; ``summary.json`` is written last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from prb_jax.data.writing import held_folder, refuse_file, write_json
from prb_jax.errors import DataError
from prb_jax.generation.choose import SampleOptions
from prb_jax.generation.chunks import ChunkGuide
from prb_jax.generation.guided import Guide
from prb_jax.generation.policy import Policy, Sample, open_policy
from prb_jax.generation.prompts import Prompt
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.runs.command_line import command_line
from prb_jax.runs.kind import SUMMARY, RunKind
from prb_jax.runs.progress import Count, show_progress
from prb_jax.runs.rows import Row, open_rows, read_rows
from prb_jax.scoring.inputs import Data, Inputs, check_unchanged, read_inputs
from prb_jax.scoring.run import computing_versions, session_facts

SAMPLES = "samples.jsonl"
RUNS = RunKind(name="prb_jax samples", command="prb sample", rows=SAMPLES)
FIELDS = ("id", "sample", "prompt_token_ids", "token_ids", "text", "logprob", "sampled_logprob", "finish")

_DEFINITIONS = {
    "logprob": "of a sample: the sum of its tokens' log-probabilities under the model as it is (temperature 1)",
    "sampled_logprob": "the same under the distribution that the tokens were drawn from; 0 at temperature 0",
    "finish": "stop: a stop token; text: a stop text; length: max_new_tokens",
    "posts_dropped": "prompts that lost posts of their profile because they did not fit, and how many posts",
}


@dataclass(frozen=True)
class SampleRun:
    """The result of `sample_data`.

    Attributes:
      out: the run folder.
      summary: what `summary.json` holds.
    """

    out: Path
    summary: dict[str, Any]


def sample_data(
    model: str | Path | Policy,
    data: Data,
    *,
    out: str | Path,
    options: SampleOptions,
    loading: LoadOptions | None = None,
    profile_posts: int = 10,
    max_length: int | None = None,
    subset: str | None = None,
    limit: int | None = None,
    rows: int | None = None,
    guide: Guide | ChunkGuide | None = None,
    progress: bool = True,
) -> SampleRun:
    """Draw samples for every comparison's prompt, and write them to a run folder.

    A run that was killed is continued by the same call, and ends with the same bytes. It is refused where anything
    differs that decides the samples.

    Args:
      model: a policy, or what :func:`prb_jax.load_policy` takes.
      data: what :func:`prb_jax.evaluate` takes; labels and responses are not looked at.
      out: the run folder.
      options: how samples are drawn.
      loading: how a model by name is opened.
      profile_posts: at most this many posts of each profile are shown.
      max_length: of prompt and sample together; the model's context if not given.
      subset, limit: as of :func:`prb_jax.evaluate`.
      rows: samples that are drawn at a time.
      guide: a reward model that guides every token or chunk, for `prb guide`.
      progress: shows progress on standard error.

    Raises:
      PrbError: model, data, choices or folder cannot be used.
    """
    if profile_posts < 0:
        raise DataError(f"profile_posts: expected 0 or more, found {profile_posts}")
    path = Path(out)
    refuse_file(out)
    RUNS.read(path)
    inputs = read_inputs(data, subset=subset, limit=limit)
    policy = open_policy(model, loading or LoadOptions())
    guide = None if guide is None else guide.checked(policy)
    stop_ids = policy.stops(options)
    room = policy.limit(options, max_length)
    prompts = policy.encode(inputs.comparisons, profile_posts=profile_posts, limit=room)
    identity = dict(policy.identity())
    name = identity.pop("name")
    decided = {
        "model": identity,
        "data": inputs.to_json(),
        "profile_posts": profile_posts,
        "max_length": max_length,
        "limit": limit,
        "sampling": options.to_json(stop_ids=stop_ids),
        **({} if guide is None else {"guide": guide.identity()}),
        "versions": computing_versions(plain=False),
    }
    notes = {"command": command_line(), "model": name, "data": list(inputs.sources)}
    with held_folder(path):
        session = session_facts(policy, None) | {"rows": rows}  # pyright: ignore[reportArgumentType] - of its mesh
        session.pop("batch_tokens")
        RUNS.start(path, decided, session=session, notes=notes)
        with open_rows(path / SAMPLES, what="samples", key=row_key, fields=FIELDS) as file:
            known = file.rows

            def is_known(unit: range) -> bool:
                return all((prompts[k].name, s) in known for k in unit for s in range(options.n))

            count = Count(len(prompts) * options.n, len(known), unit="samples")
            with show_progress(name, count, enabled=progress) as display:
                if guide is None:
                    stream = policy.draw(prompts, options, rows=rows, skip=is_known)
                else:
                    shown = list(inputs.comparisons)
                    stream = guide.draw(policy, shown, prompts, options, rows=rows, skip=is_known)
                for batch in stream:
                    new = []
                    for drawn in batch:
                        prompt = prompts[drawn.prompt]
                        if (prompt.name, drawn.sample) not in known:
                            new.append(_row(prompt, drawn.sample, policy.as_sample(prompt, drawn, options)))
                    file.append(new)
                    display.advance(len(new), sum(len(row["token_ids"]) for row in new))
            check_unchanged(inputs)
            keys = [(prompt.name, sample) for prompt in prompts for sample in range(options.n)]
            samples = file.finish(keys)
        summary = _summary(name, inputs, prompts, samples, options)
        write_json(path / SUMMARY, summary)
    return SampleRun(path, summary)


def read_samples(folder: Path) -> dict[tuple[str, int], Row]:
    """Return the samples of a finished run by comparison and number, in their order.

    Raises:
      RunError: the run is not finished, or a row cannot be read.
    """
    RUNS.read_finished(folder)
    rows = read_rows(folder / SAMPLES, what="samples", key=row_key, fields=FIELDS)
    return cast(dict[tuple[str, int], Row], rows)


def row_key(row: Row) -> tuple[str, int]:
    """Return the comparison and the number of a sample."""
    return row["id"], row["sample"]


def _row(prompt: Prompt, number: int, sample: Sample) -> dict[str, Any]:
    return {
        "id": prompt.name,
        "sample": number,
        "prompt_token_ids": sample.prompt_token_ids.tolist(),
        "token_ids": sample.token_ids.tolist(),
        "text": sample.text,
        "logprob": sample.logprob,
        "sampled_logprob": sample.sampled_logprob,
        "finish": sample.finish,
    }


def _summary(
    name: str, inputs: Inputs, prompts: Sequence[Prompt], rows: Sequence[Row], options: SampleOptions
) -> dict[str, Any]:
    tokens = [len(row["token_ids"]) for row in rows]
    total = sum(tokens)
    dropped = [prompt.posts_dropped for prompt in prompts if prompt.posts_dropped]
    return {
        "model": name,
        "data": list(inputs.sources),
        "n": len(prompts),
        "samples": options.n,
        "tokens": total,
        "mean_tokens": total / len(rows),
        "prompt_tokens": sum(len(prompt.ids) for prompt in prompts),
        "mean_logprob_per_token": sum(row["logprob"] for row in rows) / total,
        "finish": dict(Counter(row["finish"] for row in rows)),
        "empty": sum(not row["text"].strip() for row in rows),
        "posts_dropped": {"prompts": len(dropped), "posts": sum(dropped)},
        "definitions": _DEFINITIONS,
    }
