"""The card of a published model, made from its runs: figures with intervals, data, commands."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prb_jax.errors import short_repr
from prb_jax.reports.blocks import PageTable, visible
from prb_jax.reports.cells import headline, last_figures, scorers
from prb_jax.reports.table import gains
from prb_jax.runs.finished import FinishedRun
from prb_jax.scoring.prompt_extras import told_of
from prb_jax.version import __version__


@dataclass(frozen=True)
class TrainedRun:
    """What a finished run of `prb train` says: `record` of its `train.json`, and its summary."""

    record: Mapping[str, Any]
    summary: Mapping[str, Any]

    __repr__ = short_repr


def model_card(
    repository: str,
    *,
    training: TrainedRun | None,
    evaluations: Sequence[FinishedRun],
    base_model: str | None = None,
) -> str:
    """Return the card in Markdown, with the header that the hub reads.

    Args:
      repository: its name on the hub.
      training: of the model, where it was trained here.
      evaluations: of the model; each gives a table.
      base_model: hub id of the model that the training began with, where it is one.
    """
    header = {
        "library_name": "prb_jax",
        "pipeline_tag": "text-classification",
        "tags": ["reward-model", "personalization", "prb_jax"],
        **({"base_model": base_model} if base_model else {}),
    }
    parts = [
        "---",
        *(
            f"{name}: {json.dumps(value)}" for name, value in header.items()
        ),  # JSON is YAML, quoted throughout
        "---",
        "",
        f"# {_inline(repository.partition('/')[2])}",
        "",
        f"A reward model, published from a run of `prb_jax` {__version__}.",
    ]
    for run in evaluations:
        parts += ["", *_evaluation(run)]
    if training is not None:
        parts += ["", *_training(training)]
    parts += [
        "",
        "## Use",
        "",
        "    import prb_jax as prb",
        f'    rm = prb.load("{repository}")',
        '    rm.reward("Tea or coffee?", "Coffee.", profile=[{"id": "1", "text": "Coffee keeps me awake."}])',
    ]
    return "\n".join(parts) + "\n"


def _evaluation(run: FinishedRun) -> Iterator[str]:
    record, summary = run.record, run.summary
    names = [str(name) for name in record.get("data") or ["comparisons given from Python"]]
    inputs = record["inputs"]
    yield f"## Evaluation on {_inline(', '.join(names))}"
    yield ""
    definition = (summary.get("definitions") or {}).get("ci95", "see summary.json")
    yield from _table(headline(scorers(summary, name="this model"), title="", note=""))
    yield ""
    yield f"[..] 95 % interval: {_inline(definition)}. A tie is not a win."
    yield ""
    for gain in gains(summary.get("controls") or {}):
        yield f"- {_inline(gain)}"
    yield f"- data: {_inline(_sources(inputs.get('data')))}"
    view = ", ".join(f"{name} {inputs.get(name)}" for name in ("protocol", "profile_posts", "max_length"))
    yield f"- shown to the model: {_inline(view)}"
    if told := told_of(inputs.get("hints") or {}):
        yield f"- told beside the profile: {_inline(told)}"
    if (quantized := inputs.get("model", {}).get("quantize")) is not None:
        yield f"- weights quantised for this evaluation: {_inline(str(quantized))}"
    if inputs.get("limit") is not None:
        yield f"- **testing only**: the first {inputs['limit']} comparisons of each source"
    if limited := summary.get("truncated"):
        yield f"- text cut in {limited:,} of {summary['n']:,} comparisons"
    yield from _command(record)


def _training(run: TrainedRun) -> Iterator[str]:
    inputs, summary = run.record["inputs"], run.summary
    settings = {**inputs.get("settings", {}), **(run.record.get("sessions") or [{}])[-1].get("settings", {})}
    yield "## Training"
    yield ""
    yield from _table(last_figures(summary))
    yield ""
    yield f"- data: {_inline(str(settings.get('data')))}, {inputs.get('data', {}).get('train', 0):,} comparisons"
    yield f"- starting model: {_inline(str(settings.get('model')))}"
    chosen = ", ".join(
        f"{name}={settings[name]}" for name in ("method", "tuning", "steps", "seed") if name in settings
    )
    yield f"- settings: {_inline(chosen)}"
    yield from _command(run.record)


def _command(record: Mapping[str, Any]) -> Iterator[str]:
    command = record.get("command")
    if isinstance(command, list) and command:
        yield ""
        yield "The command that repeats it:"
        yield ""
        yield f"    {visible(shlex.join(map(str, command))).replace(chr(10), ' ')}"


def _sources(data: Any) -> str:
    """The files of the data with the first letters of their digests."""
    if not isinstance(data, Mapping):
        return "not recorded"
    found = []
    for source in data.get("sources") or []:
        files = [f"{name} ({digest[:19]})" for name, digest in (source.get("files") or {}).items()]
        named = [str(source[key]) for key in ("repository", "name", "part") if source.get(key)]
        found.append(
            ", ".join([*files[:10], *([f"and {len(files) - 10} more files"] if files[10:] else []), *named])
        )
    subset = f"; subset {data['subset']}" if data.get("subset") else ""
    return f"{'; '.join(found) or data.get('sha256')}{subset}; {data.get('comparisons', 0):,} comparisons"


def _table(table: PageTable) -> Iterator[str]:
    yield f"| {' | '.join(map(_inline, table.heads))} |"
    yield "|" + "---|" * table.words + "---:|" * (len(table.heads) - table.words)
    for row in table.rows:
        yield f"| {' | '.join(_inline(cell.text) for cell in row)} |"


def _inline(text: str) -> str:
    """Return text for the middle of a line of Markdown: nothing in it is markup."""
    text = visible(text).replace("\n", " ").replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{letter}" if letter in "\\`*_[]|#" else letter for letter in text)
