"""A fixed date for chat templates that print today's: a reward must not change from day to day."""

from __future__ import annotations

import re
from datetime import datetime

from prb_jax.errors import CheckpointError

FIXED_DATE = datetime(2024, 7, 26)
"""Date for templates that print one: the default date of the Llama 3.1 template."""

_CLOCK_CALL = re.compile(r"strftime_now\s*\(\s*(?P<quote>['\"])(?P<format>[^'\"]*)(?P=quote)\s*\)")


def fix_clock(text: str, *, where: str) -> str:
    """Return `text` after a macro that answers every call of `strftime_now` with :data:`FIXED_DATE`.

    Templates read the clock only through this function; a macro of the same name hides it.

    Raises:
      CheckpointError: The template computes the date format, so the macro cannot list the answers.
    """
    formats = sorted({match["format"] for match in _CLOCK_CALL.finditer(text)})
    calls = len(re.findall(r"strftime_now\s*\(", text))
    if len(_CLOCK_CALL.findall(text)) != calls or any(set(form) & {"\\", "'"} for form in formats):
        raise CheckpointError(
            f"{where}: the chat template reads the clock with a computed format, so scores would change"
            " with the day; give a template without the date with --chat-template FILE"
        )
    cases = "".join(
        f"{{% if format == '{form}' %}}{FIXED_DATE.strftime(form)}{{% endif %}}" for form in formats
    )
    # trim_blocks removes the newline after a block tag, so the template still begins at the start of a
    # line, where lstrip_blocks expects it.
    return f"{{% macro strftime_now(format) %}}{cases}{{% endmacro %}}\n{text}"
