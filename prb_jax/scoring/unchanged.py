"""Sources that change while they are scored."""

from __future__ import annotations

from prb_jax.errors import DataError
from prb_jax.records.intake import describe_source, large_files
from prb_jax.records.large_lines import stamp
from prb_jax.scoring.inputs import SPLIT, Inputs


def check_unchanged(inputs: Inputs) -> None:
    """Check that no named source has changed since it was read.

    Raises:
      DataError: A source vanished or changed, so the scores would belong to data that no longer exist.
    """
    for name, before in inputs.described().items():
        try:
            if name in inputs.stamps and stamp(large_files(name, split=SPLIT)) == inputs.stamps[name]:
                continue
            after = describe_source(name)
        except DataError as error:
            raise DataError(
                f"{name}: vanished while it was being scored ({error}); the scores so far are kept: restore it, "
                f"back, and the same command finishes the run"
            ) from error
        if after != before:
            raise DataError(
                f"{name}: changed while it was being scored; the scores so far are kept and belong to the "
                f"old contents: restore them to finish the run, or start again in another folder"
            )
