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

from prb_jax.data.comparison import Comparison
from prb_jax.data.options import option, same_option, section
from prb_jax.data.writing import refuse_file
from prb_jax.errors import DataError, RunError, quote
from prb_jax.metrics.accuracy import ScoredRow
from prb_jax.metrics.rows import RowView
from prb_jax.processes.agreement import check_agreement
from prb_jax.processes.sharing import on_first_process, process_count, process_index
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.runs.command_line import command_line
from prb_jax.runs.evaluation import COMPUTED, EVALUATION, JUDGEMENTS, SCORES, is_settled
from prb_jax.runs.parts import finish_part, parse_part
from prb_jax.runs.weights_and_biases import log_summary, start_wandb
from prb_jax.scoring import CONTROLS, HISTORY, TOO_LONG
from prb_jax.scoring.benchmarks import check_benchmarks
from prb_jax.scoring.comparison_table import ComparisonTable
from prb_jax.scoring.controls import FOLDER, SWAP, Control, choose_controls, control_figures
from prb_jax.scoring.inputs import (
    SPLIT,
    Data,
    Inputs,
    LeftOut,
    check_too_long,
    check_unchanged,
    leave_out,
    read_inputs,
)
from prb_jax.scoring.load import Model, model_contents, open_scorer, read_history
from prb_jax.scoring.prepared_tokens import stored_comparisons
from prb_jax.scoring.prompt_extras import UPPER_BOUND, PromptExtras, add_prompt_extras
from prb_jax.scoring.run import (
    RunIdentity,
    ScoredRun,
    computing_versions,
    open_scored_run,
    session_facts,
    shown_view,
)
from prb_jax.scoring.scorer import (
    AdaptsToUsers,
    HasJudgements,
    PlainScorer,
    ReadsTokens,
    Scorer,
    Served,
    refuse_unused,
)
from prb_jax.scoring.summary import all_baselines, finish_run
from prb_jax.sources.prepared import check_text
from prb_jax.text.view import ViewOptions, choose_view, served_view
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
      DataError, RunError: a choice that cannot be, whatever the model and the data are.
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
    )
    aspects: str | None = same_option(PromptExtras, "aspects")
    loading: LoadOptions = section(LoadOptions)
    limit: int | None = option(None, "the first N comparisons of each source; for testing only", least=1)
    batch_tokens: int | None = option(None, "tokens computed at a time", least=1)
    seed: int = option(0, "of the resampling of benchmark scores and of --controls swap", least=0)
    wandb: str | None = option(None, "write the summary to this project of Weights & Biases too", "PROJECT")
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
    tokenizer: str | None = None,
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
        `model` is a name.
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
    return run_evaluation(
        model,
        data,
        EvaluateOptions(
            out=None if out is None else Path(out),
            name=name,
            view=ViewOptions(profile_posts=profile_posts, protocol=protocol, max_length=max_length),
            loading=LoadOptions(
                mesh=mesh,
                dtype=dtype,
                revision=revision,
                tokenizer=tokenizer,
                chat_template=chat_template,
                readout=readout,
                quantize=quantize,
                attention=attention,
            ),
            too_long=too_long,
            controls=controls,
            history=history,
            aspects=aspects,
            subset=subset,
            limit=limit,
            seed=seed,
            batch_tokens=batch_tokens,
            progress=progress,
            wandb=wandb,
            part=part,
        ),
    )


def run_evaluation(model: Model, data: Data | Inputs, options: EvaluateOptions) -> Evaluation:
    """As :func:`evaluate`, with all choices in one object."""
    wandb_runs: list[Any] = []
    on_first_process(lambda: wandb_runs.extend(_check_outputs(options)))
    inputs = data
    if not isinstance(inputs, Inputs):
        inputs = read_inputs(inputs, subset=options.subset, limit=options.limit)
    if options.aspects is not None:
        inputs = add_prompt_extras(inputs, PromptExtras(aspects=options.aspects))
    history = read_history(options.history)
    check_benchmarks(inputs)
    _check_processes(model, inputs, options)
    scorer = open_scorer(
        model, options.loading, name=options.name, recorded=options.out is not None, history=history
    )
    refuse_unused(scorer, {**asdict(options.view), "batch_tokens": options.batch_tokens})

    # What the model is shown, and everything else that decides the result.
    model_identity = dict(scorer.identity())
    known_as = str(model_identity.pop("name", "model"))
    name = options.name or known_as
    reader = scorer.reader if isinstance(scorer, ReadsTokens) else None
    chosen = reader.choose_view(options.view) if reader else choose_view(None, options.view)
    chosen.warn(known_as)
    served = scorer if isinstance(scorer, Served) else None
    view = served_view(served.view) if served and served.view else chosen.view
    if isinstance(scorer, ReadsTokens):
        scorer = scorer.accepting(view)
    check_too_long(options.too_long, reader, view=view)
    remarks = reader.remarks(view.protocol) if reader else served.remarks if served else []
    if process_index() == 0:
        for remark in remarks:
            print(f"prb: {remark}", file=sys.stderr)
    if options.out is not None and on_first_process(functools.partial(is_settled, options.out)):
        inputs.complete()  # compared with what the folder knows before anything is added
    part = None if options.part is None else parse_part(options.part)
    identity = RunIdentity(
        # A folder that was moved is still the same model; a baseline is nothing but its name.
        model=model_identity or {"name": known_as},
        data=inputs.to_json(whole=False),
        view=view,
        limit=options.limit,
        seed=options.seed,
        versions=computing_versions(plain=bool(served) or isinstance(scorer, PlainScorer)),
        too_long=options.too_long,
        wording=view.wording if reader or served else {},
        hints=inputs.hints,
        part=part,
    )
    check_agreement(identity.to_json())  # the tokenizer too, and a model that was given as an object

    # What is scored: all comparisons or those that fit, by their text or by prepared tokens; and the controls.
    whole, left_out, tokenised = inputs, None, None
    if inputs.prepared is not None and reader is not None:
        tokenised = stored_comparisons(
            inputs.prepared, reader, view, split=SPLIT, subset=inputs.subset, limit=options.limit
        )
        # A benchmark is read as text, for its rule; a part of it is known by its text alone.
        if tokenised is not None and isinstance(inputs.comparisons, list):
            tokenised = tokenised if len(inputs.comparisons) == len(tokenised.store) else None
    if options.too_long == "skip" and tokenised is not None:
        left_out = LeftOut([], {})  # tokens are prepared of what is not too long alone
    elif options.too_long == "skip":
        assert reader is not None
        inputs, left_out = leave_out(inputs, reader, view=view)
        check_benchmarks(inputs)
    judge = scorer if isinstance(scorer, HasJudgements) else None
    if inputs.hints and reader is None and judge is None:
        extras = ", ".join(extra for extra in inputs.hints if extra != UPPER_BOUND)
        raise RunError(f"{extras}: {known_as} reads no prompt in which they could stand")
    controls = choose_controls(
        options.controls,
        inputs.comparisons,
        reader,
        view=view,
        seed=options.seed,
        judge=judge is not None,
        adapts=isinstance(scorer, AdaptsToUsers),
    )
    table = ComparisonTable(inputs.comparisons) if tokenised is None else tokenised.table()

    recorded = {
        "session": session_facts(scorer, options.batch_tokens),
        "notes": {
            "model": name,
            "data": list(inputs.sources),
            **({"overrides": chosen.overrides} if chosen.overrides else {}),
            **({"remarks": remarks} if remarks else {}),
        },
    }
    batch_options = {} if options.batch_tokens is None else {"batch_tokens": options.batch_tokens}
    scoring = {
        "progress": options.progress,
        "options": shown_view(view) | batch_options,
        "part": part,
    }
    with contextlib.ExitStack() as stack:
        folder = options.out or Path(stack.enter_context(TemporaryDirectory(prefix="prb-")))
        run = stack.enter_context(
            open_scored_run(folder, inputs=identity.to_json(), by_blocks=bool(whole.reading), **recorded)
        )
        for file, digests in zip(whole.reading, run.blocks, strict=False):
            file.expect(digests)
        controlled: list[tuple[Control, ScoredRun, Scorer]] = []
        try:
            run.score(
                scorer,
                # Who has a reader takes comparisons by their tokens too.
                inputs.comparisons if tokenised is None else cast("Sequence[Comparison]", tokenised),
                table,
                label=name,
                reading=whole.reading,
                **scoring,
            )
            if whole.reading:
                identity = replace(identity, data=whole.to_json())
                run.settle(identity.to_json())
            for control in controls:
                place = folder / FOLDER / control.name
                control_inputs = replace(identity, control=control.name).to_json()
                control_run = stack.enter_context(open_scored_run(place, inputs=control_inputs, **recorded))
                control_scorer = scorer if judge is None else judge.kept_in(place)
                if control.name == SWAP and judge is None and isinstance(scorer, AdaptsToUsers):
                    control_scorer = scorer.with_other_states(inputs.comparisons)
                label = f"{name}, {control.name}"
                control_run.score(control_scorer, control.shown, table, label=label, **scoring)
                controlled.append((control, control_run, control_scorer))
        except TooLongError as error:
            raise DataError(
                f"{error}; --too-long skip leaves such comparisons out, and names them"
            ) from error

        def finish() -> dict[str, Any]:
            check_unchanged(inputs)
            if part is not None:
                files = (SCORES, COMPUTED, JUDGEMENTS)
                return {"model": name, **finish_part(folder, part, rows=len(run.rows), files=files)}
            if inputs.prepared is not None and (tokenised is None or controls):
                check_text(inputs.prepared)  # it was read, beside the tokens or in their place
            finished = functools.partial(finish_run, inputs=inputs, table=table, name=name, left_out=left_out)
            figures = {}
            for control, control_run, control_scorer in controlled:
                control_rows, control_summary = finished(
                    control_run,
                    scorer=control_scorer,
                    identity=replace(identity, control=control.name),
                    baselines={},
                )
                figures[control.name] = control_figures(
                    RowView(run.rows, table.ids),
                    control_rows,
                    summary=control_summary,
                    control=control,
                    comparisons=inputs.comparisons,
                    table=table,
                )
            posts = view.profile_posts if reader else None
            baselines = all_baselines(inputs.comparisons, table, posts=posts)
            return finished(run, scorer=scorer, identity=identity, baselines=baselines, controls=figures)[1]

        summary = on_first_process(finish)
    for wandb_run in wandb_runs:
        log_summary(wandb_run, summary)
    ids = table.ids if part is None else list(run.rows)
    return Evaluation(out=options.out, summary=summary, rows=RowView(run.rows, ids))


def _check_outputs(options: EvaluateOptions) -> list[Any]:
    """Make sure, before anything is computed, that results can be written; returns the run of Weights & Biases."""
    if options.out is not None:
        EVALUATION.check(options.out)
    if options.wandb is None:
        return []
    if options.out is None:
        raise RunError("wandb: needs out, the run folder, whose name the run gets on Weights & Biases")
    settings = {"command": shlex.join(command_line()), **asdict(options.view), "limit": options.limit}
    return [start_wandb(options.wandb, options.out, settings, option=f"--wandb {options.wandb}")]


def _check_processes(model: Model, inputs: Inputs, options: EvaluateOptions) -> None:
    """Compare the choices of several processes before a model is loaded: unequal ones may wait for ever."""
    if process_count() == 1:
        return
    loading = options.loading
    check_agreement(
        {
            "verb": "evaluate",
            "limit": options.limit,
            "seed": options.seed,
            "too_long": options.too_long,
            **shown_view(choose_view(None, options.view).view),
            "mesh": loading.mesh,
            "dtype": loading.dtype,
            "readout": loading.readout,
            "attention": loading.attention,
            "quantize": loading.quantize,
            "controls": options.controls,
            "batch_tokens": options.batch_tokens,
            "data": inputs.to_json(whole=False),
            "model": model_contents(model, loading.revision),
            "versions": computing_versions(plain=False),
        }
    )
