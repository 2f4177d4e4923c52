"""The table of questions that `prb ask` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from prb_jax.reports.style import new_table
from prb_jax.study.ask import Question

if TYPE_CHECKING:
    from rich.table import Table


def render_questions(questions: Sequence[Question], *, top: int) -> Table:
    """Return a line for each of the first questions, and what a random one would tell."""
    from rich.markup import escape

    ruled = questions[0].pref_rule is not None
    headings = ["question", "information", "prefers the first", *(["PReF's rule"] if ruled else [])]
    table = new_table("The questions that tell most", headings)
    for question in questions[:top]:
        cells = [f"{question.information:.4f}", f"{question.probability:.2f}"]
        cells += [] if question.pref_rule is None else [f"{question.pref_rule:.3g}"]
        table.add_row(escape(question.id), *cells)
    mean = float(np.mean([question.information for question in questions]))
    caption = [f"information in nats; a question at random: {mean:.4f}"]
    if ruled:
        chosen = max(questions, key=lambda question: question.pref_rule or 0.0)
        caption.append(f"PReF's rule asks {chosen.id}: {chosen.information:.4f}")
    table.caption = escape("\n".join(caption))
    return table
