"""The options of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prb_jax.errors import RunError, short_repr
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.records.intake import Records
from prb_jax.records.options import option, section
from prb_jax.records.writing import refuse_file
from prb_jax.scoring import CONTROLS, HISTORY, TOO_LONG
from prb_jax.seams import get
from prb_jax.text.view import ViewOptions, choose_view

Data = str | Path | Sequence[str | Path] | Records
"""Names of sources, or records."""


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Options of an evaluation; `prb_jax.evaluate` documents each one.

    The public functions build this object once and pass it on.

    Raises:
      DataError, RunError: A choice is wrong for any model and data.
    """

    out: str | Path | None = None
    name: str | None = None
    progress: bool = True
    subset: str | None = option(None, "read only this subset of the data", "S")
    view: ViewOptions = section(ViewOptions)
    too_long: str = option(
        "error",
        "how to handle a response that leaves no room for the prompt: raise an error (default), or skip the "
        "comparison, count it in summary.json and list it in left_out.jsonl",
        choices=TOO_LONG,
    )
    controls: str | None = option(
        None,
        "control runs of the same model: without the profile (blind), with another user's (swap), both (all), or "
        "none (default: blind if the model sees a profile)",
        choices=CONTROLS,
    )
    history: Data | None = option(
        None,
        f"{HISTORY} (default: each user's earlier comparisons in the data)",
        "NAME_OR_PATH ...",
        effect="contents",
    )
    aspects: str | None = option(
        None,
        "add the user's wishes to the prompt: the texts of a run of `prb aspects`, or the true rubric (an upper "
        "bound, never ranked with models)",
        "planned:DIR|oracle",
        effect="contents",
    )
    loading: LoadOptions = section(LoadOptions)
    limit: int | None = option(
        None, "read only the first N comparisons of each source; for testing only", least=1
    )
    batch_tokens: int | None = option(None, "approximate number of tokens computed at a time", least=1)
    seed: int = option(0, "seed for bootstrap intervals of benchmark scores and for --controls swap", least=0)
    wandb: str | None = option(
        None, "also log the summary to this project of Weights & Biases", "PROJECT", effect="none"
    )
    part: str | None = option(
        None, "score only the I-th of N parts, as one of N jobs; `prb merge` joins them into one run", "I/N"
    )

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if self.out is not None:
            refuse_file(self.out)  # a Path of an empty name would be the working directory
        choose_view(None, self.view)
        if self.part is not None:
            get("parts", "parse").value(self.part)
            if self.out is None or self.wandb is not None:
                raise RunError(
                    "part: requires out, a folder for its rows, and no wandb, which is for the whole run"
                )

    @property
    def folder(self) -> Path | None:
        """Path of the run folder."""
        return None if self.out is None else Path(self.out)
