"""Folder of an audit: ``audit.json`` has its data and settings, ``audit.db`` has items and judgements.

``secret`` is the key of the annotators' tokens, readable only by its owner.
"""

from __future__ import annotations

import json
import os
import secrets
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypedDict

from prb_jax.building.auditing.database import DATABASE, Database, make_database
from prb_jax.building.auditing.items import make_items
from prb_jax.errors import DataError, PrbWarning, RunError
from prb_jax.platform.processes.agreement import differences
from prb_jax.records.intake import describe_source
from prb_jax.records.sources.recorded import recorded_sources
from prb_jax.records.writing import refuse_file, write_json, writing
from prb_jax.runs.evaluation_inputs import RecordedData
from prb_jax.runs.kind import RunKind, as_recorded
from prb_jax.scoring.inputs import Inputs, read_inputs
from prb_jax.scoring.options import Data
from prb_jax.version import __version__

AUDIT: Final = "audit.json"
REPORT: Final = "report.json"


class _Inputs(TypedDict):
    data: RecordedData
    gold: RecordedData | None
    subset: str | None
    limit: int | None
    sample: int | None
    per_item: int
    check_every: int
    margin: float
    seed: int


_AUDITS: Final = RunKind("prb_jax audit", "prb audit", file=AUDIT, others=(DATABASE,), inputs=_Inputs)
_SECRET: Final = "secret"
_STAGED: Final = f".{DATABASE}.new"
DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType(
    {"subset": None, "limit": None, "sample": None}
    | {"per_item": 3, "check_every": 10, "margin": 0.25, "seed": 0}
)
"""Settings of an audit, see :func:`prb_jax.audit`; they are fixed once the audit has begun."""

_LEAST: Final = {"per_item": 1, "check_every": 0, "sample": 1, "seed": 0}


@dataclass(frozen=True)
class AuditFolder:
    """Contents of ``audit.json``.

    ``inputs`` decide which items there are, how they are assigned, and how they are compared. ``data`` and ``gold`` are
    the names of the sources, empty if Python code passed the records.
    """

    path: Path
    id: str
    inputs: Mapping[str, Any]
    data: tuple[str, ...]
    gold: tuple[str, ...]

    @property
    def database(self) -> Path:
        """Path of the database."""
        return self.path / DATABASE

    def open_database(self, *, write: bool) -> Database:
        """Open the database, and verify that it is intact and belongs to this audit.

        Raises:
          RunError: the verification fails.
        """
        return Database(self.database, audit=self.id, settings=_digest(self.inputs), write=write)


def open_folder(
    path: Path, *, data: Data | None = None, gold: Data | None = None, **settings: Any
) -> AuditFolder:
    """Create the folder of an audit, or open it to continue; this process must have locked it.

    Args:
      path: Folder of the audit.
      data, gold: see :func:`prb_jax.audit`.
      settings: Values by the names of ``DEFAULTS``; None means the default in a new audit, and the audit's own value in
        an existing one.

    Raises:
      RunError: the folder has another audit or something else (the message names each difference), or is read-only.
      DataError: the data cannot be read, are not pairs, or changed since the audit began.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    for name, least in _LEAST.items():
        if given.get(name, least) < least:
            raise RunError(f"{name}: expected {least} or more, found {given[name]}")
    if not 0 < given.get("margin", 1) < 4:
        margin = f"{given['margin']:g}"
        raise RunError(f"margin: expected a number of points above 0 and below 4, found {margin}")
    folder = _read(path)
    if folder is None:
        if data is None:
            raise RunError(f"{path}: found no audit: for a new one, name the pairs with --data")
        return _make(path, data, gold, {**DEFAULTS, **given})
    if data is None and gold is None:
        _check_sources(folder)
    asked = {**folder.inputs, **given}
    for field, source in (("data", data), ("gold", gold)):
        if source is not None:
            asked[field] = _read_pairs(field, source, asked).to_json()
    _refuse_differences(folder, as_recorded(asked))
    staged = path / _STAGED
    if staged.exists() and not folder.database.exists():  # a process was killed while it created the audit
        with writing(folder.database):
            staged.replace(folder.database)
    return folder


def refuse_pairs(path: str | Path) -> None:
    """Raise RunError if a file, probably the pairs, is given in the place of the audit's folder."""
    refuse_file(path, name="the folder of the audit", hint="name a folder first, and pairs with --data")


def read_folder(path: str | Path) -> AuditFolder:
    """Open the folder of an audit for reading.

    Raises:
      RunError: the folder has no audit.
      DataError: the data changed since the audit began.
    """
    refuse_pairs(path)
    folder = _read(Path(path))
    if folder is None:
        raise RunError(f"{path}: found no audit: the folder has no {AUDIT}")
    _check_sources(folder)
    return folder


def read_secret(path: Path) -> bytes:
    """Return the key of the annotators' tokens; the first call creates it.

    Raises:
      RunError: the key cannot be read or written.
    """
    file = path / _SECRET
    with writing(file):
        if not file.exists():
            temporary = file.with_name(f".{_SECRET}.tmp")
            temporary.unlink(missing_ok=True)
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as new:
                new.write(secrets.token_hex(32))
                new.flush()
                os.fsync(new.fileno())
            temporary.replace(file)
        key = file.read_bytes().strip()
    if len(key) < 32:
        raise RunError(
            f"{file}: {len(key)} characters; expected 32 or more: remove the file to create new links"
        )
    return key


def _read(path: Path) -> AuditFolder | None:
    record = _AUDITS.read(path, hint="choose the folder of an audit")
    if record is None:
        return None
    inputs = record["inputs"]
    known = inputs.keys() == {"data", "gold", *DEFAULTS} and isinstance(record.get("id"), str)
    for field in ("data", "gold"):
        names, sources = record.get(field), (inputs.get(field) or {}).get("sources") or []
        known = (
            known
            and isinstance(names, list)
            and len(names) == len(sources)
            and all(isinstance(name, str) for name in names)
        )
    if not known:
        raise RunError(f"{path / AUDIT}: was changed by hand: restore the file from a backup")
    return AuditFolder(path, record["id"], inputs, tuple(record["data"]), tuple(record["gold"]))


def _make(path: Path, data: Data, gold: Data | None, settings: Mapping[str, Any]) -> AuditFolder:
    pairs = _read_pairs("data", data, settings)
    checks = None if gold is None else _read_pairs("gold", gold, settings)
    gold_pairs = () if checks is None else checks.comparisons
    items = make_items(pairs.comparisons, gold_pairs, sample=settings["sample"], seed=settings["seed"])
    inputs = {"data": pairs.to_json(), "gold": None if checks is None else checks.to_json(), **settings}
    record = {
        "kind": _AUDITS.name,
        "format": 1,
        "id": secrets.token_hex(8),
        "inputs": as_recorded(inputs),
        "data": list(pairs.sources),
        "gold": [] if checks is None else list(checks.sources),
        "prb_jax": __version__,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    # The record is written between the two names of the database: a kill leaves nothing, or an audit that can continue.
    make_database(path / _STAGED, items, audit=record["id"], settings=_digest(record["inputs"]))
    write_json(path / AUDIT, record)
    with writing(path / DATABASE):
        (path / _STAGED).replace(path / DATABASE)
    folder = _read(path)
    assert folder is not None
    return folder


def _read_pairs(field: str, data: Data, settings: Mapping[str, Any]) -> Inputs:
    """Read comparisons; subset and limit apply only to the data, not to gold items."""
    if field == "gold":
        return read_inputs(data)
    return read_inputs(data, subset=settings["subset"], limit=settings["limit"])


def _digest(inputs: Mapping[str, Any]) -> str:
    return sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def _refuse_differences(folder: AuditFolder, asked: Mapping[str, Any]) -> None:
    changed = differences(folder.inputs, asked)
    if not changed:
        return
    named = [f"{name}: {old} -> {new}" for name, (old, new) in changed.items()]
    if any(name.startswith(("data", "gold")) for name in changed):
        raise DataError(
            f"{folder.path}: the data are not those of this audit, or changed since it began ({'; '.join(named[:4])}); "
            "restore them, or start another audit in another folder; the judgements are kept"
        )
    raise RunError(
        f"{folder.path}: the settings differ from those of this audit ({'; '.join(named)}); remove them to continue "
        "the audit, or start another audit in another folder"
    )


def _check_sources(folder: AuditFolder) -> None:
    """Reject data that changed; if data are no longer there, the audit uses its own copy."""
    for field, names in (("data", folder.data), ("gold", folder.gold)):
        for name, before in zip(names, (folder.inputs[field] or {}).get("sources", ()), strict=True):
            try:
                recorded_sources([name], where=str(folder.path / AUDIT))
                now = as_recorded(describe_source(name))
            except DataError as error:
                consequence = "the audit uses its own copy of the pairs"
                warnings.warn(
                    f"{name}: cannot be read now ({error}); {consequence}", PrbWarning, stacklevel=2
                )
                continue
            if now != before:
                raise DataError(
                    f"{name}: changed since the audit in {folder.path} began; restore it, or start another audit in "
                    "another folder; the judgements are kept"
                )
