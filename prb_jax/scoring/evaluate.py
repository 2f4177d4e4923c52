"""Score comparisons with one model and summarise the results, with the baselines beside it; resumable."""

from __future__ import annotations

import contextlib
import inspect
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack

from prb_jax.errors import DataError, RunError, public_dir, quote, refuse_unknown
from prb_jax.metrics.rows import ScoredRow
from prb_jax.models.readouts.load_options import LoadChoices, LoadOptions
from prb_jax.platform.processes.sharing import on_first_process, process_count
from prb_jax.records.options import from_flat
from prb_jax.runs.evaluation import CONTROL_RUNS, EVALUATION
from prb_jax.runs.kind import command_line
from prb_jax.scoring.inputs import Inputs, open_job, read_inputs, warn_of_cuts
from prb_jax.scoring.open_scorer import Model, open_scorer
from prb_jax.scoring.options import Data, EvaluateOptions
from prb_jax.scoring.run import ScoredRun, open_scored_run, session_facts
from prb_jax.seams import get
from prb_jax.trees.tree import TooLongError


@dataclass(frozen=True)
class Evaluation:
    """The result of `prb_jax.evaluate`.

    Attributes:
      out: The run folder; None if the call named no folder.
      summary: Contents of `summary.json`.
      rows: One row for each comparison, in the order of the input.
    """

    out: Path | None
    summary: dict[str, Any]
    rows: Sequence[ScoredRow]

    def __repr__(self) -> str:
        shown = {name: self.summary.get(name) for name in ("model", "n", "accuracy", "ci95", "user_accuracy")}
        shown["out"] = None if self.out is None else str(self.out)
        facts = ", ".join(f"{name}={quote(value)}" for name, value in shown.items() if value is not None)
        return f"Evaluation({facts})"

    __dir__ = public_dir


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
    batch_tokens: int | None = None,
    progress: bool = True,
    wandb: str | None = None,
    part: str | None = None,
    **loading: Unpack[LoadChoices],
) -> Evaluation:
    """Score every comparison, and write `run.json`, `scores.jsonl` and `summary.json` to `out`.

    The same call continues a killed run, and fails if anything that decides the result differs. `docs/evaluate.md`
    explains every option.

    Args:
      model: Model of `prb_jax.load`, a name for it, any `Scorer` or `flax.nnx.Module` with `score_tokens`, or a
        function that returns K numbers for a comparison of K responses.
      data: Labelled comparisons or records; or one or several names of files, folders, benchmarks, hub data sets.
      out: Run folder; if not given, nothing is kept on disk.
      name: Name of the model in tables; it identifies a function, whose code is not compared.
      profile_posts, protocol, max_length: View of the model; by default the view of its training.
      too_long: Treatment of a response that leaves no room for the prompt: "error", or "skip" the comparison.
      controls: "blind" (no user; default if the model sees users), "swap" (another user), "all" or "none".
      history: Labelled comparisons, or a folder of user states, from which a fitted method learns the users.
      aspects: User's wishes in the prompt: "planned:DIR" of `prb aspects`, or "oracle", an upper bound.
      subset, limit: Subset of named data; maximum number of comparisons of each source, for testing only.
      seed: Seed for bootstrap intervals of benchmark scores, and for the other users of "swap".
      batch_tokens: Approximate number of tokens computed at a time.
      progress, wandb: Show progress on standard error; log the summary to this project.
      part: "I/N" for the I-th of N jobs with separate folders; `prb_jax.merge` joins them.
      loading: Options of `prb_jax.load`, if `model` is a name; a module uses mesh, tokenizer and chat_template.

    Raises:
      DataError, RunError: Data or `out` cannot be used, or `out` contains another run.
      CheckpointError, MeshError: The model cannot be loaded.
    """
    result = run_evaluation(model, data, evaluate_options(locals()))
    warn_of_cuts(result.summary.get("truncated") or 0, len(result.rows), str(result.summary.get("model")))
    return result


def evaluate_options(given: Mapping[str, Any]) -> EvaluateOptions:
    """Return the options in the arguments of :func:`evaluate`.

    Raises:
      TypeError: An option of `loading` is unknown.
    """
    loading = given.get("loading", {})
    known = [*inspect.signature(evaluate).parameters, *LoadChoices.__annotations__]
    refuse_unknown("evaluate", loading, known)
    return from_flat(EvaluateOptions, {**given, "loading": LoadOptions(**loading)})


def run_evaluation(model: Model, data: Data | Inputs, options: EvaluateOptions) -> Evaluation:
    """Like :func:`evaluate`, with all options in one object."""
    log = _check_outputs(options)
    inputs = (
        data if isinstance(data, Inputs) else read_inputs(data, subset=options.subset, limit=options.limit)
    )
    if options.aspects is not None:
        inputs = get("evaluation", "aspects").value(inputs, options.aspects)
    history = None
    if options.history is not None:
        history = get("evaluation", "history").value(options.history)
    if inputs.benchmarks:
        get("evaluation", "benchmark check").value(inputs)
    if process_count() > 1:
        get("processes", "same evaluation").value(model, inputs, options)
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
            if not runs and inputs.reading:  # the digests of large files are known now
                decided = {**decided, "data": inputs.to_json()}
                run.settle(decided)
            runs.append(run)
        summary = on_first_process(lambda: get("evaluation", "summary").value(runs, folder))
    if log is not None:
        log(summary)
    return Evaluation(out=options.folder, summary=summary, rows=runs[0].rows)


def _check_outputs(options: EvaluateOptions) -> Callable[[Mapping[str, Any]], None] | None:
    """Check, before anything is computed, that results can be written.

    On the first process, return a function that logs the summary to Weights & Biases, if `wandb` is given.
    """
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
