"""User information in the prompt beyond the profile: a persona, earlier choices, or aspects from a planner.

The true rubric and the narrative of the data can be added too. No model could know them, so the result is marked as an
upper bound.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypedDict

from prb_jax.errors import DataError, RunError, quote, short_repr
from prb_jax.personal.history import by_user, chosen_before
from prb_jax.records.comparison import Comparison, RubricAspect
from prb_jax.records.files import bounded_lines
from prb_jax.records.items import Held
from prb_jax.records.options import option, same_option
from prb_jax.records.reading import parse_json
from prb_jax.runs.kind import RunKind
from prb_jax.runs.rows import RowKind
from prb_jax.scoring import UPPER_BOUND
from prb_jax.scoring.options import Data, EvaluateOptions

if TYPE_CHECKING:
    from prb_jax.scoring.inputs import Inputs

ASPECTS: Final = "aspects.jsonl"


class _AspectLine(TypedDict):
    id: str
    asked: str
    text: str
    tokens: int | None
    posts_dropped: int


ASPECT_ROWS: Final = RowKind(ASPECTS, "aspects", key=itemgetter("id"), schema=_AspectLine)
ASPECT_RUNS: Final = RunKind(name="prb_jax aspects", command="prb aspects", rows=ASPECT_ROWS)

PLANNED, ORACLE, NARRATIVE = "planned", "oracle", "narrative"

PERSONA_HEADING: Final = "About this user:"
HISTORY_HEADING: Final = "What this user chose before:"
ASPECTS_HEADING: Final = "What this user wants from an answer to this question:"


@dataclass(frozen=True, kw_only=True)
class PromptExtras:
    """Options for user information in the prompt beyond the profile."""

    persona: str | None = option(
        None,
        "add a persona to the judge's prompt: a .jsonl file of {user_id, text}, or the narrative of the data (an upper "
        "bound)",
        "FILE|narrative",
    )
    shots: int = option(
        0, "add the user's latest K earlier comparisons with the user's choices", "K", least=0
    )
    history: Data | None = option(
        None,
        "labelled comparisons for --shots (default: earlier comparisons in the data)",
        "NAME_OR_PATH ...",
    )
    aspects: str | None = same_option(EvaluateOptions, "aspects", effect="result")

    __repr__ = short_repr

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the kinds that are requested."""
        return tuple(name for name in ("persona", "shots", "aspects") if getattr(self, name))


def add_prompt_extras(inputs: Inputs, options: PromptExtras) -> Inputs:
    """Return the inputs with the requested information in the hints of each comparison.

    Raises:
      RunError: Options contradict each other, a file cannot be read, or there is nothing to add to any comparison.
      DataError: A comparison is missing from the planner's run, has other contents there, or is in the history.
    """
    if options.shots < 0:
        raise RunError(f"--shots: expected 0 or more, found {options.shots}")
    if options.history is not None and not options.shots:
        raise RunError("--history: requires --shots K")
    if not options.given:
        return inputs
    comparisons = list(inputs.comparisons)
    kinds = {
        "persona": (PERSONA_HEADING, lambda: _personas(options.persona or "", comparisons)),
        "shots": (HISTORY_HEADING, lambda: _choices(options, comparisons)),
        "aspects": (ASPECTS_HEADING, lambda: _aspects(options.aspects or "", comparisons)),
    }
    hints: dict[str, Any] = {}
    sections: list[list[str]] = [[] for _ in comparisons]
    for name in options.given:
        heading, read = kinds[name]
        texts, origin = read()
        missing = texts.count(None)
        if missing == len(texts):
            raise RunError(f"--{name}: no hint is available for any of the {len(texts)} comparisons")
        hints[name] = origin | {"without": missing}
        for section, text in zip(sections, texts, strict=True):
            section += [] if text is None else [f"{heading}\n\n{text}"]
    if bounds := [name for name, origin in hints.items() if origin["kind"] in (ORACLE, NARRATIVE)]:
        hints[UPPER_BOUND] = bounds
    told = Held(
        replace(comparison, hints="\n\n".join(section) or None)
        for comparison, section in zip(comparisons, sections, strict=True)
    )
    return replace(inputs, comparisons=told, prepared=None, hints=hints)


def show_aspects(inputs: Inputs, aspects: str) -> Inputs:
    """Return the inputs with the aspects as hints; arguments and errors as in :func:`add_prompt_extras`."""
    return add_prompt_extras(inputs, PromptExtras(aspects=aspects))


def asked_digest(comparison: Comparison) -> str:
    """Return a digest of a planner's input for a comparison: prompt, profile and context."""
    shown = [
        [(turn.role, turn.content) for turn in comparison.prompt],
        [post.text for post in comparison.profile],
        *([comparison.context] if comparison.context else []),
    ]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:16]


def told_of(hints: Mapping[str, Any]) -> str:
    """Return a phrase that lists the hints of a run; empty without hints."""
    bounds = hints.get(UPPER_BOUND, ())
    kinds = [f"{origin['kind']} {name}" for name, origin in hints.items() if name != UPPER_BOUND]
    return ", ".join(kinds) + (", an upper bound" if bounds else "")


def _aspects(asked: str, comparisons: Sequence[Comparison]) -> tuple[list[str | None], dict[str, Any]]:
    if asked == ORACLE:
        rubrics = ("\n".join(f"- {aspect_text(one)}" for one in c.rubric_aspects) for c in comparisons)
        return [rubric or None for rubric in rubrics], {"kind": ORACLE}
    kind, _, place = asked.partition(":")
    if kind != PLANNED or not place:
        raise RunError(
            f"--aspects: expected planned:DIR, where DIR is a run of `prb aspects`, or oracle, found {quote(asked)}"
        )
    folder = Path(place)
    run = ASPECT_RUNS.read_finished(folder)
    if "model" not in run:
        raise RunError(f"{folder / ASPECT_RUNS.file}: field 'model': missing")
    rows = ASPECT_ROWS.read(folder)
    texts = []
    for comparison in comparisons:
        row = rows.get(comparison.id)
        if row is None:
            raise DataError(
                f"{folder}: has no aspects of comparison {quote(comparison.id)}: it is a run on other data"
            )
        if row["asked"] != asked_digest(comparison):
            raise DataError(
                f"{folder}: the aspects of comparison {quote(comparison.id)} belong to another question or "
                "profile: the data changed since"
            )
        texts.append(row["text"].strip() or None)
    contents = "\n".join(
        json.dumps([comparison.id, text]) for comparison, text in zip(comparisons, texts, strict=True)
    )
    sha256 = hashlib.sha256(contents.encode()).hexdigest()
    return texts, {"kind": PLANNED, "planner": run["model"], "sha256": sha256}


def aspect_text(aspect: RubricAspect) -> str:
    """Return an aspect of the true rubric as text, with its reason if there is one."""
    return f"{aspect.aspect}: {aspect.reason}" if aspect.reason else aspect.aspect


def _personas(asked: str, comparisons: Sequence[Comparison]) -> tuple[list[str | None], dict[str, Any]]:
    if asked == NARRATIVE:
        return [comparison.narrative or None for comparison in comparisons], {"kind": NARRATIVE}
    path = Path(asked)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RunError(
            f"--persona: cannot read {path}: {error.strerror or error}: expected a .jsonl file of {{user_id, text}}, "
            "or narrative"
        ) from error
    texts: dict[str, str] = {}
    for number, line in enumerate(bounded_lines(io.BytesIO(data), path, error=DataError), start=1):
        where = f"{path}:{number}"
        row = parse_json(line, where=where, error=DataError)
        user, text = (row.get("user_id"), row.get("text")) if isinstance(row, dict) else (None, None)
        if not isinstance(user, str | int) or isinstance(user, bool) or not isinstance(text, str):
            raise DataError(f"{where}: expected the fields user_id and text, found {quote(row)}")
        if str(user) in texts:
            raise DataError(
                f"{where}: a second persona of user {quote(str(user))}; expected one for each user"
            )
        texts[str(user)] = text.strip()
    personas = [texts.get(comparison.user_id or "") or None for comparison in comparisons]
    return personas, {"kind": "given", "sha256": hashlib.sha256(data).hexdigest()}


def _choices(
    options: PromptExtras, comparisons: Sequence[Comparison]
) -> tuple[list[str | None], dict[str, Any]]:
    earlier, sha256 = None, None
    if options.history is not None:
        from prb_jax.scoring.inputs import read_inputs  # starts NumPy

        read = read_inputs(options.history)
        earlier, sha256 = by_user(read.comparisons), read.to_json()
    texts = []
    for known in chosen_before(comparisons, most=options.shots, history=earlier):
        texts.append("\n\n".join(map(_choice, known)) or None)
    origin = {"kind": f"{options.shots} earlier", "most": options.shots}
    return texts, origin | ({} if sha256 is None else {"history": sha256})


def _choice(comparison: Comparison) -> str:
    """Return an earlier comparison as text: the best response and the worst one."""
    labels = comparison.labels or ()
    best, worst = labels.index(max(labels)), labels.index(min(labels))
    return (
        f"Question:\n{comparison.question}\n\nPreferred answer:\n{comparison.responses[best]}\n\nOther answer:\n"
        f"{comparison.responses[worst]}"
    )
