"""Score comparisons with one model and summarise the results, with the baselines beside it; resumable."""

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
from prb_jax.models import Together
from prb_jax.platform.processes.sharing import on_first_process, process_count
from prb_jax.records.options import from_flat
from prb_jax.runs import command_line
from prb_jax.runs.evaluation import CONTROL_RUNS, EVALUATION
from prb_jax.scoring.inputs import Data, Inputs, read_inputs
from prb_jax.scoring.job import open_job
from prb_jax.scoring.load import Model, open_scorer, read_history
from prb_jax.scoring.options import EvaluateOptions
from prb_jax.scoring.run import ScoredRun, open_scored_run, session_facts
from prb_jax.scoring.summary import sum_up
from prb_jax.seams import get
from prb_jax.trees.encode import TooLongError


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
    base: str | Path | None = None,
    tokenizer: str | Path | Any = None,
    chat_template: str | None = None,
    readout: str | None = None,
    quantize: str | None = None,
    attention: str = "auto",
    reference: str | Path | None = None,
    beta: float = 0.1,
    reference_free: bool = False,
    logprobs: Together = "sum",
    batch_tokens: int | None = None,
    progress: bool = True,
    wandb: str | None = None,
    part: str | None = None,
) -> Evaluation:
    """Score every comparison, and write `run.json`, `scores.jsonl` and `summary.json` to `out`.

    The same call continues a killed run. The call fails if anything that decides the result differs: the model (its
    `identity` without the name), the data (names and contents of its files, `subset`, `limit`), `profile_posts`,
    `protocol`, `max_length`, `seed` and the versions of numerical libraries. The mesh, the devices, `attention`,
    `batch_tokens`, `progress` and the folder of the data may differ.

    Args:
      model: A loaded model (`prb_jax.load`); any `prb_jax.scoring.scorer.Scorer`, or an object like `StreamsScores` in
        the same file; the name of a model or baseline for `prb_jax.load`; a `flax.nnx.Module` with the method of
        `ScoresTokens`; or a function that returns K numbers for a comparison of K responses.
      data: Comparisons with labels, or records of them (`prb_jax.records.intake.Records`); or the name of a file,
        folder, benchmark, hub data set or generated benchmark, or several names. A named file must not change during
        the run. The summary reports the results of a benchmark's own rule under "benchmarks"; RewardBench's result
        files are written beside it.
      out: The run folder; if not given, nothing is kept on disk.
      name: Name of the model in tables. This name, or the qualified name, identifies a function. Changes of its code
        are not detected, so a changed function needs another name or folder.
      profile_posts, protocol, max_length: View of the model, as in `RewardModel.score`; the view of its training if
        not given. An option that differs from training gives a warning, and `run.json` lists it under "overrides".
        Baselines and functions always see the whole profile.
      too_long: How to handle a response that leaves no room for the prompt within the limit: raise an "error", or
        "skip" the comparison. The summary counts skipped comparisons under "left_out"; `left_out.jsonl` lists them.
      controls: Control runs of the same model: without profile and user ("blind"), with the profile of another user
        ("swap"), "all" of these, or "none". If not given, "blind" for a model that sees its users. The run folder of
        each control is in `out`/controls; the summary reports the gain over each control under "controls".
      history: Labelled comparisons, in the form of `data`, from which a fitted method of personalisation learns the
        users, or a folder of saved user states. If not given, the method learns each user from the user's comparisons
        earlier in the data.
      aspects: Wishes of the user, added to the prompt: "planned:DIR", the texts of a run of `prb aspects`; or "oracle",
        the true rubric of the data, which marks the result as an upper bound.
      subset: Name of the subset of named data to read.
      limit: Maximum number of comparisons of each source. For testing only.
      seed: Seed for bootstrap intervals of benchmark scores, and for the other users of "swap".
      mesh, dtype, revision, base, tokenizer, chat_template, readout, quantize, attention, reference, beta,
        reference_free, logprobs: Options of `prb_jax.load`, if `model` is a name. A module uses `mesh`, `tokenizer` (a
        folder, hub id or transformers tokenizer, required) and `chat_template`.
      batch_tokens: Approximate number of tokens computed at a time; chosen from the model and the device if not given.
      progress: If True, show progress on standard error.
      wandb: Project of Weights & Biases that receives the summary; `out` names the run there.
      part: "I/N" scores only the I-th of N parts of the batches, for independent jobs with separate `out` folders;
        :func:`prb_jax.merge` joins them into one run. The summary of a part has only its part and number of rows.

    Raises:
      RunError: `out` cannot be used, its disk is full, or it contains another run; or wandb cannot be used.
      DataError: The data cannot be used, or changed during scoring.
      CheckpointError, MeshError: The model cannot be loaded.
    """
    return run_evaluation(model, data, from_flat(EvaluateOptions, locals()))


def run_evaluation(model: Model, data: Data | Inputs, options: EvaluateOptions) -> Evaluation:
    """Like :func:`evaluate`, with all options in one object."""
    log = _check_outputs(options)
    inputs = (
        data if isinstance(data, Inputs) else read_inputs(data, subset=options.subset, limit=options.limit)
    )
    if options.aspects is not None:
        inputs = get("evaluation", "aspects").value(inputs, options.aspects)
    history = read_history(options.history)
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
        summary = on_first_process(lambda: sum_up(runs, folder))
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
