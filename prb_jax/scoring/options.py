"""The options of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prb_jax.errors import RunError
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.records.options import option, section
from prb_jax.records.writing import refuse_file
from prb_jax.scoring import CONTROLS, HISTORY, TOO_LONG
from prb_jax.scoring.inputs import Data
from prb_jax.seams import get
from prb_jax.text.view import ViewOptions, choose_view


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """The choices of a user who evaluates a model; `prb_jax.evaluate` says what each one means.

    They become this object once, at the public edge, and go through whole.

    Raises:
      DataError, RunError: a choice that is wrong whatever the model and the data are.
    """

    out: str | Path | None = None
    name: str | None = None
    progress: bool = True
    subset: str | None = option(None, "one subset of the data", "S")
    view: ViewOptions = section(ViewOptions)
    too_long: str = option(
        "error",
        "what a response is that leaves no room for its prompt within that: an error (default), or left out, counted "
        "in summary.json and named in left_out.jsonl",
        choices=TOO_LONG,
    )
    controls: str | None = option(
        None,
        "the same model without the profile (blind), with another user's (swap), both (all), or none of these "
        "(default: blind where the model sees a profile)",
        choices=CONTROLS,
    )
    history: Data | None = option(
        None,
        f"{HISTORY} (default: each user's comparisons before the one in question)",
        "NAME_OR_PATH ...",
        effect="contents",
    )
    aspects: str | None = option(
        None,
        "what the prompt says that the user wants: the texts of a run of `prb aspects`, or the true rubric (an "
        "upper bound, which no leaderboard shows among the results)",
        "planned:DIR|oracle",
        effect="contents",
    )
    loading: LoadOptions = section(LoadOptions)
    limit: int | None = option(None, "the first N comparisons of each source; for testing only", least=1)
    batch_tokens: int | None = option(None, "tokens computed at a time", least=1)
    seed: int = option(0, "of the resampling of benchmark scores and of --controls swap", least=0)
    wandb: str | None = option(
        None, "write the summary to this project of Weights & Biases too", "PROJECT", effect="none"
    )
    part: str | None = option(
        None, "score the I-th of N parts alone, as one of N jobs; `prb merge` makes one run of them", "I/N"
    )

    def __post_init__(self) -> None:
        if self.out is not None:
            refuse_file(self.out)  # a Path of an empty name would be the working directory
        choose_view(None, self.view)
        if self.part is not None:
            get("parts", "parse").value(self.part)
            if self.out is None or self.wandb is not None:
                raise RunError(
                    "part: needs out, a folder for its rows; wandb: is for the whole run: leave it out"
                )

    @property
    def folder(self) -> Path | None:
        """The run folder."""
        return None if self.out is None else Path(self.out)
