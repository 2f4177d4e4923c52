"""Scores a model on comparisons and sums up, with the baselines beside it; resumable."""

import contextlib
import functools
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from prb_jax.data.comparison import Comparison
from prb_jax.data.writing import write_json
from prb_jax.errors import DataError, RunError, quote
from prb_jax.metrics.accuracy import ScoredRow
from prb_jax.metrics.summary import summarise
from prb_jax.processes.agreement import check_agreement
from prb_jax.processes.sharing import on_first_process, process_count, process_index
from prb_jax.runs.folder import SUMMARY, check_folder, finish_scores
from prb_jax.scoring.baselines import BASELINES, score_baseline
from prb_jax.scoring.benchmarks import (
    BENCHMARKS_DEFINITION,
    benchmark_scores,
    check_benchmarks,
    write_result_files,
)
from prb_jax.scoring.inputs import Data, Inputs, check_unchanged, read_inputs
from prb_jax.scoring.plain import (
    PlainScorer,
    ScoreFunction,
    baseline_scorer,
    function_scorer,
    refuse_options,
)
from prb_jax.scoring.quantized import (
    QUANTIZATION_DEFINITION,
    UNQUANTIZED,
    check_reference,
    quantization_figures,
    without_quantization,
)
from prb_jax.scoring.scored import KnowsUsers, KnowsView, Quantized, Remarks, Scorer
from prb_jax.scoring.scored_run import ScoredRun, open_scored_run, scored_row
from prb_jax.scoring.too_long import LEFT_OUT_DEFINITION, LeftOut, check_too_long, leave_out
from prb_jax.text.protocol import TextProtocol
from prb_jax.text.view import View, choose_view
from prb_jax.trees.shorten import TooLongError
from prb_jax.trees.tree import Truncation
from prb_jax.version import versions

READOUT_DEFINITION = "how the model's outputs become one score: --readout"


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate`.

    Attributes:
      out: the run folder; None where none was asked for.
      summary: what `summary.json` holds.
      rows: one for each comparison, in the order of the input.
    """

    out: Path | None
    summary: dict[str, Any]
    rows: list[ScoredRow]

    def __repr__(self) -> str:
        shown = {name: self.summary.get(name) for name in ("model", "n", "accuracy", "ci95", "user_accuracy")}
        facts = ", ".join(f"{name}={quote(value)}" for name, value in shown.items())
        return f"Evaluation({facts}, out={quote(str(self.out))})"


def evaluate(
    model: "Scorer | ScoreFunction | str | Path",
    data: Data,
    *,
    out: str | Path | None = None,
    name: str | None = None,
    profile_posts: int | None = None,
    protocol: str | None = None,
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
    quantize: str | None = None,
    attention: str = "auto",
    reference: bool | None = None,
    batch_tokens: int | None = None,
    progress: bool = True,
    command: Sequence[str] = (),
) -> Evaluation:
    """Score every comparison, and write `run.json`, `scores.jsonl` and `summary.json` to `out`.

    A run that was killed is continued by the same call. It is refused where anything that decides the
    result differs: the model (its `identity` but for the name), the data (names and contents of its files, `subset`,
    `limit`), `profile_posts`, `protocol`, `max_length`, `seed` and the versions of the libraries that
    compute. The mesh, the devices, `attention`, `batch_tokens`, `progress` and the folder of the data may differ.

    Args:
      model: a loaded model (`prb_jax.load`), any `Scorer`, what `prb_jax.load` takes (a baseline such as
        "baseline:length" too), or a function that gives K numbers for a comparison of K responses.
      data: comparisons with labels, or records of them (`prb_jax.data.records.Records`); or the name of a file,
        folder, benchmark, hub data set or generated benchmark, or several names. A named file must stay as it is
        until the end. What a benchmark's own rule says is in the summary under "benchmarks"; RewardBench's result
        files are written beside it.
      out: the run folder; without one nothing is kept but the result.
      name: of the model in tables. A function is known by it, or else by its qualified name: a change of its
        code is not seen, so a changed function needs another name or folder.
      profile_posts, protocol, max_length: what the model is shown, as of `RewardModel.score`: where not given, as
        it was trained. What is given and differs is warned of, and named in `run.json` under "overrides".
        Baselines and functions always see the whole profile.
      too_long: a response that leaves no room for its prompt within that limit is an "error"; "skip" leaves the
        comparison out, counted in the summary under "left_out" and named in `left_out.jsonl`.
      subset: reads one subset of named data.
      limit: at most so many comparisons, of each named source. For testing only.
      seed: of the bootstrap.
      mesh, dtype, revision, tokenizer, chat_template, readout, quantize, attention: for `prb_jax.load`, where
        `model` is a name.
      reference: of a model quantised here: whether the unquantised one scores the same rows too, so that the
        summary can say what quantising changes; it does unless this is False. It is loaded afterwards, when
        the other is freed, and its run folder is `out`/unquantized.
      batch_tokens: tokens computed at a time; chosen from the model and the device if not given.
      progress: shows progress on standard error.
      command: the command line, for the record.

    Raises:
      RunError: `out` cannot be used, is full, or holds another run.
      DataError: the data cannot be used, or changed while it was being scored.
      CheckpointError, MeshError: the model cannot be loaded.
    """
    asked: dict[str, Any] = {
        "profile_posts": profile_posts,
        "protocol": protocol,
        "max_length": max_length,
    }
    chosen = choose_view(None, **asked)  # what cannot be is refused before anything is read
    check_reference(reference, quantize=quantize)
    on_first_process(lambda: None if out is None else check_folder(out))
    inputs = read_inputs(data, subset=subset, limit=limit)
    check_benchmarks(inputs)
    loading: dict[str, Any] = {
        "mesh": mesh,
        "dtype": dtype,
        "revision": revision,
        "tokenizer": tokenizer,
        "chat_template": chat_template,
        "readout": readout,
        "attention": None if attention == "auto" else attention,
    }
    data_read = {
        "sources": list(inputs.sources.values()),
        "subset": subset,
        "comparisons": len(inputs.comparisons),
        "sha256": inputs.sha256,
    }
    if process_count() > 1:
        # Before a model is loaded: processes that disagree may wait for each other for ever.
        given = {
            "verb": "evaluate",
            "limit": limit,
            "seed": seed,
            "too_long": too_long,
            **_shown(chosen.view),
        }
        given |= {option: loading[option] for option in ("mesh", "dtype", "readout", "attention")}
        given |= {"quantize": quantize, "reference": reference, "batch_tokens": batch_tokens}
        read = {"data": data_read, "model": _contents(model, revision), "versions": _versions(plain=False)}
        check_agreement(given | read)
    scorer = _scorer(model, out=out, name=name, **loading, quantize=quantize)
    compare = quantize is not None and reference is not False
    if isinstance(scorer, PlainScorer):
        refuse_options(
            scorer.name,
            **asked | {"protocol": None if protocol == TextProtocol.DEFAULT else protocol},
            batch_tokens=batch_tokens,
        )
    identity = dict(scorer.identity())
    known_as = str(identity.get("name", "model"))
    name = name or known_as
    if isinstance(scorer, KnowsView):
        chosen = scorer.choose_view(**asked)
        chosen.warn(known_as)
    view = chosen.view
    scorer = _accepting(scorer, view)
    check_too_long(too_long, scorer, view=view)
    remarks = scorer.remarks(protocol=view.protocol.value) if isinstance(scorer, Remarks) else []
    if process_index() == 0:
        for remark in remarks:
            print(f"prb: {remark}", file=sys.stderr)
    decides = {
        # A folder that was moved is still the same model; a baseline is nothing but its name.
        "model": {key: value for key, value in identity.items() if key != "name"} or {"name": known_as},
        "data": data_read,
        **_shown(view),
        "limit": limit,
        "seed": seed,
        "versions": _versions(plain=isinstance(scorer, PlainScorer)),
    }
    check_agreement(decides)  # the tokenizer too, and a model that was given as an object
    left_out = None
    if too_long == "skip":
        decides["too_long"] = too_long
        inputs, left_out = leave_out(inputs, scorer, view=view)
        check_benchmarks(inputs)
    folder = {
        "session": _session(scorer, batch_tokens),
        "notes": {
            "command": list(command),
            "model": name,
            "data": list(inputs.sources),
            **({"overrides": chosen.overrides} if chosen.overrides else {}),
            **({"remarks": remarks} if remarks else {}),
        },
    }
    options = _shown(view)
    if batch_tokens is not None:
        options["batch_tokens"] = batch_tokens
    with contextlib.ExitStack() as stack:
        kept = Path(stack.enter_context(TemporaryDirectory(prefix="prb-")) if out is None else out)
        run = stack.enter_context(open_scored_run(kept, inputs=decides, **folder))
        try:
            run.score(scorer, inputs.comparisons, label=name, progress=progress, options=options)
        except TooLongError as error:
            raise DataError(
                f"{error}; --too-long skip leaves such comparisons out, and names them"
            ) from error
        plain: tuple[ScoredRun, dict[str, Any]] | None = None
        if compare:
            assert isinstance(scorer, Quantized)
            scorer = scorer.without_weights()  # both models are never in memory at once
            plain_decides = decides | {"model": without_quantization(decides["model"])}
            plain_run = stack.enter_context(
                open_scored_run(kept / UNQUANTIZED, inputs=plain_decides, **folder)
            )
            if plain_run.lacks(inputs.comparisons):
                label = f"{name}, unquantized"
                plain_scorer = _accepting(_scorer(model, out=out, name=None, **loading), view)
                plain_run.score(
                    plain_scorer, inputs.comparisons, label=label, progress=progress, options=options
                )
            plain = plain_run, plain_decides

        def finish() -> dict[str, Any]:
            check_unchanged(inputs)
            baselines = _baselines(inputs.comparisons)
            finished = functools.partial(
                _finish, scorer=scorer, inputs=inputs, baselines=baselines, name=name, left_out=left_out
            )
            reference_rows = None if plain is None else finished(plain[0], decides=plain[1])[0]
            _, summary = finished(run, decides=decides, reference=reference_rows)
            return summary

        summary = on_first_process(finish)
    rows = [run.rows[comparison.id] for comparison in inputs.comparisons]
    return Evaluation(out=None if out is None else kept, summary=summary, rows=rows)


def _finish(
    run: ScoredRun,
    *,
    scorer: Scorer,
    inputs: Inputs,
    baselines: Mapping[str, Sequence[ScoredRow]],
    name: str,
    decides: Mapping[str, Any],
    left_out: LeftOut | None,
    reference: Sequence[ScoredRow] | None = None,
) -> tuple[list[ScoredRow], dict[str, Any]]:
    """Puts the rows in order and writes the summary and what else belongs to the folder."""
    folder = run.folder
    assert folder is not None
    rows = finish_scores(folder, ids=[comparison.id for comparison in inputs.comparisons])
    summary = _summary(rows, baselines, name=name, decides=decides)
    if (readout := scorer.identity().get("readout")) is not None:
        summary["readout"] = readout
        summary["definitions"] = summary["definitions"] | {"readout": READOUT_DEFINITION}
    if inputs.benchmarks:
        summary["benchmarks"] = benchmark_scores(inputs, rows, baselines)
        summary["definitions"] = summary["definitions"] | {"benchmarks": BENCHMARKS_DEFINITION}
    if isinstance(scorer, Quantized) and "quantize" in decides["model"]:
        summary["quantization"] = quantization_figures(scorer, rows, reference, seed=decides["seed"])
        summary["definitions"] = summary["definitions"] | {"quantization": QUANTIZATION_DEFINITION}
    if isinstance(scorer, KnowsUsers) and (unknown := scorer.unknown_users(inputs.comparisons)) is not None:
        summary["unknown_users"] = unknown
    if left_out is not None:
        left_out.write(folder.path)
        for benchmark, count in left_out.benchmarks.items():
            summary["benchmarks"][benchmark]["left_out"] = count
        summary["left_out"] = left_out.to_json()
        summary["definitions"] = summary["definitions"] | {"left_out": LEFT_OUT_DEFINITION}
    write_result_files(
        folder.path,
        scorer,
        inputs,
        rows,
        name=name,
        view=View(decides["profile_posts"], TextProtocol(decides["protocol"])),
    )
    write_json(folder.path / SUMMARY, summary)
    return rows, summary


def _baselines(comparisons: Sequence[Comparison]) -> dict[str, list[ScoredRow]]:
    """The rows of every baseline, in the order of the comparisons."""
    baselines: dict[str, list[ScoredRow]] = {}
    for baseline in BASELINES:
        scored = zip(comparisons, score_baseline(baseline, comparisons), strict=True)
        baselines[baseline] = [
            scored_row(comparison, scores, 0, Truncation()) for comparison, scores in scored
        ]
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


def _contents(model: "Scorer | ScoreFunction | str | Path", revision: str | None) -> Any:
    """Digests of the files of a model that is not loaded yet; a baseline's name."""
    if not isinstance(model, str | Path) or str(model).startswith("baseline:"):
        return model if isinstance(model, str) else None
    from prb_jax.checkpoints.locate import describe, locate

    return describe(locate(model, revision=revision))


def _scorer(
    model: "Scorer | ScoreFunction | str | Path", *, out: str | Path | None, name: str | None, **options: Any
) -> Scorer:
    given = {option: value for option, value in options.items() if value is not None}
    if isinstance(model, str) and model.startswith("baseline:"):
        if "quantize" in given:
            raise RunError(f"quantize: {model} has no weights; leave it out")
        return baseline_scorer(model, **given)
    if isinstance(model, str | Path):
        from prb_jax.scoring.reward_model import load

        return load(str(model), **given)
    if given:
        raise RunError(f"{', '.join(given)}: decided where the model was loaded; leave out here")
    if hasattr(model, "stream"):
        return cast(Scorer, model)
    if not callable(model):
        raise RunError(f"model: expected a model, a name or a function, found {type(model).__name__}")
    scorer = function_scorer(model, name=name)
    if out is not None and name is None and "<lambda>" in scorer.name:
        raise RunError(f"{scorer.name}: a lambda has no name that tells it from others: give name=...")
    return scorer


def _shown(view: View) -> dict[str, Any]:
    return {
        "protocol": view.protocol.value,
        "profile_posts": view.profile_posts,
        "max_length": view.max_length,
    }


def _accepting(scorer: Scorer, view: View) -> Scorer:
    return scorer.accepting(view) if isinstance(scorer, KnowsView) else scorer


def _versions(*, plain: bool) -> dict[str, str | None]:
    """Versions of everything that computes."""
    packages = ("numpy",) if plain else ("numpy", "jax", "jaxlib", "flax", "transformers", "tokenizers")
    return versions(packages)


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
        session["attention"] = getattr(scorer, "attention", None)
        session["devices"] = {
            "platform": devices[0].platform,
            "kind": devices[0].device_kind,
            "count": len(devices),
            "processes": process_count(),
        }
    return session
