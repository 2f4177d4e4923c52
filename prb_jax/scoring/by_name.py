"""Evaluate models and data that are given by name, or as they are: the public way into an evaluation."""

from __future__ import annotations

import functools
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prb_jax.errors import RunError
from prb_jax.processes.sharing import on_first_process
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.runs.command_line import command_line
from prb_jax.runs.folder import check_folder
from prb_jax.runs.weights_and_biases import log_summary, start_wandb
from prb_jax.scoring.evaluate import EvaluateOptions, Evaluation, run_evaluation
from prb_jax.scoring.hints import HintOptions, with_hints
from prb_jax.scoring.inputs import Inputs
from prb_jax.scoring.open_scorer import Model, model_contents, open_scorer, read_history
from prb_jax.scoring.read_inputs import Data, read_inputs
from prb_jax.text.view import ViewOptions


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
