"""Comparisons in TRL's preference format: prompt, chosen and rejected as lists of messages, with further columns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

from prb_jax.errors import DataError, quote
from prb_jax.records.conversation import Message, is_rendered, joined_parts, turns_of
from prb_jax.records.intake import Records, each_comparison
from prb_jax.text.view import TextProtocol, visible


def trl_rows(
    data: str | Path | Records, *, profile_posts: int = 0, subset: str | None = None, split: str = "test"
) -> Iterator[dict[str, Any]]:
    """Yield rows for TRL's trainers, in the order of the data: one row per pair of responses with different labels.

    Args:
      data: Data, as in :func:`prb_jax.read_comparisons`.
      profile_posts: Number of profile posts in the prompt, in the format of this package.
      subset, split: Selection, as in :func:`prb_jax.read_comparisons`.

    Returns:
      Rows of `prompt`, `chosen` and `rejected`, with those fields of the comparison that are present: `tools` (as JSON,
      which TRL reads), `chat_template_kwargs`, `margin`, `user_id`, `profile`, `subset` and `category`. Private fields
      are left out. Where the two conversations of any comparison differ from their first message on, no row has a
      `prompt`, and `chosen` and `rejected` are whole conversations: TRL cannot read an empty prompt, and all rows of a
      file need the same columns.

    Raises:
      DataError: Errors of :func:`prb_jax.read_comparisons`, or a comparison lacks labels.
    """
    read = data if isinstance(data, str | Path) else list(each_comparison(data, subset=subset, split=split))
    whole = any(not one.prompt for one in each_comparison(read, subset=subset, split=split))
    for comparison in each_comparison(read, subset=subset, split=split):
        if comparison.labels is None:
            raise DataError(f"comparison {quote(comparison.id)}: field 'labels': missing")
        seen = visible(comparison, profile_posts=profile_posts, protocol=TextProtocol.DEFAULT)
        given = comparison.to_row()
        names = ("user_id", "profile", "subset", "category", "margin")
        about = {name: given[name] for name in names if name in given} | json.loads(
            comparison.context or "{}"
        )
        if "tools" in about:
            about["tools"] = json.dumps(about["tools"])
        rendered = is_rendered(comparison.prompt)
        prompt: Any = [_message(turn) for turn in seen.prefix_messages]
        if rendered:
            prompt = comparison.prompt[0].content
        answers: list[Any] = [
            text if rendered else [_message(turn) for turn in turns_of(text)] for text in seen.responses
        ]
        pairs = [
            (better, worse)
            for better, worse in permutations(range(len(answers)), 2)
            if comparison.labels[better] > comparison.labels[worse]
        ]
        for better, worse in pairs:
            name = comparison.id if len(answers) == 2 else f"{comparison.id}#{better}-{worse}"
            sides = {"chosen": answers[better], "rejected": answers[worse]}
            if whole:
                yield {"id": name, **{side: prompt + answer for side, answer in sides.items()}, **about}
            else:
                yield {"id": name, "prompt": prompt, **sides, **about}


def _message(turn: Message) -> dict[str, Any]:
    """Return a message whose content is one text: many templates lose a list of parts, and a column has one type."""
    given = turn.as_dict()
    return given | {"content": joined_parts(given["content"])} if "content" in given else given
