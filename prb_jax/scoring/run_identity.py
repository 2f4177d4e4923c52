"""What a run is: all that decides its result, and how it is done this time."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from prb_jax.processes.sharing import process_count
from prb_jax.scoring.scored import Scorer
from prb_jax.text.view import View
from prb_jax.version import versions


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """All that decides the result of an evaluation.

    Attributes:
      model: the identity of the scorer, without its name where there is more.
      data: what the comparisons are made of.
      view: what is shown of them.
      limit: comparisons of each source.
      seed: of the resampling of benchmark scores.
      versions: of the packages that compute.
      too_long: what happens to a response that leaves no room for its prompt.
      wording: what else the prompt says, beside the view: `View.wording`.
      control: the name of the control, where the model is shown something else than the comparisons.
      hints: `Inputs.hints`: what else the model is told of the users.
    """

    model: Mapping[str, Any]
    data: Mapping[str, Any]
    view: View
    limit: int | None
    seed: int
    versions: Mapping[str, str | None]
    too_long: str
    wording: Mapping[str, str] = field(default_factory=dict)
    control: str | None = None
    hints: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return what `run.json` holds."""
        return {
            "model": self.model,
            "data": self.data,
            **shown_view(self.view),
            **self.wording,
            "limit": self.limit,
            "seed": self.seed,
            "versions": self.versions,
            **({} if self.too_long == "error" else {"too_long": self.too_long}),
            **({} if self.control is None else {"control": self.control}),
            **({"hints": self.hints} if self.hints else {}),
        }


def shown_view(view: View) -> dict[str, Any]:
    """Return a view as the keywords of `Scorer.stream`, JSON-ready."""
    return {
        "protocol": view.protocol.value,
        "profile_posts": view.profile_posts,
        "max_length": view.max_length,
    }


def computing_versions(*, plain: bool) -> dict[str, str | None]:
    """Return the versions of everything that computes; `plain` for a scorer without weights."""
    packages = ("numpy",) if plain else ("numpy", "jax", "jaxlib", "flax", "transformers", "tokenizers")
    return versions(packages)


def session_facts(scorer: Scorer, batch_tokens: int | None) -> dict[str, Any]:
    """Return how the run is done this time; results do not depend on it."""
    session: dict[str, Any] = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "batch_tokens": batch_tokens,
    }
    mesh = getattr(scorer, "mesh", None)
    if mesh is not None:
        devices = mesh.devices.flatten().tolist()
        session["mesh"] = dict(mesh.shape)
        session["attention"] = getattr(scorer, "attention", None)
        session["devices"] = {
            "platform": devices[0].platform,
            "kind": devices[0].device_kind,
            "count": len(devices),
            "processes": process_count(),
        }
    return session
