"""The numbers of a finished training run as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from prb_jax.reports.style import new_table


def training_table(summary: Mapping[str, Any], *, title: str) -> Table:
    """One row of numbers for training and one for validation, with what was trained on below.

    Args:
      summary: what `summary.json` of a run of `prb train` holds.
      title: above the table.
    """
    table = new_table(title, ("", "comparisons", "loss", "accuracy", "margin"))
    rows = [("training, last tenth", summary["train_comparisons"], summary["last_tenth"])]
    if summary["validation"] is not None:
        name = f"validation at step {summary['exported_step']:,}"
        rows.append((name, summary["validation_comparisons"], summary["validation"]))
    for name, count, numbers in rows:
        table.add_row(
            name,
            f"{count:,}",
            f"{numbers['loss']:.4f}",
            f"{numbers['accuracy']:.3f}",
            f"{numbers['margin']:.3f}",
        )
    trained, parameters = summary["trained_parameters"], summary["parameters"]
    table.caption = (
        f"{summary['steps']:,} steps, {summary['pairs_seen']:,} comparisons and {summary['tokens_seen']:,} tokens "
        f"seen, {trained:,} of {parameters:,} parameters trained"
    )
    return table
