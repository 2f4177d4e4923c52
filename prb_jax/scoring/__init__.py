"""From a model and comparisons to scores on disk: the scorer, resumable runs, evaluation, baselines."""

from __future__ import annotations

TOO_LONG = ("error", "skip")  # what happens to a comparison whose response leaves no room for its prompt

HISTORY = "labelled comparisons of which a fitted method learns the users, or a folder of their saved states"
"""The meaning of `history` wherever a model may be such a method."""

NO_CONTROLS = "none"
CONTROLS = (NO_CONTROLS, "blind", "swap", "all")
"""What the model is scored with once more: no profile, another user's profile."""

VOTES = ("baseline:popularity", "baseline:nearest-users")
"""The baselines that count votes of other users: they have rows for some of the comparisons alone."""

UPPER_BOUND = "upper_bound"  # in the record of a run: what it was told or knows that no model could know

READS_TEXTS = "{} reads the whole text of profile, prompt and responses, and computes on no device"
"""Why a scorer without weights has no options."""
