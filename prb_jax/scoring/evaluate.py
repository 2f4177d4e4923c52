"""Score comparisons with one model and sum up, with the baselines beside it; resumable."""

from __future__ import annotations

import contextlib
import functools
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from prb_jax.errors import DataError, RunError, printable, quote
from prb_jax.metrics.accuracy import ScoredRow
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.platform.processes.agreement import check_agreement
from prb_jax.platform.processes.sharing import on_first_process, process_count, process_index
from prb_jax.records.comparison import Comparison
from prb_jax.records.options import flat_settings, from_flat, option, options_of, same_option, section
from prb_jax.records.sources.prepared import check_text
from prb_jax.records.writing import refuse_file
from prb_jax.runs import command_line
from prb_jax.runs.evaluation import COMPUTED, EVALUATION, JUDGEMENTS, SCORES, is_settled
from prb_jax.runs.finished import CONTROL_RUNS
from prb_jax.runs.parts import finish_part, parse_part
from prb_jax.runs.weights_and_biases import log_summary, start_wandb
from prb_jax.scoring import CONTROLS, HISTORY, TOO_LONG
from prb_jax.scoring.comparison_table import ComparisonTable
from prb_jax.scoring.controls import choose_controls, control_figures
from prb_jax.scoring.inputs import (
    SPLIT,
    Data,
    Inputs,
    LeftOut,
    check_too_long,
    check_unchanged,
    leave_out,
    read_inputs,
    warn_without_profiles,
)
from prb_jax.scoring.load import Model, model_contents, open_scorer, read_history
from prb_jax.scoring.prompt_extras import UPPER_BOUND, PromptExtras, add_prompt_extras
from prb_jax.scoring.run import (
    Job,
    ScoredRun,
    computing_versions,
    open_scored_run,
    session_facts,
)
from prb_jax.scoring.summary import all_baselines, check_benchmarks, finish_run
from prb_jax.text.view import ViewOptions, choose_view
from prb_jax.trees.shorten import TooLongError


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


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """The choices of a user who evaluates a model; `prb_jax.evaluate` says what each one means.

    Raises:
      DataError, RunError: a choice that is wrong whatever the model and the data are.
    """

    out: Path | None
    name: str | None
    progress: bool
    subset: str | None = option(None, "one subset of the data", "S")
    view: ViewOptions = section(ViewOptions)
    too_long: str = option(
        "error",
        "what a response is that leaves no room for its prompt within that: an error (default), or left out, counted "
        "in summary.json and named in left_out.jsonl",
        choices=TOO_LONG,
    )
    controls: str | None = option(
        None,
        "the same model without the profile (blind), with another user's (swap), both (all), or none of these "
        "(default: blind where the model sees a profile)",
        choices=CONTROLS,
    )
    history: Data | None = option(
        None,
        f"{HISTORY} (default: each user's comparisons before the one in question)",
        "NAME_OR_PATH ...",
        effect="contents",
    )
    aspects: str | None = same_option(PromptExtras, "aspects", effect="contents")
    loading: LoadOptions = section(LoadOptions)
    limit: int | None = option(None, "the first N comparisons of each source; for testing only", least=1)
    batch_tokens: int | None = option(None, "tokens computed at a time", least=1)
    seed: int = option(0, "of the resampling of benchmark scores and of --controls swap", least=0)
    wandb: str | None = option(
        None, "write the summary to this project of Weights & Biases too", "PROJECT", effect="none"
    )
    part: str | None = option(
        None, "score the I-th of N parts alone, as one of N jobs; `prb merge` makes one run of them", "I/N"
    )

    def __post_init__(self) -> None:
        choose_view(None, self.view)
        if self.part is not None and parse_part(self.part) and (self.out is None or self.wandb is not None):
            raise RunError(
                "part: needs out, a folder for its rows; wandb: is for the whole run: leave it out"
            )


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
    if out is not None:
        refuse_file(out)  # a Path of an empty name would be the working directory
    return run_evaluation(model, data, from_flat(EvaluateOptions, {**locals(), "out": out and Path(out)}))


def run_evaluation(model: Model, data: Data | Inputs, options: EvaluateOptions) -> Evaluation:
    """As :func:`evaluate`, with all choices in one object."""
    wandb_run = _check_outputs(options)
    inputs = (
        data if isinstance(data, Inputs) else read_inputs(data, subset=options.subset, limit=options.limit)
    )
    if options.aspects is not None:
        inputs = add_prompt_extras(inputs, PromptExtras(aspects=options.aspects))
    history = read_history(options.history)
    check_benchmarks(inputs)
    _check_processes(model, inputs, options)
    recorded = options.out is not None
    scorer = open_scorer(model, options.loading, name=options.name, recorded=recorded, history=history)
    scorer.refuse_unused({**asdict(options.view), "batch_tokens": options.batch_tokens})

    # What the model is shown, and everything else that decides the result.
    identity = dict(scorer.identity())
    known_as = str(identity.pop("name", "model"))
    chosen, reader = scorer.choose_view(options.view), scorer.reader
    chosen.warn(known_as)
    view = chosen.view
    check_too_long(options.too_long, reader, view=view)
    warn_without_profiles(inputs.comparisons, reader, view=view)
    remarks = list(scorer.remarks(view))
    for remark in remarks if process_index() == 0 else ():
        print(f"prb: {printable(remark)}", file=sys.stderr)
    if inputs.hints and not scorer.has_prompt:
        extras = ", ".join(extra for extra in inputs.hints if extra != UPPER_BOUND)
        raise RunError(f"{extras}: {known_as} reads no prompt in which they could stand")
    if options.out is not None and on_first_process(functools.partial(is_settled, options.out)):
        inputs.complete()  # compared with what the folder knows before anything is added
    whole = inputs
    decided = {
        # A folder that was moved is still the same model; a baseline is nothing but its name.
        "model": identity or {"name": known_as},
        "data": whole.to_json(whole=False),
        **view.shown,
        **scorer.wording(view),
        "limit": options.limit,
        "seed": options.seed,
        "versions": computing_versions(plain=not scorer.has_weights),
        **({} if options.too_long == "error" else {"too_long": options.too_long}),
        **({"hints": inputs.hints} if inputs.hints else {}),
        **({} if options.part is None else {"part": options.part}),
    }
    check_agreement(decided)  # the tokenizer too, and a model that was given as an object

    # What is scored: all comparisons or those that fit, by their text or by prepared tokens; and the controls.
    tokens = None
    if inputs.prepared is not None and reader is not None:
        from prb_jax.scoring.prepared_tokens import stored_comparisons  # which starts JAX

        subset, limit = inputs.subset, options.limit
        tokens = stored_comparisons(inputs.prepared, reader, view, split=SPLIT, subset=subset, limit=limit)
        # A benchmark is read as text, for its rule; a part of it is known by its text alone.
        if tokens and isinstance(inputs.comparisons, list) and len(inputs.comparisons) != len(tokens.store):
            tokens = None
    if options.too_long == "skip" and tokens is not None:
        inputs = replace(inputs, left_out=LeftOut([], {}))  # nothing too long has tokens
    elif options.too_long == "skip" and reader is not None:
        inputs = leave_out(inputs, reader, view=view)
        check_benchmarks(inputs)
    job = Job(
        name=options.name or known_as,
        scorer=scorer,
        inputs=inputs,
        table=ComparisonTable(inputs.comparisons) if tokens is None else tokens.table(),
        # Who has a reader takes comparisons by their tokens too.
        shown=inputs.comparisons if tokens is None else cast("Sequence[Comparison]", tokens),
        view=view,
        decided=decided,
        part=None if options.part is None else parse_part(options.part),
    )
    controls = choose_controls(job, options.controls)
    session = session_facts(scorer, options.batch_tokens)
    notes = {
        "model": job.name,
        "data": list(inputs.sources),
        **({"overrides": chosen.overrides} if chosen.overrides else {}),
        **({"remarks": remarks} if remarks else {}),
    }

    with contextlib.ExitStack() as stack:
        folder = options.out or Path(stack.enter_context(TemporaryDirectory(prefix="prb-")))

        def score(job: Job, place: Path) -> ScoredRun:
            run = stack.enter_context(open_scored_run(job, place, session=session, notes=notes))
            try:
                run.score(batch_tokens=options.batch_tokens, progress=options.progress)
            except TooLongError as error:
                hint = "--too-long skip leaves such comparisons out, and names them"
                raise DataError(f"{error}; {hint}") from error
            return run

        run = score(job, folder)
        if whole.reading:  # what the data is, is known now
            decided = {**decided, "data": whole.to_json()}
            on_first_process(lambda: None if run.folder is None else run.folder.settle(decided))
        controlled = []
        for control in controls:
            place = folder / CONTROL_RUNS / str(control.control)
            decided_here = {**decided, "control": control.control}
            control = replace(control, scorer=control.scorer.kept_in(place), decided=decided_here)
            controlled.append(score(control, place))

        def finish() -> dict[str, Any]:
            check_unchanged(inputs)
            if job.part is not None:
                files = (SCORES, COMPUTED, JUDGEMENTS)
                sizes = {"rows": len(run.rows), "rows_of_all": len(job.table)}
                return {"model": job.name, **finish_part(folder, job.part, **sizes, files=files)}
            if inputs.prepared is not None and (tokens is None or controls):
                check_text(inputs.prepared)  # it was read, beside the tokens or in their place
            figures = {
                str(control.job.control): control_figures(run, control, finish_run(control, baselines={}))
                for control in controlled
            }
            return finish_run(run, baselines=all_baselines(job), controls=figures)

        summary = on_first_process(finish)
    if wandb_run is not None:
        log_summary(wandb_run, summary)
    return Evaluation(out=options.out, summary=summary, rows=run.rows)


def _check_outputs(options: EvaluateOptions) -> Any:
    """Make sure, before anything is computed, that results can be written; returns the run of Weights & Biases, if one
    is asked for, on the first process."""
    started: list[Any] = []

    def check() -> None:
        if options.out is not None:
            EVALUATION.check(options.out)
        if options.wandb is None:
            return
        if options.out is None:
            raise RunError("wandb: needs out, the run folder, whose name the run gets on Weights & Biases")
        settings = {"command": shlex.join(command_line()), **asdict(options.view), "limit": options.limit}
        started.append(start_wandb(options.wandb, options.out, settings, option=f"--wandb {options.wandb}"))

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
