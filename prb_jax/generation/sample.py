"""`prb sample`: samples of every prompt of a data set in a run folder; resumable to the byte.

``run.json`` holds what decides the samples, ``samples.jsonl`` a row for each sample; ``summary.json`` is written last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol

from prb_jax.errors import DataError, RunError
from prb_jax.generation.chunks import ChunkGuide
from prb_jax.generation.endpoint_samples import EndpointSampler, open_sampler
from prb_jax.generation.guided import Guide
from prb_jax.generation.policy import Policy, Sample, open_policy
from prb_jax.generation.prompts import Prompt
from prb_jax.generation.rules import SampleOptions
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.remote.options import EndpointOptions
from prb_jax.runs.kind import RunKind
from prb_jax.runs.parts import Part, Skip, finish_part, parse_part
from prb_jax.runs.progress import Count, show_progress
from prb_jax.runs.rows import Row, RowKind
from prb_jax.scoring.inputs import Data, Inputs, check_unchanged, read_inputs
from prb_jax.scoring.run import computing_versions, session_facts

SAMPLES = "samples.jsonl"
SAMPLE_ROWS = RowKind(
    SAMPLES,
    "samples",
    key=itemgetter("id", "sample"),
    fields=("id", "sample", "prompt_token_ids", "token_ids", "text", "logprob", "sampled_logprob", "finish"),
)
RUNS = RunKind(name="prb_jax samples", command="prb sample", rows=SAMPLE_ROWS)

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
      summary: what `summary.json` holds; of a part its number and its rows.
    """

    out: Path
    summary: dict[str, Any]


def sample_data(
    model: str | Path | Policy | None,
    data: Data,
    *,
    out: str | Path,
    options: SampleOptions,
    loading: LoadOptions | None = None,
    endpoint: EndpointOptions | None = None,
    profile_posts: int = 10,
    max_length: int | None = None,
    subset: str | None = None,
    limit: int | None = None,
    rows: int | None = None,
    guide: Guide | ChunkGuide | None = None,
    part: str | None = None,
    progress: bool = True,
) -> SampleRun:
    """Draw samples for every comparison's prompt, and write them to a run folder.

    A run that was killed is continued by the same call, and ends with the same bytes. It is refused where anything
    differs that decides the samples.

    Args:
      model: a policy, or what :func:`prb_jax.load_policy` takes; None for an endpoint.
      data: what :func:`prb_jax.evaluate` takes; labels and responses are not looked at.
      out: the run folder.
      options: how samples are drawn.
      loading: how a model by name is opened.
      endpoint: asked instead of a model on this machine (vLLM, SGLang, llama.cpp or another API like OpenAI's): its
        samples are texts without token ids and log-probabilities, and a run that is begun anew need not draw the same.
      profile_posts: at most this many posts of each profile are shown.
      max_length: of prompt and sample together; the model's context if not given.
      subset, limit: as of :func:`prb_jax.evaluate`.
      rows: samples that are drawn at a time.
      guide: a reward model that guides every token or chunk, for `prb guide`.
      part: "I/N" draws the I-th of N parts alone; :func:`prb_jax.merge` makes one run of all.
      progress: shows progress on standard error.

    Raises:
      PrbError: model, data, choices or folder cannot be used.
    """
    if profile_posts < 0:
        raise DataError(f"profile_posts: expected 0 or more, found {profile_posts}")
    share = None if part is None else parse_part(part)
    path = RUNS.check(out)
    inputs = read_inputs(data, subset=subset, limit=limit)
    if endpoint is not None and model is None:
        given = {"max_length": max_length, "rows": rows, "guide": guide} | (loading.given if loading else {})
        if unused := [option for option, value in given.items() if value is not None]:
            raise RunError(f"{', '.join(unused)}: decided by the server at {endpoint.url}: leave out here")
        drawing: _Drawing = _FromEndpoint(
            open_sampler(endpoint, options, profile_posts=profile_posts), inputs
        )
    elif endpoint is not None or model is None:
        raise RunError("sample: expected either a MODEL, or --endpoint URL and --model NAME")
    else:
        policy = open_policy(model, loading or LoadOptions())
        guide = None if guide is None else guide.checked(policy)
        prompts = policy.encode(
            inputs.comparisons, profile_posts=profile_posts, limit=policy.limit(options, max_length)
        )
        drawing = _FromPolicy(policy, inputs, prompts, options, rows, guide)
    identity = dict(drawing.identity())
    name = identity.pop("name")
    decided = {
        "model": identity,
        "data": inputs.to_json(),
        "profile_posts": profile_posts,
        "max_length": max_length,
        "limit": limit,
        "sampling": options.to_json(stop_ids=drawing.stop_ids),
        **({} if guide is None else {"guide": guide.identity()}),
        **({} if share is None else {"part": str(share)}),
        "versions": computing_versions(plain=endpoint is not None),
    }
    notes = {"model": name, "data": list(inputs.sources)}
    session = session_facts(drawing.device, None) | {"rows": rows}  # pyright: ignore[reportArgumentType] - of its mesh
    session.pop("batch_tokens")
    with RUNS.open(path, decided, session=session, notes=notes) as run:
        keys = [(one.id, sample) for one in inputs.comparisons for sample in range(options.n)]
        count = Count(len(keys), len(run.file.rows), unit="samples")
        with show_progress(name, count, enabled=progress) as display:
            for new in drawing.rows(run.file.rows, share):
                run.file.append(new)
                display.advance(len(new), sum(_tokens(row) or 0 for row in new))
        check_unchanged(inputs)
        if share is not None:
            drawn = finish_part(path, share, rows=len(run.file.rows), files=[SAMPLES])
            return SampleRun(path, {"model": name, **drawn})
        summary = _summary(name, inputs, run.file.finish(keys), options, drawing)
        run.finish(summary)
    return SampleRun(path, summary)


class _Drawing(Protocol):
    """Who draws samples.

    Attributes:
      device: has the mesh, if there is one.
      stop_ids: tokens that end a text, as far as they are known.
      posts_dropped: of each prompt; None where nobody drops any.
    """

    device: Any
    stop_ids: tuple[int, ...]
    posts_dropped: list[int] | None

    def identity(self) -> Mapping[str, Any]:
        """Return the name, and everything that decides the samples."""
        ...

    def rows(self, known: Mapping[Any, Row], part: Part | None) -> Iterator[list[dict[str, Any]]]:
        """Yield the rows that are not known, of all or of a part, some at a time."""
        ...


class _FromPolicy:
    """A model on this machine, alone or guided."""

    def __init__(
        self,
        policy: Policy,
        inputs: Inputs,
        prompts: Sequence[Prompt],
        options: SampleOptions,
        rows: int | None,
        guide: Guide | ChunkGuide | None,
    ) -> None:
        self.device: Any = policy
        self.stop_ids, self.identity = policy.stops(options), policy.identity
        self.posts_dropped: list[int] | None = [prompt.posts_dropped for prompt in prompts]
        self._inputs, self._prompts, self._options, self._rows = inputs, prompts, options, rows
        self._guide = guide

    def rows(self, known: Mapping[Any, Row], part: Part | None) -> Iterator[list[dict[str, Any]]]:
        policy, prompts, options = self.device, self._prompts, self._options

        def are_known(unit: Sequence[int]) -> bool:
            return all((prompts[k].name, s) in known for k in unit for s in range(options.n))

        skip = Skip(are_known, part)
        if self._guide is None:
            stream = policy.draw(prompts, options, rows=self._rows, skip=skip)
        else:
            shown = list(self._inputs.comparisons)
            stream = self._guide.draw(policy, shown, prompts, options, rows=self._rows, skip=skip)
        for batch in stream:
            yield [
                _row(
                    prompts[drawn.prompt],
                    drawn.sample,
                    policy.as_sample(prompts[drawn.prompt], drawn, options),
                )
                for drawn in batch
                if (prompts[drawn.prompt].name, drawn.sample) not in known
            ]


class _FromEndpoint:
    """A model behind an endpoint."""

    device: Any = None
    posts_dropped: list[int] | None = None

    def __init__(self, sampler: EndpointSampler, inputs: Inputs) -> None:
        self.stop_ids, self.identity = sampler.options.stop_ids or (), sampler.identity
        self._sampler, self._inputs = sampler, inputs

    def rows(self, known: Mapping[Any, Row], part: Part | None) -> Iterator[list[dict[str, Any]]]:
        comparisons = self._inputs.comparisons
        if part is not None:
            comparisons = [one for index, one in enumerate(comparisons) if part.has([index])]
        return self._sampler.draw(comparisons, known)


def read_samples(folder: Path) -> dict[tuple[str, int], Row]:
    """Return the samples of a finished run by comparison and number, in their order.

    Raises:
      RunError: the run is not finished, or a row cannot be read.
    """
    RUNS.read_finished(folder)
    return dict(SAMPLE_ROWS.read(folder))


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


def _tokens(row: Row) -> int | None:
    """The tokens of a sample; None where an endpoint does not tell them."""
    return len(row["token_ids"]) if row["token_ids"] is not None else row["tokens"]


def _summary(
    name: str, inputs: Inputs, rows: Sequence[Row], options: SampleOptions, drawing: _Drawing
) -> dict[str, Any]:
    tokens = [_tokens(row) for row in rows]
    total = None if None in tokens else sum(count or 0 for count in tokens)
    asked = [
        row["prompt_tokens"] if row["prompt_token_ids"] is None else len(row["prompt_token_ids"])
        for row in rows[:: options.n]
    ]
    logprobs = [row["logprob"] for row in rows]
    dropped = None if drawing.posts_dropped is None else [posts for posts in drawing.posts_dropped if posts]
    return {
        "model": name,
        "data": list(inputs.sources),
        "n": len(asked),
        "samples": options.n,
        "tokens": total,
        "mean_tokens": None if total is None else total / len(rows),
        "prompt_tokens": None if None in asked else sum(asked),
        "mean_logprob_per_token": None if total is None or None in logprobs else sum(logprobs) / total,
        "finish": dict(Counter(row["finish"] for row in rows)),
        "empty": sum(not row["text"].strip() for row in rows),
        "posts_dropped": None if dropped is None else {"prompts": len(dropped), "posts": sum(dropped)},
        "definitions": _DEFINITIONS,
    }
