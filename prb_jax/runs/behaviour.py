"""``behaviour.json`` of a run: how well a policy behaved under each reward model, user by user.

Every verb in which reward models change a behaviour writes this file, and `prb correlate` reads it. A figure is a mean
over rows (prompts or pairs); higher is better. It is stored as sums and counts by user, for resampling of users.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Literal, TypedDict

from prb_jax.errors import RunError, quote, short_repr
from prb_jax.records.reading import read_object
from prb_jax.records.schema import check_schema
from prb_jax.records.writing import write_json
from prb_jax.runs.training import BEHAVIOUR
from prb_jax.seams import get

REPETITION: Final = "repetition"
"""Field of a setting that distinguishes repetitions of one figure, e.g. a seed."""

_KIND: Final = "prb_jax behaviour"


class _FigureFile(TypedDict):
    name: str
    reward_model: dict[str, Any]
    label: str
    setting: dict[str, Any]
    policy: str | None
    clusters: list[str]
    sums: list[float]
    counts: list[int]


class _BehaviourFile(TypedDict):
    kind: Literal["prb_jax behaviour"]
    figures: list[_FigureFile]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure of the behaviour under one reward model."""

    name: str  # e.g. "best-of-16"
    reward_model: Mapping[str, Any]  # identity from :func:`reward_identity`
    label: str  # name of the reward model for tables
    # everything else that decides the figure; figures of the same name and setting are compared
    setting: Mapping[str, Any]
    policy: str | None  # architecture of the policy, if any
    clusters: Sequence[str]  # [C] users, from :func:`cluster_of`
    # sums, counts: [C], over the rows of each user
    sums: Sequence[float]
    counts: Sequence[int]

    __repr__ = short_repr

    @property
    def repetition(self) -> Any:
        """Value of the setting that identifies the repetition; None if the figure was not repeated."""
        return self.setting.get(REPETITION)

    @property
    def repeated_setting(self) -> dict[str, Any]:
        """The setting without the field that identifies the repetition."""
        return {name: value for name, value in self.setting.items() if name != REPETITION}

    @property
    def value(self) -> float:
        """The mean over all rows."""
        return math.fsum(self.sums) / sum(self.counts)


def cluster_of(user: str | None, row: str) -> str:
    """Return the cluster of a row: its user, or the row itself if it has no user."""
    return f"row {row}" if user is None else f"user {user}"


def pool(figures: Sequence[Figure]) -> Figure:
    """Pool repetitions of one figure: the mean over all their rows."""
    sums: dict[str, list[float]] = {}
    counts: dict[str, int] = {}
    for figure in figures:
        for cluster, total, count in zip(figure.clusters, figure.sums, figure.counts, strict=True):
            sums.setdefault(cluster, []).append(total)
            counts[cluster] = counts.get(cluster, 0) + count
    return replace(
        figures[0],
        setting=figures[0].repeated_setting,
        clusters=list(sums),
        sums=[math.fsum(terms) for terms in sums.values()],
        counts=[counts[cluster] for cluster in sums],
    )


def reward_identity(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that identify a reward model: all but its name, or its name if there is nothing else."""
    rest = {key: value for key, value in identity.items() if key != "name"}
    return rest or {"name": identity.get("name")}


def figure_of(
    values: Sequence[float],
    clusters: Sequence[str],
    *,
    name: str,
    label: str,
    identity: Mapping[str, Any],
    setting: Mapping[str, Any],
    policy: str | None,
) -> Figure:
    """Return the figure of one value per row.

    Args:
      values, clusters: Value and cluster of each row.
      name, label, setting, policy: see :class:`Figure`.
      identity: Identity of the reward model, with or without a name.
    """
    parts: dict[str, list[float]] = {}
    for value, cluster in zip(values, clusters, strict=True):
        parts.setdefault(cluster, []).append(float(value))
    return Figure(
        name=name,
        reward_model=reward_identity(identity),
        label=label,
        setting=setting,
        policy=policy,
        clusters=list(parts),
        sums=[math.fsum(of_cluster) for of_cluster in parts.values()],
        counts=[len(of_cluster) for of_cluster in parts.values()],
    )


def write_behaviour(folder: Path, figures: Sequence[Figure]) -> None:
    """Write ``behaviour.json``.

    Raises:
      RunError: the file cannot be written.
    """
    write_json(
        folder / BEHAVIOUR, {"kind": _KIND, "format": 1, "figures": [asdict(figure) for figure in figures]}
    )


def read_behaviour(folder: str | Path) -> list[Figure]:
    """Return the figures of a run.

    Raises:
      RunError: the file is missing or invalid.
    """
    path = Path(folder) / BEHAVIOUR
    if not path.exists():
        raise RunError(
            f"{folder}: expected a finished run of a verb with a behaviour (`prb best-of-n`, `prb policy-accuracy`, "
            f"`prb guide`, `prb ppo` with watch.gold), found no {BEHAVIOUR} in it"
        )
    get("runs", "check file").value(path)
    record = read_object(path, error=RunError)
    check_schema(record, _BehaviourFile, where=str(path), error=RunError)
    if not record["figures"]:
        raise RunError(f"{path}: field 'figures': expected at least one figure, found none")
    return [_figure(path, number, value) for number, value in enumerate(record["figures"])]


def _figure(path: Path, number: int, value: dict[str, Any]) -> Figure:
    where = f"{path}: figures[{number}]"
    if odd := value.keys() - {field.name for field in fields(Figure)}:
        raise RunError(f"{where}: field {quote(min(odd))} is not a field of a figure")
    sizes = {len(value[name]) for name in ("clusters", "sums", "counts")}
    if len(sizes) > 1 or sizes == {0}:
        raise RunError(f"{where}: expected clusters, sums and counts of one length")
    if len(set(value["clusters"])) < len(value["clusters"]):
        raise RunError(f"{where}: field 'clusters': expected different users, found one twice")
    if min(value["counts"]) < 1:
        raise RunError(f"{where}: field 'counts': expected whole numbers above 0")
    return Figure(**value)
