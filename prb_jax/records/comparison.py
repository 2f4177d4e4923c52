"""The central record: one prompt, K responses, and information about the user.

The schema extends Personalised RewardBench (arXiv 2604.07343) from pairs to K responses with labels::

    id, question | prompt (string or list of {role, content}), chosen, rejected
    or: responses [K strings], labels [K numbers; higher is better]          (K >= 2)
    optional: user_id, profile [{id, category, text}, or texts; or one text], profile_order, category, subset, margin,
              tools [objects], chat_template_kwargs {name: value}, rendered [true: texts as a chat template made them]
    private:  rubric_aspects [{aspect, evidence, reason}], narrative

A response can also be a conversation, i.e. a list of messages. The common first messages of all responses are then the
prompt, which can be omitted. Conversations can diverge at any turn. Messages keep the fields that chat templates read
(``tool_calls``, ``tool_call_id``, ``name``, ``reasoning_content``, lists of text parts). If a template does not read
one of these fields, rendering raises an error. A record without an id gets a digest of its contents as id.
A scored model never sees the private fields. Every value from a file or from Python is checked once, here: every
``Comparison`` is valid.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import Any, Final

from prb_jax.errors import DataError, listed, quote, short_repr
from prb_jax.records import fields
from prb_jax.records.conversation import (
    Message,
    Messages,
    Turns,
    from_json,
    is_rendered,
    read_context,
    read_conversation,
    refuse_extras,
    turns_of,
    with_context,
)
from prb_jax.records.fields import UNREAD_FIELDS
from prb_jax.seams import get

LISTS: Final = (
    "responses",
    "labels",
    "profile",
    "rubric_aspects",
    "tools",
)  # fields of a record that are lists

_TEXTS: Final = ("profile_order", "category", "subset", "narrative")
_REASONS: Final = ("evidence", "reason")
_POSTS: Final = re.compile(r"\s*(?:\[\s*\{|\{)\s*[\"']")  # the beginning of posts, in JSON or Python


@dataclass(frozen=True, slots=True)
class Post:
    """One item of a user's profile: an earlier text of this user."""

    id: str
    text: str
    category: str = ""

    __repr__ = short_repr


@dataclass(frozen=True, slots=True)
class RubricAspect:
    """One thing the user wanted from an answer. Private: never shown to a scored model."""

    aspect: str
    evidence: str = ""
    reason: str = ""

    __repr__ = short_repr


@dataclass(frozen=True, slots=True, init=False)
class Comparison:
    """One prompt with K >= 2 responses to rank for one user; K = 1 is allowed for scoring.

    The constructor takes the fields of a record as keywords: ``question`` or ``prompt``; ``chosen`` and ``rejected``,
    or ``responses`` and ``labels``. A pair becomes ``responses=(chosen, rejected)`` with ``labels=(1.0, 0.0)``. A
    single response has no labels and can only be scored.

    Attributes:
      id: Unique id within a data set; a digest of the contents if not given.
      prompt: Conversation before the responses; its last message is from the user or a tool. It is empty if the
        responses have different system messages. Tools are on the first message of a conversation.
      responses: [K] non-empty texts. A response of several messages, or of one with tool calls or thoughts, is a
        :class:`prb_jax.records.conversation.Turns`.
      labels: [K] finite numbers, higher is better, not all equal; None for a comparison to be scored only (possible
        from Python, not from files).
      user_id: The user with this preference; None if unknown.
      profile: Posts of the user; a text is one post.
      profile_order: Ranking of the posts, most relevant first: "bm25", "recency" (newest first) or the encoder of `prb
        rank-profiles`; None if unknown.
      category, subset: Free labels; results are reported by subset.
      margin: How much better the chosen response is, if the source gives it.
      rubric_aspects, narrative: Private fields.
      hints: User information in the prompt after the profile: a persona, earlier choices, or aspects from a planner.
        Hints are never read from or written to a record.
      is_pair: True if the record had chosen and rejected. Only a spelling, so comparisons with == ignore it.

    Raises:
      DataError: A field is invalid; the message names the field, the value found and the expected value.
    """

    id: str
    prompt: tuple[Message, ...]
    responses: tuple[str, ...]
    labels: tuple[float, ...] | None
    user_id: str | None
    profile: tuple[Post, ...]
    profile_order: str | None
    category: str | None
    subset: str | None
    margin: float | None
    rubric_aspects: tuple[RubricAspect, ...]
    narrative: str | None
    hints: str | None
    is_pair: bool = field(init=False, compare=False)

    __repr__ = short_repr

    @property
    def has_user_info(self) -> bool:
        """True if there is any user information: a user id, a profile or hints."""
        return bool(self.profile) or self.user_id is not None or self.hints is not None

    def __init__(
        self,
        *,
        id: str | int | None = None,
        question: str | Sequence[Message | Mapping[str, Any]] | None = None,
        prompt: str | Sequence[Message | Mapping[str, Any]] | None = None,
        chosen: str | Sequence[Message | Mapping[str, Any]] | None = None,
        rejected: str | Sequence[Message | Mapping[str, Any]] | None = None,
        responses: Sequence[str | Sequence[Message | Mapping[str, Any]]] | None = None,
        labels: Iterable[float] | None = None,
        user_id: str | int | None = None,
        profile: str | Iterable[Post | str | Mapping[str, Any]] | None = None,
        profile_order: str | None = None,
        category: str | None = None,
        subset: str | None = None,
        margin: float | None = None,
        tools: Iterable[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        rendered: bool | None = None,
        rubric_aspects: Iterable[RubricAspect | Mapping[str, Any]] | None = None,
        narrative: str | None = None,
        hints: str | None = None,
    ) -> None:
        row = {name: value for name, value in locals().items() if name not in ("self", "hints")}
        for name in LISTS:
            row[name] = fields.as_list(row[name])
        where = "comparison" if id is None else f"comparison {quote(id)}"
        _fill(self, row, where=where)
        object.__setattr__(self, "hints", fields.optional_text(hints, where, "hints"))

    @classmethod
    def from_row(cls, row: Mapping[str, Any], *, where: str, labelled: bool = True) -> Comparison:
        """Read one record of a file; keys outside the schema are ignored, null means absent.

        Args:
          row: Decoded record.
          where: Start of error messages, e.g. "FILE:LINE".
          labelled: If True, labels are required.

        Raises:
          DataError: A field is missing, has the wrong type or is invalid, or required labels are missing.
        """
        if not isinstance(row, Mapping):
            raise DataError(f"{where}: expected an object with fields, found {fields.found(row)}")
        comparison = cls.__new__(cls)
        _fill(comparison, row, where=where, found=_columns_of(row))
        if labelled and comparison.labels is None:
            _check_several(comparison.responses, where)
            expected = "missing; 'responses' needs one label per response"
            fields.fail(where, "labels", f"{expected}{_columns_of(row)}")
        return comparison

    @property
    def question(self) -> str:
        """Content of the last user message of the prompt; empty without one."""
        return next((turn.content for turn in reversed(self.prompt) if turn.role == "user"), "")

    @property
    def context(self) -> str:
        """Tools and arguments of the chat template as JSON; empty without them."""
        return (self.prompt or turns_of(self.responses[0]))[0].context

    def with_user_of(self, other: Comparison | None) -> Comparison:
        """Return the comparison with the user, profile and hints of another one, or without any for None.

        Nothing is read or checked again.
        """
        changed = copy.copy(self)
        for name, nothing in (("profile", ()), ("profile_order", None), ("user_id", None), ("hints", None)):
            object.__setattr__(changed, name, nothing if other is None else getattr(other, name))
        return changed

    def to_row(self) -> dict[str, Any]:
        """Return the record as a JSON-ready dict; ``from_row`` turns it back into an equal comparison.

        Absent optional fields are left out.
        """
        row: dict[str, Any] = {"id": self.id}
        if len(self.prompt) == 1 and not self.prompt[0].fields and self.prompt[0].role == "user":
            row["question"] = self.prompt[0].content
        elif is_rendered(self.prompt):
            row |= {"prompt": self.prompt[0].content, "rendered": True}
        elif self.prompt:
            row["prompt"] = [turn.as_dict() for turn in self.prompt]
        responses: list[Any] = list(self.responses)
        if any(isinstance(response, Turns) for response in responses):
            responses = [[turn.as_dict() for turn in turns_of(response)] for response in responses]
        if self.is_pair:
            row["chosen"], row["rejected"] = responses
        else:
            row["responses"] = responses
            if self.labels is not None:
                row["labels"] = list(self.labels)
        row |= json.loads(self.context or "{}")
        for name in ("user_id", "profile_order", "category", "subset", "margin", "narrative"):
            value = getattr(self, name)
            if value is not None:
                row[name] = value
        if self.profile:
            row["profile"] = [{"id": p.id, "category": p.category, "text": p.text} for p in self.profile]
        if self.rubric_aspects:
            row["rubric_aspects"] = [
                {"aspect": a.aspect, "evidence": a.evidence, "reason": a.reason} for a in self.rubric_aspects
            ]
        return row


def _columns_of(row: Mapping[str, Any]) -> str:
    """Return the end of a message about a missing field: the columns of the record, and how to name another one."""
    names = listed([repr(str(name)) for name in row], most=12) or "none"
    return (
        f"; found {names}; if the field has another name in the data, add it: --columns FIELD=COLUMN, "
        'or "DATA?FIELD=COLUMN" in Python and configs'
    )


def _fill(comparison: Comparison, row: Mapping[str, Any], *, where: str, found: str = "") -> None:
    """Check ``row`` and set the fields of a bare ``Comparison``; `found` ends a message about a missing field."""
    given = row.get
    refuse_extras(row, UNREAD_FIELDS, where)
    context = read_context(row, where)
    chosen, rejected, responses, labels = (
        given("chosen"),
        given("rejected"),
        given("responses"),
        given("labels"),
    )
    is_pair = chosen is not None or rejected is not None
    if is_pair:
        other = "responses" if responses is not None else "labels" if labels is not None else None
        if other is not None:
            fields.fail(where, other, "given beside 'chosen' and 'rejected'; expected one spelling, not both")
        named = [("chosen", chosen), ("rejected", rejected)]
    elif responses is None:
        if given("question") is None and given("prompt") is None:
            fields.fail(where, "question", f"missing; expected 'question' or 'prompt'{found}")
        expected = "missing; expected 'chosen' and 'rejected', or 'responses' and 'labels'"
        fields.fail(where, "chosen", f"{expected}{found}")
    else:
        items = fields.sequence(responses, where, "responses")
        named = [(f"responses[{i}]", item) for i, item in enumerate(items)]
        if not named:
            _check_several((), where)
    asked = given("prompt")
    if given("rendered") not in (None, False):
        asked = get("messages", "rendered").value(row, named, where)
    prompt, texts = read_conversation(given("question"), asked, named, where=where, found=found)
    if context:
        prompt, texts = _with_context(prompt, texts, context)
    values = {
        "prompt": prompt,
        "responses": texts,
        "labels": (1.0, 0.0) if is_pair else None if labels is None else _labels(labels, where, texts),
        "user_id": fields.optional_identifier(given("user_id"), where, "user_id"),
        "profile": read_profile(given("profile"), where),
        **{name: fields.optional_text(given(name), where, name) for name in _TEXTS},
        "margin": None if given("margin") is None else fields.number(given("margin"), where, "margin"),
        "rubric_aspects": _rubric(given("rubric_aspects"), where),
        "hints": None,
        "is_pair": is_pair,
        "id": fields.optional_identifier(given("id"), where, "id") or "",
    }
    for name, value in values.items():
        object.__setattr__(comparison, name, value)
    if not comparison.id:
        contents = json.dumps(comparison.to_row(), sort_keys=True)
        object.__setattr__(comparison, "id", sha256(contents.encode()).hexdigest()[:16])


def _with_context(
    prompt: Messages, responses: tuple[str, ...], context: str
) -> tuple[Messages, tuple[str, ...]]:
    if prompt:
        return with_context(prompt, context), responses
    return prompt, tuple(Turns(with_context(turns_of(response), context)) for response in responses)


def _check_several(responses: Sequence[str], where: str) -> None:
    if len(responses) < 2:
        fields.fail(where, "responses", f"expected at least 2 responses, found {len(responses)}")


def _labels(value: object, where: str, responses: Sequence[str]) -> tuple[float, ...]:
    _check_several(responses, where)
    items = fields.sequence(value, where, "labels")
    labels = tuple(fields.number(item, where, f"labels[{i}]") for i, item in enumerate(items))
    if len(labels) != len(responses):
        expected = f"expected {len(responses)} numbers, one per response"
        fields.fail(where, "labels", f"{expected}, found {len(labels)}")
    if min(labels) == max(labels):
        fields.fail(where, "labels", f"all equal to {labels[0]:g}; expected one response better than another")
    return labels


def read_profile(value: object, where: str) -> tuple[Post, ...]:
    """Return the posts of a profile, which can be JSON; () for None. Error messages start with ``where``."""
    if value is None:
        return ()
    value = parsed_profile(value, where)
    if isinstance(value, str):
        value = [value] if value.strip() else []
    return tuple(_post(item, where, i) for i, item in enumerate(fields.objects(value, where, "profile")))


def parsed_profile(value: Any, where: str) -> Any:
    """Return a profile that is JSON as its list or object, and any other value unchanged.

    Raises:
      DataError: A text begins like posts in JSON, but is not valid JSON.
    """
    parsed = from_json(value)
    if isinstance(parsed, str) and _POSTS.match(parsed):
        fields.fail(where, "profile", f"begins like JSON, but is not valid JSON: {fields.found(value)}")
    return parsed


def _post(value: object, where: str, index: int) -> Post:
    if isinstance(value, Post):
        item: Mapping[str, Any] = {"id": value.id, "text": value.text, "category": value.category}
    elif isinstance(value, str):
        item = {"text": value}
    else:
        item = fields.mapping(value, where, f"profile[{index}]")
    text, identifier, category = item.get("text"), item.get("id"), item.get("category")
    if type(text) is str and type(identifier) is str and type(category) is str:
        plain = text.isascii() and identifier.isascii() and category.isascii()
        if plain:  # fast path for most posts, because profiles have by far the most values of a record
            return Post(identifier, text, category)
    return Post(
        id="" if identifier in (None, "") else fields.identifier(identifier, where, f"profile[{index}].id"),
        text=fields.text(text, where, f"profile[{index}].text"),
        category="" if category is None else fields.text(category, where, f"profile[{index}].category"),
    )


def _rubric(value: object, where: str) -> tuple[RubricAspect, ...]:
    aspects = []
    for i, entry in enumerate(() if value is None else fields.objects(value, where, "rubric_aspects")):
        name = f"rubric_aspects[{i}]"
        given = asdict(entry) if isinstance(entry, RubricAspect) else entry
        item = fields.mapping(given, where, name)
        aspects.append(
            RubricAspect(
                fields.text(item.get("aspect"), where, f"{name}.aspect"),
                *(fields.optional_text(item.get(key), where, f"{name}.{key}") or "" for key in _REASONS),
            )
        )
    return tuple(aspects)
