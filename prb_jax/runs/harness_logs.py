"""Read logs of other harnesses as finished runs: lm-evaluation-harness (`--log_samples`) and Inspect.

Each sample is a graded row (`ScoredRow.is_graded`), named TASK/ID; with several tasks, the task is its subset.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from prb_jax.errors import RunError, listed, quote
from prb_jax.metrics.clusters import Clusters, shared_rows
from prb_jax.metrics.rows import ScoredRow
from prb_jax.metrics.summary import summarise_grades
from prb_jax.platform.extras import need_extra
from prb_jax.platform.paths import no_run
from prb_jax.records.files import bounded_lines, open_file
from prb_jax.records.reading import parse_json, read_object
from prb_jax.runs.finished import FinishedRun, read_finished
from prb_jax.runs.kind import RUN

CLUSTER: Final = ("user_id", "item_id")
"""Default fields of a sample to cluster rows by, if the samples have them."""

_DATE: Final = r"\d{4}-\d\d-\d\dT[\d.-]+"
_SAMPLES: Final = re.compile(rf"samples_(?P<task>.+)_(?P<date>{_DATE})\.jsonl")
_RESULTS: Final = re.compile(rf".+_(?P<date>{_DATE})\.json")
_INSPECT: Final = re.compile(rb'\s*\{\s*"version":\s*\d+,\s*"status":')  # start of its JSON logs
_NO_METRICS: Final = {
    *("doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics"),
    *("doc_hash", "prompt_hash", "target_hash"),
}
_WORDS: Final = {"c": 1.0, "p": 0.5, "i": 0.0, "n": 0.0, "true": 1.0, "yes": 1.0, "false": 0.0, "no": 0.0}
_UNREAD: Final = {"messages", "events", "store", "attachments"}

_Sample = tuple[str, str, str, float, Mapping[str, Any]]  # task, id, digest of its content, grade, its fields


def read_run(path: str | Path, *, metric: Sequence[str] = (), cluster: Sequence[str] = ()) -> FinishedRun:
    """Return a finished run of `prb evaluate`, or read the log of another harness as one.

    Args:
      path: Folder of a run; samples or results file of lm-evaluation-harness, or their folder; log of Inspect (.eval
        or .json), or a folder of logs of one model on different tasks.
      metric: Metric to read of each task of a log: "acc", or "exact_match,strict-match" with the filter; for Inspect
        the scorer, or "scorer,key". Required if a log has several.
      cluster: One or two fields of the samples of a log (of lm-eval's `doc`, of Inspect's `metadata`). Rows with the
        same value of a field are treated as dependent. Default: the fields of `CLUSTER` that the samples have.

    Raises:
      RunError: there is no finished run; a log has several metrics, samples without a grade, two samples with one id,
        or a mean that differs from its results; a field to cluster by is missing.
    """
    place = Path(path)
    if (place / RUN).exists() or not place.exists():
        return read_finished(place)
    harness, samples, about = _read_log(place, metric)
    rows, docs = list[ScoredRow](), dict[str, str]()
    several = len({task for task, *_ in samples}) > 1
    keys = [_cluster_keys(place, samples, field, asked=bool(cluster)) for field in cluster or CLUSTER]
    first, *second = [key for key in keys if key is not None] or [[None] * len(samples)]
    for (task, name, digest, grade, _), user in zip(samples, first, strict=True):
        id = f"{task}/{name}"
        if id in docs:
            raise RunError(f"{place}: two samples {quote(id)}; expected each sample once")
        docs[id] = digest
        rows.append(ScoredRow(id, task if several else None, user, [grade], [1.0]))
    users = tuple(first)
    items = tuple((key or row.id,) for key, row in zip(second[0], rows)) if second else None
    clusters = Clusters(users, items if items and shared_rows(users, items) else None)
    columns = about.pop("metric")
    inputs = {"model": {"name": about["model"]}, **about.pop("settings")}
    inputs["data"] = {"harness": harness, "metric": columns, "samples": docs}
    summary = {"model": about["model"], **summarise_grades(rows, clusters)}
    record = {"kind": f"log of {harness}", **about, "inputs": inputs}
    return FinishedRun(place, record, summary, rows, clusters)


def _read_log(place: Path, metric: Sequence[str]) -> tuple[str, list[_Sample], dict[str, Any]]:
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    if dates := {match["date"] for file in files if (match := _SAMPLES.fullmatch(file.name))}:
        if len(dates) > 1:
            raise RunError(
                f"{place}: holds samples of {len(dates)} runs of lm-evaluation-harness ({listed(sorted(dates))}): "
                "name the results file of one, or one samples file"
            )
        return "lm-evaluation-harness", *_lm_eval(place, dates.pop(), metric)
    if not place.is_dir() and (match := _RESULTS.fullmatch(place.name)):
        return "lm-evaluation-harness", *_lm_eval(place, match["date"], metric)
    logs = [
        file
        for file in files
        if file.suffix == ".eval" or (file.suffix == ".json" and _INSPECT.match(_read(file, 200)))
    ]
    if not logs:
        logs_too = "and no samples_TASK_DATE.jsonl of lm-evaluation-harness or log of Inspect"
        raise RunError(no_run(place, f"no {RUN} in it, {logs_too}"))
    return "Inspect", *_inspect(place, logs, metric)


def _read(file: Path, size: int = -1) -> bytes:
    try:
        with open_file(file) as opened:
            return opened.read(size)
    except OSError as error:
        raise RunError(f"cannot read {file}: {error.strerror or error}") from error


def _lm_eval(place: Path, date: str, metric: Sequence[str]) -> tuple[list[_Sample], dict[str, Any]]:
    folder = place if place.is_dir() else place.parent
    files = {
        match["task"]: file
        for file in sorted(folder.iterdir())
        if (match := _SAMPLES.fullmatch(file.name)) and match["date"] == date
    }
    if _SAMPLES.fullmatch(place.name):
        files = {task: file for task, file in files.items() if file.name == place.name}
    results = [
        read_object(file, error=RunError, finite=False) for file in sorted(folder.glob(f"*_{date}.json"))
    ]
    result: Mapping[str, Any] = results[0] if results else {}
    if not files:
        raise RunError(
            f"{place}: found no samples_TASK_{date}.jsonl beside it: run lm-evaluation-harness with --log_samples"
        )
    samples, columns = list[_Sample](), dict[str, str]()
    for task, file in files.items():
        lines = enumerate(bounded_lines(io.BytesIO(_read(file)), file, error=RunError), start=1)
        rows = [_lm_eval_row(line, where=f"{file}:{n}") for n, line in lines]
        present = dict.fromkeys(
            f"{name},{row.get('filter', 'none')}"
            for row in rows
            for name in row.get("metrics") or (key for key in row if key not in _NO_METRICS)
        )
        columns[task] = column = _column(present, metric, where=str(file))
        name, _, kept = column.partition(",")
        if (result.get("higher_is_better", {}).get(task) or {}).get(name) is False:
            raise RunError(f"{file}: lower is better for the metric {name}: expected the opposite")
        chosen = [row for row in rows if row.get("filter", "none") == kept]
        grades = [_grade(row.get(name), f"{file}: doc {row['doc_id']}: {name}") for row in chosen]
        stated = (result.get("results", {}).get(task) or {}).get(column)
        _check_mean(grades, stated, what=f"{file}: {column}")
        for row, grade in zip(chosen, grades, strict=True):
            doc, target = row.get("doc"), row.get("target_hash") or row.get("target")
            digest = _digest([row.get("doc_hash") or doc, target])
            samples.append((task, str(row["doc_id"]), digest, grade, doc if isinstance(doc, dict) else {}))
    config = result.get("config") or {}
    settings = {
        **{name: config.get(name) for name in ("model_args", "gen_kwargs")},
        **{name: result.get(name) for name in ("n-shot", "system_instruction", "chat_template_sha")},
    }
    model = result.get("model_name") or folder.resolve().name
    return samples, {"model": model, "metric": columns, "settings": {k: v for k, v in settings.items() if v}}


def _lm_eval_row(line: bytes, *, where: str) -> dict[str, Any]:
    row = parse_json(line, where=where, error=RunError, finite=False)
    if not isinstance(row, dict) or "doc_id" not in row:
        raise RunError(f"{where}: expected a sample of lm-evaluation-harness, an object with doc_id")
    return row


def _inspect(
    place: Path, files: Sequence[Path], metric: Sequence[str]
) -> tuple[list[_Sample], dict[str, Any]]:
    need_extra("inspect", f"{place}, a log of Inspect")
    from inspect_ai.log import read_eval_log  # pyright: ignore[reportMissingImports]

    samples, columns = list[_Sample](), dict[str, str]()
    about: dict[str, Any] = {}
    for file in files:
        try:
            log = read_eval_log(str(file), exclude_fields=_UNREAD)
        except Exception as error:  # its reader may raise any error on a damaged file
            raise RunError(f"{file}: cannot be read as a log of Inspect: {error}") from error
        if log.status != "success" or getattr(log, "invalidated", False) or not log.samples:
            state = "invalidated" if log.status == "success" and log.samples else log.status
            raise RunError(f"{file}: expected the log of a finished evaluation with samples, found {state}")
        task, model = log.eval.task, log.eval.model
        if columns and (model != about["model"] or task in columns):
            others = f"{about['model']} on {listed(list(columns))}"
            raise RunError(
                f"{place}: holds logs of {others} and of {model} on {task}; expected one model, and each task once: "
                "name the log itself"
            )
        present = dict.fromkeys(name for sample in log.samples for name in _inspect_values(sample))
        columns[task] = column = _column(present, metric, where=str(file))
        epochs: dict[str, list[Any]] = {}
        for sample in log.samples:
            epochs.setdefault(str(sample.id), []).append(sample)
        read = [_inspect_sample(task, name, column, parts, file) for name, parts in epochs.items()]
        grades = [grade for _, _, _, grade, _ in read]
        _check_mean(grades, _inspect_mean(log.results, column), what=f"{file}: {column}")
        samples += read
        settings = {
            "task_args": log.eval.task_args,
            "generate": log.eval.model_generate_config.model_dump(exclude_none=True),
            "model_args": log.eval.model_args,
            "epochs": log.eval.config.epochs,
        }
        about = {"model": model, "settings": {name: value for name, value in settings.items() if value}}
    return samples, {**about, "metric": columns}


def _inspect_values(sample: Any) -> dict[str, Any]:
    """Return the values of a sample by "scorer", or by "scorer,key" if a scorer gives several."""
    values: dict[str, Any] = {}
    for scorer, score in (sample.scores or {}).items():
        if isinstance(score.value, Mapping):
            values |= {f"{scorer},{key}": value for key, value in score.value.items()}
        else:
            values[scorer] = score.value
    return values


def _inspect_sample(task: str, name: str, column: str, epochs: Sequence[Any], file: Path) -> _Sample:
    """Return the mean over the epochs that have a score, as Inspect computes it."""
    where, grades, digests = f"{file}: sample {name}", list[float](), set[str]()
    seen = {epoch.epoch for epoch in epochs}
    if len(seen) < len(epochs):
        raise RunError(f"{where}: one epoch occurs twice; expected each once")
    for epoch in epochs:
        value = _inspect_values(epoch).get(column)
        if value is not None and not (isinstance(value, float) and math.isnan(value)):
            grades.append(_grade(value, f"{where}: {column}"))
        text = epoch.input
        content = text if isinstance(text, str) else [(m.role, m.text) for m in text]
        digests.add(_digest([content, epoch.choices, epoch.target]))
    if not grades:
        error = getattr(epochs[0].error, "message", None)
        raise RunError(
            f"{where}: has no score of {column}{f' ({error})' if error else ''}; its row cannot be paired"
        )
    if len(digests) > 1:
        raise RunError(f"{where}: its epochs have different inputs or targets")
    return task, name, digests.pop(), math.fsum(grades) / len(grades), epochs[0].metadata or {}


def _inspect_mean(results: Any, column: str) -> float | None:
    """Return the mean that the log itself reports; None if it reports none."""
    for score in results.scores if results else ():
        if column in (score.name, f"{score.scorer},{score.name}") and score.reducer in (None, "mean"):
            for name in ("accuracy", "mean"):
                if name in score.metrics:
                    return float(score.metrics[name].value)
    return None


def _column(present: Iterable[str], metric: Sequence[str], *, where: str) -> str:
    names = list(present)
    chosen = [name for name in names if not metric or name in metric or name.partition(",")[0] in metric]
    if len(chosen) != 1:
        asked = f" of {', '.join(metric)}" if metric else ""
        raise RunError(
            f"{where}: expected one metric{asked}, found {len(chosen)}; --metric names one of: "
            f"{'; '.join(names) or 'none'}"
        )
    return chosen[0]


def _grade(value: Any, where: str) -> float:
    """Return a value as a number; words convert as in Inspect."""
    number = _WORDS.get(value.lower()) if isinstance(value, str) else None
    if number is None and isinstance(value, str | int | float):
        with contextlib.suppress(ValueError):
            number = float(value)
    if number is None or not math.isfinite(number):
        raise RunError(f"{where}: expected a number for each sample, found {quote(value)}")
    return number


def _check_mean(grades: Sequence[float], stated: Any, *, what: str) -> None:
    mean = math.fsum(grades) / len(grades)
    if isinstance(stated, int | float) and not math.isclose(mean, stated, rel_tol=1e-6, abs_tol=1e-9):
        raise RunError(
            f"{what}: the mean of its {len(grades):,} samples is {mean:.6g}, its results report {stated:.6g}: "
            "the file is incomplete, or the metric is not a mean over samples and cannot be compared row by row"
        )


def _digest(content: Any) -> str:
    return sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _cluster_keys(
    place: Path, samples: Sequence[_Sample], field: str, *, asked: bool
) -> list[str | None] | None:
    """Return the values of a field, None for samples without it; return None if no sample has the field."""
    values = [fields.get(field) for *_, fields in samples]
    if all(value is None for value in values):
        if not asked:
            return None
        known = dict.fromkeys(name for *_, fields in samples for name in fields)
        raise RunError(
            f"{place}: no sample has the field {field} to cluster by; they have {listed(list(known), most=9)}"
        )
    for value in values:
        if not isinstance(value, str | int | None):
            raise RunError(f"{place}: {field}: expected a name to cluster by, found {quote(value)}")
    return [None if value is None else str(value) for value in values]
