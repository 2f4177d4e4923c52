"""Views that a file or a server reports: the view of a model's training, and of a served model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prb_jax.errors import CheckpointError, DataError, quote
from prb_jax.records.reading import read_object
from prb_jax.text.view import TRAINED_VIEW, OrderClaim, View, parse_protocol


@dataclass(frozen=True)
class TrainedView:
    """The view that a model was trained with."""

    view: View  # view of the training data
    method: str  # `method` of the training run
    profile_order: str = "as given"  # order of the posts: "as given" in the data

    def to_json(self) -> dict[str, Any]:
        """Return the contents of the file."""
        return {"method": self.method, **asdict(self.view), "profile_order": self.profile_order}

    def save(self, folder: Path) -> None:
        """Write the file to the folder of a model."""
        (folder / TRAINED_VIEW).write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")


def read_trained_view(folder: Path) -> TrainedView | None:
    """Return the training view stored with a model; None if there is no file.

    Raises:
      CheckpointError: The file cannot be read, or a field is missing, unknown or invalid.
    """
    path = folder / TRAINED_VIEW
    if not path.exists():
        return None
    record = read_object(path, error=CheckpointError)
    kinds = {
        "method": str, "profile_posts": int, "protocol": str, "max_length": int | None, "order_claim": str,
        "profile_order": str,
    }  # fmt: skip
    record.setdefault("order_claim", OrderClaim.ALWAYS.value)  # older models were trained with this claim
    for name in sorted(record.keys() | kinds.keys()):
        if name not in kinds or name not in record:
            what = "missing" if name in kinds else f"unknown; expected only {', '.join(kinds)}"
            raise CheckpointError(f"{path}: field {name!r}: {what}")
        if not isinstance(record[name], kinds[name]) or isinstance(record[name], bool):
            kind = getattr(kinds[name], "__name__", kinds[name])
            raise CheckpointError(f"{path}: field {name!r}: expected {kind}, found {quote(record[name])}")
    try:
        return TrainedView(_view_of(record), record["method"], record["profile_order"])
    except ValueError:
        raise CheckpointError(
            f"{path}: field 'order_claim': expected {' or '.join(OrderClaim)}, found {quote(record['order_claim'])}"
        ) from None
    except DataError as error:
        raise CheckpointError(f"{path}: {error}") from error


def served_view(told: Mapping[str, Any]) -> View:
    """Return the view that a server reports for its model.

    Raises:
      DataError: The reported view is invalid.
    """
    try:
        return _view_of(told)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"view of the server: expected the fields of a view, found {quote(dict(told))}"
        ) from error


def _view_of(told: Mapping[str, Any]) -> View:
    protocol, claim = parse_protocol(told["protocol"]), OrderClaim(told["order_claim"])
    return View(told["profile_posts"], protocol, told["max_length"], claim)
