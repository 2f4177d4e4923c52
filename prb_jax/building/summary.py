"""Everything that decides a build, and `summary.json`, from which the cards are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from prb_jax.building.gates.judged import read_judgements
from prb_jax.building.gating import Gated
from prb_jax.building.models import EndpointWriter, Writer, cost
from prb_jax.building.parts import BenchmarkPart
from prb_jax.building.prompts import prompt_digests
from prb_jax.building.records import Record
from prb_jax.building.settings import BuildSettings, ChatModelSettings
from prb_jax.building.writing import total
from prb_jax.data.options import flat_settings
from prb_jax.data.records import digest
from prb_jax.judges.chat import ChatModel, EndpointChat
from prb_jax.metrics.clusters import OVER_USERS
from prb_jax.plugins import get_plugin
from prb_jax.runs.rows import Row
from prb_jax.scoring.comparison_table import clusters_of
from prb_jax.scoring.run import computing_versions

_NOT_COMPARED: Final = ("data", "relax", "cache")
_MODELS: Final = ("generator.", "judge.")
_LATER: Final = ("gates.plugins", "gates.margin", "gates.require_sound")
"""Options that earlier builds did not have: those that leave them as they are can be continued."""


def build_inputs(
    settings: BuildSettings, records: Sequence[Record], *, writer: Writer, judge: ChatModel | None
) -> dict[str, Any]:
    """Return everything that decides a build, JSON-ready: records, models, prompts and settings."""
    compared = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in flat_settings(settings).items()
        if name not in _NOT_COMPARED and not name.startswith(_MODELS)
    }
    names = settings.gates.plugins
    for name, value in flat_settings(BuildSettings()).items():
        if name in _LATER and compared[name] == (list(value) if isinstance(value, tuple) else value):
            compared.pop(name)
    local = not isinstance(writer, EndpointWriter) or not isinstance(judge, EndpointChat | None)
    return {
        "records": {"count": len(records), "sha256": digest(record.comparison for record in records)},
        "generator": dict(writer.identity()),
        "judge": None if judge is None else dict(judge.identity()),
        "prompts": prompt_digests(),
        "settings": compared,
        **({"plugins": {name: get_plugin("gates", name).origin for name in names}} if names else {}),
        **({"versions": computing_versions(plain=False)} if local else {}),
    }


def build_summary(
    settings: BuildSettings,
    records: Sequence[Record],
    rows: Sequence[Row],
    gated: Gated,
    parts: Sequence[BenchmarkPart],
    inputs: Mapping[str, Any],
    *,
    folder: Path,
    command: Sequence[str],
) -> dict[str, Any]:
    """Return what `summary.json` and the cards say of a build."""
    clusters = clusters_of([pair.comparison for pair in gated.kept])
    kept = {pair.id for pair in gated.kept}
    judged = read_judgements(folder)
    counted = ("prompt_tokens", "completion_tokens")
    written = [total([row[name] for row in rows]) for name in counted]
    replied = [total([count for row in judged for count in row[name]]) for name in counted]
    return {
        "name": settings.product.name,
        "licence": settings.product.licence,
        "data": Path(settings.data).name if settings.data and Path(settings.data).exists() else settings.data,
        "records": len(records),
        "pairs": len(gated.kept),
        "parts": {part.name: len(part.pairs) for part in parts},
        "canaries": {part.name: part.canary for part in parts},
        "users": len(set(clusters.users) - {None}) if any(clusters.users) else len(kept),
        "users_are": "users" if clusters.over == OVER_USERS else clusters.over,
        "relaxed": list(settings.relax),
        "gates": [result.to_json() for result in gated.results],
        "level": settings.gates.level,
        "margin": settings.gates.margin,
        "redacted": settings.redact,
        "generator": settings.generator.called,
        "judge": settings.judge.called if settings.judge.given else None,
        "aspects_derived": sum(row["aspects_derived"] for row in rows if row["id"] in kept),
        "spent": {
            "generator": {
                "tries": sum(row["tries"] for row in rows),
                "requests": sum(row["requests"] for row in rows),
            }
            | _spent(settings.generator, *written),
            "judge": {
                "tries": sum(sum(row["tries"]) for row in judged),
                "requests": sum(len(row["replies"]) for row in judged),
            }
            | _spent(settings.judge, *replied),
        },
        "prompts": inputs["prompts"],
        "seed": settings.seed,
        "command": list(command),
    }


def _spent(settings: ChatModelSettings, prompts: int | None, replies: int | None) -> dict[str, Any]:
    return {"prompt_tokens": prompts, "reply_tokens": replies, "dollars": cost(settings, prompts, replies)}
