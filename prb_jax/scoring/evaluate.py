"""Score comparisons with one model and sum up, with the baselines beside it; resumable."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from prb_jax.errors import DataError, RunError, quote
from prb_jax.metrics.accuracy import ScoredRow
from prb_jax.platform.processes.agreement import check_agreement
from prb_jax.platform.processes.sharing import on_first_process, process_count
from prb_jax.records.options import flat_settings, from_flat, options_of
from prb_jax.runs import command_line
from prb_jax.runs.evaluation import CONTROL_RUNS, EVALUATION
from prb_jax.scoring.inputs import Data, Inputs, check_benchmarks, read_inputs
from prb_jax.scoring.job import open_job
from prb_jax.scoring.load import Model, model_contents, open_scorer, read_history
from prb_jax.scoring.options import EvaluateOptions
from prb_jax.scoring.run import ScoredRun, open_scored_run, session_facts
from prb_jax.scoring.summary import sum_up
from prb_jax.seams import get
from prb_jax.trees.shorten import TooLongError
from prb_jax.version import computing_versions


@dataclass(frozen=True)
class Evaluation:
    """The result of `prb_jax.evaluate`.

    Attributes:
      out: the run folder; None where none was asked for.
      summary: what `summary.json` holds.
      rows: one for each comparison, in the order of the input.
    """

    out: Path | None
    summary: dict[str, Any]
    rows: Sequence[ScoredRow]

    def __repr__(self) -> str:
        shown = {name: self.summary.get(name) for name in ("model", "n", "accuracy", "ci95", "user_accuracy")}
        facts = ", ".join(f"{name}={quote(value)}" for name, value in shown.items())
        return f"Evaluation({facts}, out={quote(str(self.out))})"


def evaluate(
    model: Model,
    data: Data | Inputs,
    *,
    out: str | Path | None = None,
    name: str | None = None,
    profile_posts: int | None = None,
    protocol: str | None = None,
    max_length: int | None = None,
    too_long: str = "error",
    controls: str | None = None,
    history: Data | None = None,
    aspects: str | None = None,
    subset: str | None = None,
    limit: int | None = None,
    seed: int = 0,
    mesh: str | None = None,
    dtype: str | None = None,
    revision: str | None = None,
    tokenizer: str | Path | Any = None,
    chat_template: str | None = None,
    readout: str | None = None,
    quantize: str | None = None,
    attention: str = "auto",
    batch_tokens: int | None = None,
    progress: bool = True,
    wandb: str | None = None,
    part: str | None = None,
) -> Evaluation:
    """Score every comparison, and write `run.json`, `scores.jsonl` and `summary.json` to `out`.

    A run that was killed is continued by the same call. It is refused where anything that decides the
    result differs: the model (its `identity` but for the name), the data (names and contents of its files, `subset`,
    `limit`), `profile_posts`, `protocol`, `max_length`, `seed` and the versions of the libraries that
    compute. The mesh, the devices, `attention`, `batch_tokens`, `progress` and the folder of the data may differ.

    Args:
      model: a loaded model (`prb_jax.load`), any `prb_jax.scoring.scorer.Scorer` or an object like `StreamsScores`
        beside it, what `prb_jax.load` takes (a baseline such as "baseline:length" too), a `flax.nnx.Module` with the
        method of `ScoresTokens` in the same file, or a function that gives K numbers for a comparison of K responses.
      data: comparisons with labels, or records of them (`prb_jax.records.intake.Records`); or the name of a file,
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
      controls: the same model scores the comparisons again, shown no profile and no user ("blind"), the profile of
        another user ("swap"), "all" of these, or "none"; where not given "blind" for a model that is shown something of
        its users. Each has its run folder in `out`/controls; the summary says under "controls" what the model gains.
      history: labelled comparisons, as `data`, of which a fitted method of personalisation learns the users, or a
        folder of their saved states; where not given, each comparison is scored after the same user's comparisons
        before it in the data.
      aspects: what stands in the prompt as the user's wishes: "planned:DIR", the texts of a run of `prb aspects`; or
        "oracle", the true rubric of the data, for an upper bound that is marked as one.
      subset: reads one subset of named data.
      limit: at most so many comparisons, of each named source. For testing only.
      seed: of the resampling of benchmark scores, and of the other users of "swap".
      mesh, dtype, revision, tokenizer, chat_template, readout, quantize, attention: for `prb_jax.load`, where
        `model` is a name. A module takes `mesh`, `tokenizer` (a folder, hub id or transformers tokenizer; it needs
        one) and `chat_template`.
      batch_tokens: tokens computed at a time; chosen from the model and the device if not given.
      progress: shows progress on standard error.
      wandb: a project of Weights & Biases, which gets the summary; `out` names the run there.
      part: "I/N" scores the I-th of N parts of the batches alone, for jobs that know nothing of each other: each has
        its own `out`, and :func:`prb_jax.merge` makes one run of them. The summary of a part says its part and rows.

    Raises:
      RunError: `out` cannot be used, is full, or holds another run; wandb is asked for and cannot be used.
      DataError: the data cannot be used, or changed while it was being scored.
      CheckpointError, MeshError: the model cannot be loaded.
    """
    return run_evaluation(model, data, from_flat(EvaluateOptions, locals()))


def run_evaluation(model: Model, data: Data | Inputs, options: EvaluateOptions) -> Evaluation:
    """As :func:`evaluate`, with all choices in one object."""
    log = _check_outputs(options)
    inputs = (
        data if isinstance(data, Inputs) else read_inputs(data, subset=options.subset, limit=options.limit)
    )
    if options.aspects is not None:
        inputs = get("evaluation", "aspects").value(inputs, options.aspects)
    history = read_history(options.history)
    check_benchmarks(inputs)
    _check_processes(model, inputs, options)
    recorded = options.out is not None
    scorer = open_scorer(model, options.loading, name=options.name, recorded=recorded, history=history)
    job = open_job(scorer, inputs, options)
    jobs = [job, *get("evaluation", "controls").value(job, options.controls)]
    session, decided = session_facts(scorer, options.batch_tokens), job.decided
    runs: list[ScoredRun] = []
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(TemporaryDirectory(prefix="prb-")))
        for one in jobs:
            place, named = folder, {}
            if one.control is not None:
                place, named = folder / CONTROL_RUNS / one.control, {"control": one.control}
            one = replace(one, scorer=one.scorer.kept_in(place), decided={**decided, **named})
            run = stack.enter_context(open_scored_run(one, place, session=session))
            try:
                run.score(batch_tokens=options.batch_tokens, progress=options.progress)
            except TooLongError as error:
                hint = "--too-long skip leaves such comparisons out, and names them"
                raise DataError(f"{error}; {hint}") from error
            if not runs and inputs.reading:  # what the data is, is known now
                decided = {**decided, "data": inputs.to_json()}
                run.settle(decided)
            runs.append(run)
        summary = on_first_process(lambda: sum_up(runs, folder))
    if log is not None:
        log(summary)
    return Evaluation(out=options.folder, summary=summary, rows=runs[0].rows)


def _check_outputs(options: EvaluateOptions) -> Callable[[Mapping[str, Any]], None] | None:
    """Make sure, before anything is computed, that results can be written; return what writes the summary to Weights &
    Biases, if asked for, on the first process."""
    started: list[Any] = []

    def check() -> None:
        if options.folder is not None:
            EVALUATION.check(options.folder)
        if options.wandb is None:
            return
        if options.folder is None:
            raise RunError("wandb: needs out, the run folder, whose name the run gets on Weights & Biases")
        settings = {"command": shlex.join(command_line()), **asdict(options.view), "limit": options.limit}
        logger = get("evaluation", "wandb").value
        started.append(logger(options.wandb, options.folder, settings, option=f"--wandb {options.wandb}"))

    on_first_process(check)
    return next(iter(started), None)


def _check_processes(model: Model, inputs: Inputs, options: EvaluateOptions) -> None:
    """Compare the choices of several processes before a model is loaded: unequal ones may wait for ever."""
    if process_count() == 1:
        return
    chosen, known = flat_settings(options), options_of(EvaluateOptions)
    check_agreement(
        {
            "verb": "evaluate",
            **{key.rpartition(".")[2]: chosen[key] for key in known if known[key].effect == "result"},
            "data": inputs.to_json(whole=False),
            "model": model_contents(model, options.loading.revision),
            "versions": computing_versions(plain=False),
        }
    )
