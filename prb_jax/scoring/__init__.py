"""From a model and comparisons to scores on disk: the scorer, resumable runs, evaluation, baselines."""

from __future__ import annotations

TOO_LONG = ("error", "skip")  # how to handle a comparison if a response leaves no room for the prompt

HISTORY = "labelled comparisons from which a fitted method learns the users, or a folder of saved user states"
"""Help text of `history` for all verbs that accept fitted methods."""

NO_CONTROLS = "none"
CONTROLS = (NO_CONTROLS, "blind", "swap", "all")
"""Control runs: without the profile (blind), or with another user's profile (swap)."""

VOTES = ("baseline:popularity", "baseline:nearest-users")
"""Baselines that count votes of other users: only comparisons that other users judge too have rows."""

UPPER_BOUND = "upper_bound"  # entry of a run's record that names information no real model could have

READS_TEXTS = "{} reads the whole text of profile, prompt and responses, and computes on no device"
"""Reason why a scorer without weights has no options."""
