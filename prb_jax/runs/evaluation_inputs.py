"""The inputs of an evaluation in its ``run.json``, as far as other code reads them."""

from __future__ import annotations

from typing import NotRequired, TypedDict


class _Source(TypedDict, total=False):
    kind: str
    files: dict[str, str | None]


class RecordedData(TypedDict):
    """Fields of ``run.json`` about the data; logs of other harnesses have more."""

    sources: NotRequired[list[_Source]]
    subset: NotRequired[str | None]
    comparisons: NotRequired[int | None]
    sha256: NotRequired[str | None]


class _Model(TypedDict, total=False):
    name: str
    architecture: str | None
    files: dict[str, str]
    revision: str | None
    template: str | None
    quantize: str | None


class _Hint(TypedDict):
    kind: str


class EvaluationInputs(TypedDict):
    """The inputs of an evaluation that other code reads."""

    model: _Model
    data: NotRequired[RecordedData | None]
    protocol: NotRequired[str | None]
    profile_posts: NotRequired[int | None]
    max_length: NotRequired[int | None]
    limit: NotRequired[int | None]
    # by kind; "upper_bound" lists the kinds that no model could know
    hints: NotRequired[dict[str, _Hint | list[str]]]
    control: NotRequired[str]
    part: NotRequired[str]
