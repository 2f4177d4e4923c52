"""The comparisons of one evaluation, with proof of what they were."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prb_jax.data.comparison import Comparison
from prb_jax.data.lines import JsonLines
from prb_jax.errors import DataError, short_repr


@dataclass(frozen=True)
class Inputs:
    """Labelled comparisons with distinct ids, at least one.

    Attributes:
      comparisons: in the order in which they are reported.
      sha256: of the comparisons' contents, in order; None where the sources name files with theirs.
      sources: for each named source what it is made of (files and their sha256); empty for
        comparisons given from Python. In place of its sha256 a large file of JSON lines stands itself, as it is read
        while it is scored: see :meth:`described`.
      subset: which subset of the sources was asked for.
      benchmarks: positions of the comparisons of each benchmark that the sources name.
      describe: gives what a named source is made of now.
      prepared: the folder that they all come from, where `prb prepare` wrote their tokens too.
      stamps: of the sources that are large, what changes with their files: while it does not, they need not be
        described again.
      stamp: gives the stamp of a source now.
      hints: by kind, where the hints of the comparisons come from; empty where they have none.
    """

    comparisons: Sequence[Comparison]
    sha256: str | None
    sources: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    subset: str | None = None
    benchmarks: Mapping[str, Sequence[int]] = field(default_factory=dict)
    describe: Callable[[str], Mapping[str, Any]] = field(kw_only=True, repr=False)
    prepared: Path | None = None
    stamps: Mapping[str, Sequence[Any]] = field(default_factory=dict, repr=False)
    stamp: Callable[[str], Sequence[Any]] = field(default=lambda name: (), repr=False)
    hints: Mapping[str, Any] = field(default_factory=dict)

    __repr__ = short_repr

    @property
    def reading(self) -> list[JsonLines]:
        """The files that are read while they are scored, each byte once."""
        values = (value for source in self.sources.values() for value in (source.get("files") or {}).values())
        return [value for value in values if isinstance(value, JsonLines)]

    def complete(self) -> None:
        """Read the files to their ends, for their digests; a collective.

        Raises:
          DataError: one of them cannot be read.
        """
        for file in self.reading:
            len(file)

    def described(self, *, whole: bool = True) -> dict[str, Mapping[str, Any]]:
        """Return what each named source is made of, JSON-ready; a collective.

        Args:
          whole: reads the files to their ends; if not, digests that are not known yet are None.
        """

        def digest(file: Any) -> Any:
            if not isinstance(file, JsonLines):
                return file
            return file.digest if whole or file.complete else None

        return {
            name: {
                **source,
                **(
                    {"files": {each: digest(file) for each, file in source["files"].items()}}
                    if source.get("files")
                    else {}
                ),
            }
            for name, source in self.sources.items()
        }

    def to_json(self, *, whole: bool = True) -> dict[str, Any]:
        """Return what `run.json` says of them; a collective.

        Args:
          whole: reads the files to their ends; if not, what is not known yet is None: digests of files and the number
            of the comparisons.
        """
        sources = list(self.described(whole=whole).values())
        known = whole or all(file.complete for file in self.reading)
        return {
            "sources": sources,
            "subset": self.subset,
            "comparisons": len(self.comparisons) if known else None,
            "sha256": self.sha256,
        }


def check_unchanged(inputs: Inputs) -> None:
    """Makes sure that every named source is still what was read.

    Raises:
      DataError: a source vanished or changed since, so the scores would be of data nobody has.
    """
    for name, before in inputs.described().items():
        try:
            if name in inputs.stamps and inputs.stamp(name) == inputs.stamps[name]:
                continue
            after = inputs.describe(name)
        except DataError as error:
            raise DataError(
                f"{name}: vanished while it was being scored ({error}); the scores so far are kept: put it "
                f"back, and the same command finishes the run"
            ) from error
        if after != before:
            raise DataError(
                f"{name}: changed while it was being scored; the scores so far are kept and belong to the "
                f"old contents: put those back to finish the run, or start again in another folder"
            )
