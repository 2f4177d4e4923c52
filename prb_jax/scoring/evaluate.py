"""Score comparisons with one model and sum up, with the baselines beside it; resumable."""

from __future__ import annotations

import contextlib
import functools
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from prb_jax.errors import DataError, RunError, quote
from prb_jax.metrics.accuracy import ScoredRow
from prb_jax.metrics.rows import RowView
from prb_jax.processes.agreement import check_agreement
from prb_jax.processes.sharing import on_first_process, process_count, process_index
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.runs.command_line import command_line
from prb_jax.runs.folder import check_folder, is_settled
from prb_jax.runs.weights_and_biases import log_summary, start_wandb
from prb_jax.scoring.baselines import where_defined
from prb_jax.scoring.benchmarks import check_benchmarks
from prb_jax.scoring.comparison_table import Facts
from prb_jax.scoring.controls import FOLDER, SWAP, choose_controls, control_figures
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
from prb_jax.scoring.prompt_extras import UPPER_BOUND, HintOptions, with_hints
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
    refuse_options,
)
from prb_jax.scoring.summary import finish_run, further_baselines
from prb_jax.sources.prepared import check_text
from prb_jax.text.protocol import TextProtocol
from prb_jax.text.view import View, ViewOptions, choose_view
from prb_jax.trees.shorten import TooLongError

if TYPE_CHECKING:
    from prb_jax.readouts.load_options import LoadOptions


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
    view: ViewOptions
    loading: LoadOptions
    too_long: str
    controls: str | None
    limit: int | None
    seed: int
    batch_tokens: int | None
    progress: bool

    def __post_init__(self) -> None:
        choose_view(None, self.view)


def run_evaluation(
    inputs: Inputs,
    *,
    open_scorer: Callable[[LoadOptions], Scorer],
    contents: Callable[[], Any],
    options: EvaluateOptions,
) -> Evaluation:
    """Score the inputs in the run folder of the options, or go on with what is there.

    Args:
      inputs: what is scored.
      open_scorer: gives the scorer for these choices.
      contents: tells models apart before one is loaded, for the agreement of several processes.
      options: all else.

    Raises:
      PrbError: as `prb_jax.evaluate`.
    """
    check_benchmarks(inputs)
    _check_processes(inputs, contents, options)
    scorer = open_scorer(options.loading)
    if isinstance(scorer, PlainScorer):
        asked = options.view
        refuse_options(
            scorer.name,
            profile_posts=asked.profile_posts,
            protocol=None if asked.protocol == TextProtocol.DEFAULT else asked.protocol,
            max_length=asked.max_length,
            batch_tokens=options.batch_tokens,
        )
    if isinstance(scorer, AdaptsToUsers):
        asked = {**asdict(options.view), "batch_tokens": options.batch_tokens}
        if given := [field for field, value in asked.items() if value is not None]:
            raise RunError(
                f"{', '.join(given)}: what a fitted method reads was decided with its features: leave out here"
            )
    model = dict(scorer.identity())
    known_as = str(model.pop("name", "model"))
    name = options.name or known_as
    reader = scorer.reader if isinstance(scorer, ReadsTokens) else None
    chosen = reader.choose_view(options.view) if reader else choose_view(None, options.view)
    chosen.warn(known_as)
    view = chosen.view
    scorer = _accepting(scorer, view)
    check_too_long(options.too_long, reader, view=view)
    remarks = reader.remarks(view.protocol) if reader else []
    if process_index() == 0:
        for remark in remarks:
            print(f"prb: {remark}", file=sys.stderr)
    if options.out is not None and on_first_process(functools.partial(is_settled, options.out)):
        inputs.complete()  # compared with what the folder knows before anything is added
    given = inputs
    identity = RunIdentity(
        # A folder that was moved is still the same model; a baseline is nothing but its name.
        model=model or {"name": known_as},
        data=inputs.to_json(whole=False),
        view=view,
        limit=options.limit,
        seed=options.seed,
        versions=computing_versions(plain=isinstance(scorer, PlainScorer)),
        too_long=options.too_long,
        wording=view.wording if reader else {},
        hints=inputs.hints,
    )
    check_agreement(identity.to_json())  # the tokenizer too, and a model that was given as an object
    left_out, stored = None, None
    if inputs.prepared is not None and reader is not None:
        stored = stored_comparisons(inputs.comparisons, inputs.prepared, reader, view, split=SPLIT)
    if options.too_long == "skip" and stored is not None:
        left_out = LeftOut([], {})  # tokens are prepared of what is not too long alone
    elif options.too_long == "skip":
        assert reader is not None
        inputs, left_out = leave_out(inputs, reader, view=view)
        check_benchmarks(inputs)
    judge = scorer if isinstance(scorer, HasJudgements) else None
    if inputs.hints and reader is None and judge is None:
        named = ", ".join(name for name in inputs.hints if name != UPPER_BOUND)
        raise RunError(f"{named}: {known_as} reads no prompt in which they could stand")
    controls = choose_controls(
        options.controls,
        inputs.comparisons,
        reader,
        view=view,
        seed=options.seed,
        judge=judge is not None,
        adapts=isinstance(scorer, AdaptsToUsers),
    )
    recorded = {
        "session": session_facts(scorer, options.batch_tokens),
        "notes": {
            "command": command_line(),
            "model": name,
            "data": list(inputs.sources),
            **({"overrides": chosen.overrides} if chosen.overrides else {}),
            **({"remarks": remarks} if remarks else {}),
        },
    }
    scoring = {
        "progress": options.progress,
        "options": shown_view(view)
        | ({} if options.batch_tokens is None else {"batch_tokens": options.batch_tokens}),
    }
    comparisons = inputs.comparisons if stored is None else stored
    facts = Facts(comparisons) if stored is None else stored.facts()
    with contextlib.ExitStack() as stack:
        kept = options.out or Path(stack.enter_context(TemporaryDirectory(prefix="prb-")))
        run = stack.enter_context(
            open_scored_run(kept, inputs=identity.to_json(), by_blocks=bool(given.reading), **recorded)
        )
        for file, digests in zip(given.reading, run.blocks, strict=False):
            file.expect(digests)
        controlled, placed = dict[str, ScoredRun](), dict[str, Scorer]()
        try:
            run.score(scorer, comparisons, facts, label=name, reading=given.reading, **scoring)
            if given.reading:
                identity = replace(identity, data=given.to_json())
                run.settle(identity.to_json())
            for control in controls:
                opened = stack.enter_context(
                    open_scored_run(
                        kept / FOLDER / control.name,
                        inputs=replace(identity, control=control.name).to_json(),
                        **recorded,
                    )
                )
                placed[control.name] = scorer
                if judge is not None:
                    placed[control.name] = judge.kept_in(kept / FOLDER / control.name)
                elif control.name == SWAP and isinstance(scorer, AdaptsToUsers):
                    placed[control.name] = scorer.with_other_states(inputs.comparisons)
                opened.score(
                    placed[control.name], control.shown, facts, label=f"{name}, {control.name}", **scoring
                )
                controlled[control.name] = opened
        except TooLongError as error:
            raise DataError(
                f"{error}; --too-long skip leaves such comparisons out, and names them"
            ) from error

        def finish() -> dict[str, Any]:
            check_unchanged(inputs)
            if inputs.prepared is not None and (stored is None or controls):
                check_text(inputs.prepared)  # it was read, beside the tokens or in their place
            finished = functools.partial(
                finish_run,
                reader=reader,
                inputs=inputs,
                facts=facts,
                name=name,
                left_out=left_out,
            )
            figures = {}
            for control in controls:
                scored, summed = finished(
                    controlled[control.name],
                    scorer=placed[control.name],
                    identity=replace(identity, control=control.name),
                    baselines={},
                )
                figures[control.name] = control_figures(
                    RowView(run.rows, facts.ids),
                    scored,
                    summary=summed,
                    control=control,
                    comparisons=inputs.comparisons,
                    facts=facts,
                )
            posts = view.profile_posts if reader else None
            baselines = where_defined(facts.baselines()) | further_baselines(
                inputs.comparisons, facts, posts=posts
            )
            return finished(run, scorer=scorer, identity=identity, baselines=baselines, controls=figures)[1]

        summary = on_first_process(finish)
    rows = RowView(run.rows, facts.ids)
    return Evaluation(out=options.out, summary=summary, rows=rows)


def _check_processes(inputs: Inputs, contents: Callable[[], Any], options: EvaluateOptions) -> None:
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
            "model": contents(),
            "versions": computing_versions(plain=False),
        }
    )


def _accepting(scorer: Scorer, view: View) -> Scorer:
    return scorer.accepting(view) if isinstance(scorer, ReadsTokens) else scorer


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

    Raises:
      RunError: `out` cannot be used, is full, or holds another run; wandb is asked for and cannot be used.
      DataError: the data cannot be used, or changed while it was being scored.
      CheckpointError, MeshError: the model cannot be loaded.
    """
    options = EvaluateOptions(
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
        limit=limit,
        seed=seed,
        batch_tokens=batch_tokens,
        progress=progress,
    )
    logs: list[Any] = []

    def prepare() -> None:
        if out is not None:
            check_folder(out)
        if wandb is not None:
            logs.append(_start_wandb(wandb, options))

    on_first_process(prepare)
    inputs = data if isinstance(data, Inputs) else read_inputs(data, subset=subset, limit=limit)
    result = run_evaluation(
        with_hints(inputs, HintOptions(aspects=aspects)) if aspects is not None else inputs,
        open_scorer=functools.partial(
            open_scorer,
            model,
            name=name,
            recorded=out is not None,
            history=read_history(history),
        ),
        contents=functools.partial(model_contents, model, revision),
        options=options,
    )
    for log in logs:
        log_summary(log, result.summary)
    return result


def _start_wandb(project: str, options: EvaluateOptions) -> Any:
    if options.out is None:
        raise RunError("wandb: needs out, the run folder, whose name the run gets on Weights & Biases")
    settings = {"command": shlex.join(command_line()), **asdict(options.view), "limit": options.limit}
    return start_wandb(project, options.out, settings, option=f"--wandb {project}")
