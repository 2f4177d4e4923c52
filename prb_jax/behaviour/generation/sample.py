"""`prb sample`: samples of every prompt of a data set in a run folder; a resumed run gives identical bytes.

``run.json`` holds everything that determines the samples, ``samples.jsonl`` a row for each sample; ``summary.json`` is
written last. The samples come from a policy on this machine, guided or not, or from a language model behind an
endpoint, which returns texts without token ids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from hashlib import sha256
from operator import itemgetter
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from prb_jax.behaviour.generation.guided import Guide
from prb_jax.behaviour.generation.policy import Policy, open_policy
from prb_jax.behaviour.generation.prompts import Prompt
from prb_jax.behaviour.generation.rules import SampleOptions
from prb_jax.errors import DataError, RunError
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.platform.processes.agreement import check_agreement
from prb_jax.platform.processes.refusals import refuse_together
from prb_jax.platform.processes.sharing import on_first_process
from prb_jax.records.comparison import Comparison
from prb_jax.records.options import refuse_given
from prb_jax.runs.behaviour import BEHAVIOUR
from prb_jax.runs.evaluation_inputs import RecordedData
from prb_jax.runs.kind import RunKind, RunResult, session_now
from prb_jax.runs.parts import Part, Skip, finish_part, parse_part
from prb_jax.runs.progress import Count, show_progress
from prb_jax.runs.rows import Row, RowKind
from prb_jax.scoring.inputs import read_inputs
from prb_jax.scoring.options import Data
from prb_jax.scoring.remote.endpoint import Endpoint
from prb_jax.scoring.remote.options import EndpointOptions
from prb_jax.scoring.run import mesh_facts
from prb_jax.scoring.same_choices import check_same_choices
from prb_jax.scoring.unchanged import check_unchanged
from prb_jax.text.view import TextProtocol, visible
from prb_jax.version import computing_versions

SAMPLES = "samples.jsonl"


class SampleLine(TypedDict):
    """A line of ``samples.jsonl``; an endpoint returns no token ids and no log-probabilities."""

    id: str
    sample: int
    prompt_token_ids: list[int] | None
    token_ids: list[int] | None
    text: str
    logprob: float | None
    sampled_logprob: float | None
    finish: str
    # only from an endpoint, which may omit them
    prompt_tokens: NotRequired[int | None]
    tokens: NotRequired[int | None]


SAMPLE_ROWS = RowKind(SAMPLES, "samples", key=itemgetter("id", "sample"), schema=SampleLine)


class _Sampling(TypedDict):
    n: int


class SampleInputs(TypedDict):
    """The inputs of a sample run that other code reads."""

    model: dict[str, Any]
    data: RecordedData
    limit: int | None
    sampling: _Sampling


RUNS = RunKind(
    name="prb_jax samples",
    command="prb sample",
    rows=SAMPLE_ROWS,
    inputs=SampleInputs,
    sealed=(BEHAVIOUR,),
)

_UNKNOWN = ("prompt_token_ids", "token_ids", "logprob", "sampled_logprob")  # for samples of an endpoint
_AHEAD = 4  # samples written together, as a multiple of concurrent requests

_DEFINITIONS = {
    "logprob": "sum of the log-probabilities of a sample's tokens under the unmodified model (temperature 1)",
    "sampled_logprob": "the same sum under the distribution the tokens were drawn from; 0 at temperature 0",
    "finish": "stop: a stop token; text: a stop text; length: max_new_tokens",
    "posts_dropped": "number of prompts that lost profile posts because they did not fit, and number of lost posts",
}


class SampleRun(RunResult):
    """The result of `sample_data`: `out`, the run folder, and `summary`, the contents of `summary.json`; for a part,
    its number and its rows."""


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
    guide: Guide | None = None,
    part: str | None = None,
    progress: bool = True,
) -> SampleRun:
    """Draw samples for every comparison's prompt, and write them to a run folder.

    The same call resumes a killed run and ends with the same bytes; it raises an error if any input that determines the
    samples differs. Several processes draw every sample together, on all their devices, and process 0 writes.

    Args:
      model: Policy, or any model that :func:`prb_jax.load_policy` accepts; None for an endpoint.
      data: Data, as for :func:`prb_jax.evaluate`; labels and responses are ignored.
      out: Run folder.
      options: How samples are drawn.
      loading: Options to open a model given by name.
      endpoint: Endpoint to use instead of a model on this machine (vLLM, SGLang, llama.cpp or another OpenAI-like API).
        Its samples are texts without token ids and log-probabilities, and a new run may draw different ones.
      profile_posts: Maximum number of posts to show from each profile.
      max_length: Maximum tokens of prompt and sample together; by default the model's context.
      subset, limit: Same as for :func:`prb_jax.evaluate`.
      rows: Number of samples to draw at a time.
      guide: Reward model that guides every token or chunk, for `prb guide`.
      part: "I/N" draws only the I-th of N parts; :func:`prb_jax.merge` combines all parts into one run.
      progress: Show progress on standard error.

    Raises:
      PrbError: model, data, choices or folder cannot be used.
    """
    if profile_posts < 0:
        raise DataError(f"profile_posts: expected 0 or more, found {profile_posts}")
    refuse_together(endpoint=endpoint, part=part)
    path, share = RUNS.check_together(out), None if part is None else parse_part(part)
    inputs = read_inputs(data, subset=subset, limit=limit)
    if endpoint is not None and model is None:
        given = {"max_length": max_length, "rows": rows, "guide": guide} | (loading.given if loading else {})
        refuse_given(given, f"decided by the server at {endpoint.url}")
        sampler = _EndpointSampler(endpoint, inputs.comparisons, options, profile_posts)
    elif endpoint is not None or model is None:
        raise RunError("sample: expected either a MODEL, or --endpoint URL and --model NAME")
    else:
        if not isinstance(model, Policy):
            chosen = {
                "sampling": asdict(options),
                "posts": profile_posts,
                "max_length": max_length,
                "rows": rows,
            }
            check_same_choices("sample", {"model": (model, loading)}, chosen, inputs=inputs)
        policy = open_policy(model, loading or LoadOptions())
        guide = None if guide is None else guide.checked(policy)
        most = policy.limit(options, max_length)
        prompts = policy.encode(inputs.comparisons, profile_posts=profile_posts, limit=most)
        draw = policy.draw if guide is None else partial(guide.draw, policy, inputs.comparisons)
        sampler = _PolicySampler(policy, prompts, options, partial(draw, prompts, options, rows=rows))
    identity = dict(sampler.identity())
    name = identity.pop("name")
    decided = {
        "model": identity,
        "data": inputs.to_json(),
        "profile_posts": profile_posts,
        "max_length": max_length,
        "limit": limit,
        "sampling": options.to_json(stop_ids=sampler.stop_ids),
        **({} if guide is None else {"guide": guide.identity()}),
        **({} if share is None else {"part": str(share)}),
        "versions": computing_versions(plain=endpoint is not None),
    }
    notes = {"model": name, "data": list(inputs.sources)}
    placed = {} if sampler.device is None else mesh_facts(sampler.device.mesh)
    session = {**session_now(), **placed, "rows": rows}
    check_agreement(decided | {"rows": rows})
    with RUNS.open_together(path, decided, session=session, notes=notes) as run:
        keys = [(one.id, sample) for one in inputs.comparisons for sample in range(options.n)]
        count = Count(len(keys), len(run.file.rows), unit="samples")
        with show_progress(name, count, enabled=progress) as display:
            for new in sampler.rows(run.file.rows, share):
                run.file.append(new)
                display.advance(len(new), sum(_tokens(row) or 0 for row in new))

        def finish() -> dict[str, Any]:
            check_unchanged(inputs)
            if share is not None:
                sizes = {"rows": len(run.file.rows), "rows_of_all": len(keys)}
                drawn = finish_part(path, share, **sizes, files=[SAMPLES])
                return {"model": name, **drawn}
            summary = {"model": name, "data": list(inputs.sources)}
            summary |= _summary(run.file.finish(keys), options, sampler)
            run.finish(summary)
            return summary

        summary = on_first_process(finish)
    return SampleRun(path, summary)


class _PolicySampler:
    """Draws from a model on this machine, guided or not.

    Attributes:
      device: Policy with the mesh, if any.
      stop_ids: Known tokens that end a text.
      posts_dropped: Number of dropped posts for each prompt; None if prompts are not cut.
    """

    def __init__(
        self, policy: Policy, prompts: Sequence[Prompt], options: SampleOptions, draw: Callable[..., Any]
    ) -> None:
        self.device, self.stop_ids, self.identity = policy, policy.stops(options), policy.identity
        self.posts_dropped: list[int] | None = [prompt.posts_dropped for prompt in prompts]
        self._prompts, self._options, self._draw = prompts, options, draw

    def rows(self, known: Mapping[Any, Row], part: Part | None) -> Iterator[list[Row]]:
        """Yield the rows that are not in ``known``, of all prompts or of a part, in batches."""
        prompts, options = self._prompts, self._options

        def are_known(unit: Sequence[int]) -> bool:
            return all((prompts[k].name, s) in known for k in unit for s in range(options.n))

        for batch in self._draw(skip=Skip(are_known, part)):
            rows: list[Row] = []
            for drawn in batch:
                prompt = prompts[drawn.prompt]
                if (prompt.name, drawn.sample) in known:
                    continue
                sample = self.device.as_sample(prompt, drawn, options)
                rows.append(
                    {
                        "id": prompt.name,
                        "sample": drawn.sample,
                        "prompt_token_ids": prompt.ids.tolist(),
                        "token_ids": drawn.tokens.tolist(),
                        "text": sample.text,
                        "logprob": sample.logprob,
                        "sampled_logprob": sample.sampled_logprob,
                        "finish": drawn.finish,
                    }
                )
            yield rows


class _EndpointSampler:
    """Draws from a model behind an endpoint: each sample is a separate request with a separate seed.

    The endpoint rejects prompts that are too long.

    Raises:
      RunError: the temperature would not be sent.
    """

    device: Any = None
    posts_dropped: list[int] | None = None

    def __init__(
        self,
        asked: EndpointOptions,
        comparisons: Sequence[Comparison],
        options: SampleOptions,
        profile_posts: int,
    ) -> None:
        if asked.no_temperature and options.temperature != 1:
            raise RunError(
                f"--no-temperature: samples are drawn at temperature {options.temperature:g}: expected --temperature 1"
            )
        self.stop_ids = options.stop_ids or ()
        self._endpoint = Endpoint(asked, cache=None, exact=True)
        self._comparisons, self._options, self._posts = comparisons, options, profile_posts

    def identity(self) -> dict[str, Any]:
        asked = self._endpoint.options
        unknown = "revision, chat template, dtype and context of the model, which the server alone knows"
        return {"name": asked.model, "endpoint": asked.url, "model": asked.model, "unknown": unknown}

    def rows(self, known: Mapping[Any, Row], part: Part | None) -> Iterator[list[Row]]:
        """Raises RunError if the endpoint rejects a request, is down, or returns something other than a text."""
        options = self._options
        missing = [
            (comparison, number)
            for index, comparison in enumerate(self._comparisons)
            if part is None or part.has([index])
            for number in range(options.n)
            if (comparison.id, number) not in known
        ]
        # Only rules with non-default values are sent, under the names that vLLM and SGLang use.
        rules = {name: getattr(options, name) for name in ("top_p", "top_k", "min_p", "repetition_penalty")}
        plain = SampleOptions()
        more: dict[str, Any] = {name: value for name, value in rules.items() if value != getattr(plain, name)}
        more |= {"stop": list(options.stop)} if options.stop else {}
        more |= {} if options.stop_ids is None else {"stop_token_ids": list(options.stop_ids)}
        size = _AHEAD * self._endpoint.options.concurrency
        for start in range(0, len(missing), size):
            asked = missing[start : start + size]
            shown = [
                visible(comparison, profile_posts=self._posts, protocol=TextProtocol.DEFAULT)
                for comparison, _ in asked
            ]
            told = [f"{options.seed}/{number}/{comparison.id}".encode() for comparison, number in asked]
            replies = self._endpoint.ask_all(
                [one.prefix_messages for one in shown],
                temperature=options.temperature,
                max_new_tokens=options.max_new_tokens,
                seeds=[int.from_bytes(sha256(text).digest()[:4], "big") >> 1 for text in told],
                more=more,
            )
            yield [
                {
                    **dict.fromkeys(_UNKNOWN),
                    "id": comparison.id,
                    "sample": number,
                    "text": reply.text,
                    "finish": reply.finish or "unknown",
                    "prompt_tokens": reply.prompt_tokens,
                    "tokens": reply.completion_tokens,
                }
                for (comparison, number), reply in zip(asked, replies, strict=True)
            ]


def read_samples(folder: Path) -> dict[tuple[str, int], Row]:
    """Return the samples of a finished run by comparison and number, in their order.

    Raises:
      RunError: the run is not finished, or a row cannot be read.
    """
    RUNS.read_finished(folder)
    return dict(SAMPLE_ROWS.read(folder))


def _tokens(row: Row) -> int | None:
    """The number of tokens of a sample; None if an endpoint does not return it."""
    return len(row["token_ids"]) if row["token_ids"] is not None else row.get("tokens")


def _summary(
    rows: Sequence[Row], options: SampleOptions, sampler: _PolicySampler | _EndpointSampler
) -> dict[str, Any]:
    tokens = [_tokens(row) for row in rows]
    total = None if None in tokens else sum(count or 0 for count in tokens)
    asked = [
        row.get("prompt_tokens") if row["prompt_token_ids"] is None else len(row["prompt_token_ids"])
        for row in rows[:: options.n]
    ]
    logprobs = [row["logprob"] for row in rows]
    dropped = None if sampler.posts_dropped is None else [posts for posts in sampler.posts_dropped if posts]
    return {
        "n": len(asked),
        "samples": options.n,
        "tokens": total,
        "mean_tokens": None if total is None else total / len(rows),
        "prompt_tokens": None if None in asked else sum(count or 0 for count in asked),
        "mean_logprob_per_token": None if total is None or None in logprobs else sum(logprobs) / total,
        "finish": dict(Counter(row["finish"] for row in rows)),
        "empty": sum(not row["text"].strip() for row in rows),
        "posts_dropped": None if dropped is None else {"prompts": len(dropped), "posts": sum(dropped)},
        "definitions": _DEFINITIONS,
    }
