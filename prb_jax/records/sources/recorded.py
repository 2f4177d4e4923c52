"""Sources that the record of a run names."""

from __future__ import annotations

from typing import Any

from prb_jax.errors import DataError
from prb_jax.plugins import is_imported
from prb_jax.records.intake import resolve
from prb_jax.records.schema import check_schema
from prb_jax.records.sources.python import PythonSource


def recorded_sources(names: Any, *, where: str) -> list[str]:
    """Return the names of the sources in the record of a run, to open them again.

    Records are data, which strangers may have written: a Python file that one names is not run, unless the user lets it
    run by `--import`.

    Args:
      names: Value in the record.
      where: File of the record, for the message.

    Raises:
      DataError: A name is a Python file, or the value is not a list of names.
    """
    check_schema(names, list[str], where=f"{where}: data", error=DataError)
    for name in names:
        if resolve(name, split="").kind == PythonSource.kind and not is_imported(name):
            raise DataError(
                f"{where}: names the Python file of {name}, which a record cannot run: to run it, name it again, "
                f"--data {name}"
            )
    return names
