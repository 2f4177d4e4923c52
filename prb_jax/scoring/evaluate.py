"""Scores a model on comparisons and sums up, with the baselines beside it; resumable."""

import contextlib
import platform
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

import prb_jax
from prb_jax.data.comparison import Comparison
from prb_jax.errors import DataError, RunError
from prb_jax.metrics.accuracy import ScoredRow
from prb_jax.metrics.summary import summarise
from prb_jax.scoring.baselines import BASELINES, score_baseline
from prb_jax.scoring.benchmarks import (
    BENCHMARKS_DEFINITION,
    benchmark_scores,
    check_benchmarks,
    write_result_files,
)
from prb_jax.scoring.inputs import Data, check_unchanged, read_inputs
from prb_jax.scoring.processes import on_first_process, process_count, process_index
from prb_jax.scoring.progress import progress as show_progress
from prb_jax.scoring.runs import (
    SUMMARY,
    RunFolder,
    append_rows,
    check_folder,
    finish_scores,
    open_run,
    write_json,
)
from prb_jax.scoring.scored import KnowsUsers, ScoredBatch, Scorer
from prb_jax.scoring.too_long import LEFT_OUT_DEFINITION, check_too_long, leave_out
from prb_jax.text.protocol import Protocol, parse_protocol
from prb_jax.trees.shorten import TooLongError
from prb_jax.trees.tree import Truncation

READOUT_DEFINITION = "how the model's outputs become one score: --readout"

DEFAULT_PROFILE_POSTS = {Protocol.DEFAULT: 10, Protocol.PAPER: 0}
"""Posts of the user's profile that a model sees where the caller does not say: the best-of-N scripts
of Personalised RewardBench show ten, its pointwise script none."""


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate`.

    Attributes:
      out: the run folder.
      summary: what `summary.json` holds.
      rows: one for each comparison, in the order of the input.
    """

    out: Path
    summary: dict[str, Any]
    rows: list[ScoredRow]


@dataclass(frozen=True)
class BaselineScorer:
    """A built-in baseline as a scorer: no weights, no tokens, the whole profile."""

    name: str

    def identity(self) -> Mapping[str, Any]:
        """The name decides everything."""
        return {"name": self.name}

    def stream(self, comparisons: Sequence[Comparison], *, skip: Any, **_: Any) -> Iterator[ScoredBatch]:
        """Scores everything as one batch."""
        indices = range(len(comparisons))
        if skip(indices):
            return
        scores = score_baseline(self.name, comparisons)
        yield ScoredBatch(indices, scores, [0] * len(indices), [Truncation()] * len(indices))


def evaluate(
    model: "Scorer | str | Path",
    data: Data,
    *,
    out: str | Path,
    profile_posts: int | None = None,
    protocol: str = Protocol.DEFAULT,
    max_length: int | None = None,
    too_long: str = "error",
    subset: str | None = None,
    limit: int | None = None,
    seed: int = 0,
    mesh: str | None = None,
    dtype: str | None = None,
    revision: str | None = None,
    tokenizer: str | None = None,
    chat_template: str | None = None,
    readout: str | None = None,
    batch_tokens: int | None = None,
    progress: bool = True,
    command: Sequence[str] = (),
) -> Evaluation:
    """Scores every comparison, writes `run.json`, `scores.jsonl` and `summary.json` to `out`.

    A run that was killed is continued by the same call. It is refused where anything that decides the
    result differs: the model (its `identity` but for the name), the data (names and contents of its files, `subset`,
    `limit`), `profile_posts`, `protocol`, `max_length`, `seed` and the versions of the libraries that
    compute. The mesh, the devices, `batch_tokens`, `progress` and the folder of the data may differ.

    Args:
      model: a loaded model (`prb_jax.load`), any `Scorer`, the name of a baseline ("baseline:length",
        "baseline:random", "baseline:profile-overlap"), or what `prb_jax.load` takes.
      data: comparisons with labels; or the name of a file, folder, benchmark, hub data set or generated
        benchmark, or several names. A named file must stay as it is until the end. What a benchmark's own
        rule says is in the summary under "benchmarks"; RewardBench's result files are written beside it.
      out: the run folder.
      profile_posts: how many posts of the user's profile the model sees; `DEFAULT_PROFILE_POSTS` of
        the protocol if not given. Baselines always see the whole profile.
      protocol: "default" or "paper".
      max_length: longest conversation in tokens; the model's own limit if not given.
      too_long: a response that leaves no room for its prompt within that limit is an "error"; "skip" leaves the
        comparison out, counted in the summary under "left_out" and named in `left_out.jsonl`.
      subset: reads one subset of named data.
      limit: at most so many comparisons, of each named source. For testing only.
      seed: of the bootstrap.
      mesh, dtype, revision, tokenizer, chat_template, readout: for `prb_jax.load`, where `model` is a name.
      batch_tokens: tokens computed at a time; chosen from the model and the device if not given.
      progress: shows progress on standard error.
      command: the command line, for the record.

    Raises:
      RunError: `out` cannot be used, is full, or holds another run.
      DataError: the data cannot be used, or changed while it was being scored.
      CheckpointError, MeshError: the model cannot be loaded.
    """
    rules = parse_protocol(protocol)
    posts = DEFAULT_PROFILE_POSTS[rules] if profile_posts is None else profile_posts
    if posts < 0:
        raise RunError(f"profile_posts: expected 0 or more, found {posts}")
    if max_length is not None and max_length < 1:
        raise RunError(f"max_length: expected a positive number of tokens, found {max_length}")
    on_first_process(lambda: check_folder(out))
    inputs = read_inputs(data, subset=subset, limit=limit)
    check_benchmarks(inputs)
    scorer = _scorer(
        model,
        mesh=mesh,
        dtype=dtype,
        revision=revision,
        tokenizer=tokenizer,
        chat_template=chat_template,
        readout=readout,
    )
    if isinstance(scorer, BaselineScorer):
        _refuse_for_baseline(
            scorer.name,
            profile_posts=profile_posts,
            protocol=None if rules is Protocol.DEFAULT else protocol,
            max_length=max_length,
            batch_tokens=batch_tokens,
        )
    check_too_long(too_long, scorer, protocol=rules)
    identity = dict(scorer.identity())
    name = str(identity.get("name", "model"))
    decides = {
        # A folder that was moved is still the same model; a baseline is nothing but its name.
        "model": {key: value for key, value in identity.items() if key != "name"} or {"name": name},
        "data": {
            "sources": list(inputs.sources.values()),
            "subset": subset,
            "comparisons": len(inputs.comparisons),
            "sha256": inputs.sha256,
        },
        "protocol": rules.value,
        "profile_posts": posts,
        "max_length": max_length,
        "limit": limit,
        "seed": seed,
        "versions": _versions(baseline=isinstance(scorer, BaselineScorer)),
    }
    left_out = None
    if too_long == "skip":
        decides["too_long"] = too_long
        inputs, left_out = leave_out(inputs, scorer, protocol=rules, max_length=max_length)
        check_benchmarks(inputs)
    notes = {"command": list(command), "model": name, "data": list(inputs.sources)}
    options: dict[str, Any] = {"profile_posts": posts, "protocol": rules.value, "max_length": max_length}
    if batch_tokens is not None:
        options["batch_tokens"] = batch_tokens
    with contextlib.ExitStack() as stack:
        opened: list[RunFolder] = []

        def open_folder() -> dict[str, dict[str, Any]]:
            session = _session(scorer, batch_tokens)
            folder = open_run(out, inputs=decides, session=session, notes=notes)
            opened.append(stack.enter_context(folder))
            return {name: asdict(row) for name, row in opened[0].rows.items()}

        known = {name: ScoredRow(**row) for name, row in on_first_process(open_folder).items()}
        try:
            for batch in _score(
                scorer, inputs.comparisons, known, label=name, progress=progress, options=options
            ):
                for folder in opened:
                    append_rows(folder, batch)
                known.update((row.id, row) for row in batch)
        except TooLongError as error:
            raise DataError(
                f"{error}; --too-long skip leaves such comparisons out, and names them"
            ) from error

        def finish() -> dict[str, Any]:
            (folder,) = opened
            rows = finish_scores(folder, ids=[comparison.id for comparison in inputs.comparisons])
            check_unchanged(inputs)
            baselines = _baselines(inputs.comparisons)
            summary = _summary(rows, baselines, name=name, decides=decides)
            if "readout" in identity:
                summary["readout"] = identity["readout"]
                summary["definitions"] = summary["definitions"] | {"readout": READOUT_DEFINITION}
            if inputs.benchmarks:
                summary["benchmarks"] = benchmark_scores(inputs, rows, baselines)
                summary["definitions"] = summary["definitions"] | {"benchmarks": BENCHMARKS_DEFINITION}
            if (
                isinstance(scorer, KnowsUsers)
                and (unknown := scorer.unknown_users(inputs.comparisons)) is not None
            ):
                summary["unknown_users"] = unknown
            if left_out is not None:
                left_out.write(folder.path)
                for benchmark, count in left_out.benchmarks.items():
                    summary["benchmarks"][benchmark]["left_out"] = count
                summary["left_out"] = left_out.to_json()
                summary["definitions"] = summary["definitions"] | {"left_out": LEFT_OUT_DEFINITION}
            write_result_files(
                folder.path, scorer, inputs, rows, name=name, profile_posts=posts, protocol=rules
            )
            write_json(folder.path / SUMMARY, summary)
            return summary

        summary = on_first_process(finish)
    return Evaluation(
        out=Path(out), summary=summary, rows=[known[comparison.id] for comparison in inputs.comparisons]
    )


def _score(
    scorer: Scorer,
    comparisons: Sequence[Comparison],
    known: Mapping[str, ScoredRow],
    *,
    label: str,
    progress: bool,
    options: Mapping[str, Any],
) -> Generator[list[ScoredRow]]:
    """The rows of one batch after another, without the batches whose rows are all known."""
    finished = [comparison.id in known for comparison in comparisons]
    batches = scorer.stream(
        comparisons, skip=lambda indices: all(finished[index] for index in indices), **options
    )
    shown = progress and process_index() == 0
    with show_progress(label, total=len(comparisons), done=sum(finished), enabled=shown) as advance:
        for batch in batches:
            rows = [
                _row(comparisons[index], scores, tokens, truncation)
                for index, scores, tokens, truncation in zip(
                    batch.indices, batch.scores, batch.tokens, batch.truncation, strict=True
                )
                if not finished[index]
            ]
            yield rows
            advance(len(rows), sum(row.tokens for row in rows))


def _row(comparison: Comparison, scores: np.ndarray, tokens: int, truncation: Truncation) -> ScoredRow:
    labels = comparison.labels or ()
    if len(scores) != len(labels):
        raise RunError(
            f"comparison {comparison.id!r}: the model gave {len(scores)} scores, expected {len(labels)}"
        )
    return ScoredRow(
        id=comparison.id,
        subset=comparison.subset,
        user_id=comparison.user_id,
        scores=[float(score) for score in scores],
        labels=list(labels),
        tokens=int(tokens),
        truncated=asdict(truncation) if truncation.any else 0,
    )


def _baselines(comparisons: Sequence[Comparison]) -> dict[str, list[ScoredRow]]:
    """The rows of every baseline, in the order of the comparisons."""
    baselines: dict[str, list[ScoredRow]] = {}
    for baseline in BASELINES:
        scored = zip(comparisons, score_baseline(baseline, comparisons), strict=True)
        baselines[baseline] = [_row(comparison, scores, 0, Truncation()) for comparison, scores in scored]
    return baselines


def _summary(
    rows: Sequence[ScoredRow],
    baselines: Mapping[str, Sequence[ScoredRow]],
    *,
    name: str,
    decides: Mapping[str, Any],
) -> dict[str, Any]:
    """The model's numbers, and the baselines' on the same comparisons."""
    return {
        "model": name,
        "protocol": decides["protocol"],
        "profile_posts": decides["profile_posts"],
        "max_length": decides["max_length"],
        "limit": decides["limit"],
        **summarise(rows, baselines=baselines, seed=decides["seed"]),
    }


def _scorer(model: "Scorer | str | Path", **options: Any) -> Scorer:
    given = [name for name, value in options.items() if value is not None]
    if isinstance(model, str) and model.startswith("baseline:"):
        if model not in BASELINES:
            raise RunError(f"unknown baseline {model!r}; there are {', '.join(sorted(BASELINES))}")
        _refuse_for_baseline(model, **options)
        return BaselineScorer(model)
    if isinstance(model, str | Path):
        from prb_jax.scoring.reward_model import load

        return load(str(model), **options)
    if given:
        raise RunError(f"{', '.join(given)}: decided where the model was loaded; leave out here")
    return model


def _refuse_for_baseline(baseline: str, **options: Any) -> None:
    """Raises RunError for what would have no effect: a baseline has no weights, no tokens and no protocol."""
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise RunError(
            f"{', '.join(given)}: {baseline} reads the whole text of profile, prompt and responses, and computes on "
            "no device: leave out here"
        )


def _versions(*, baseline: bool) -> dict[str, str | None]:
    """Versions of everything that computes."""
    packages = ("numpy",) if baseline else ("numpy", "jax", "jaxlib", "flax", "transformers", "tokenizers")
    versions: dict[str, str | None] = {"prb_jax": prb_jax.__version__}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return versions


def _session(scorer: Scorer, batch_tokens: int | None) -> dict[str, Any]:
    """How the run is done this time; results do not depend on it."""
    session: dict[str, Any] = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "batch_tokens": batch_tokens,
    }
    mesh = getattr(scorer, "mesh", None)
    if mesh is not None:
        devices = mesh.devices.flatten().tolist()
        session["mesh"] = dict(mesh.shape)
        session["devices"] = {
            "platform": devices[0].platform,
            "kind": devices[0].device_kind,
            "count": len(devices),
            "processes": process_count(),
        }
    return session
