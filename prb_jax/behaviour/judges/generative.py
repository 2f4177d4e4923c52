"""Judges that are generative reward models, prompted in their own format; facts about the person are the principle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from prb_jax.behaviour.judges.formats import GenerativeModel
from prb_jax.behaviour.judges.options import JudgeOptions
from prb_jax.behaviour.judges.pairs import PairJudge
from prb_jax.behaviour.judges.ratings import (
    ONE_NUMBER,
    Ratings,
    RatingTemplate,
    Scale,
    check_places,
    fill_places,
    read_text,
)
from prb_jax.behaviour.judges.scorer import Conversation, shown_texts
from prb_jax.errors import RunError
from prb_jax.records.comparison import Comparison, Message
from prb_jax.scoring.remote.endpoint import Reply
from prb_jax.text.visible import OrderClaim, profile_heading, render_profile

SUITS_USER = "The response gives this user what the user wants."
PLACES = ("prompt", "response_a", "response_b")


def principle_of(comparison: Comparison, posts: int) -> str | None:
    """Return the principle of a comparison's user: the posts, and any aspects, persona or choices given."""
    profile = render_profile(comparison.profile, posts)
    told = [profile_heading(comparison.profile_order, OrderClaim.RECORDED), profile] if profile else []
    told += [comparison.hints] if comparison.hints else []
    return "\n\n".join([SUITS_USER, *told]) if told else None


@dataclass(frozen=True)
class GenerativePairs(PairJudge):
    """A judge of pairs in the format of a generative reward model; it judges each pair in both orders."""

    row: GenerativeModel | None = None
    template: str | None = None  # text of the user's turn, for a row without roles
    system: str | None = None  # text of a system turn before it

    def identity(self) -> Mapping[str, Any]:
        assert self.row is not None
        texts = {"rating_template": self.template, "system": self.system}
        digests = {
            name: sha256(text.encode()).hexdigest()[:16] for name, text in texts.items() if text is not None
        }
        return {**self.model.identity(), "judge": self.row.name, "format": self.row.name, **digests}

    def ask(self, comparison: Comparison, first: int, posts: int) -> list[Conversation]:
        assert self.row is not None
        return [self._conversation(comparison, shown, posts) for shown in (first, 1 - first)]

    def _conversation(self, comparison: Comparison, first: int, posts: int) -> Conversation:
        assert self.row is not None
        before = () if self.system is None else (Message("system", self.system),)
        if self.template is not None:
            prompt, responses = shown_texts(comparison, profile_posts=posts)
            texts = {"prompt": prompt, "response_a": responses[first], "response_b": responses[1 - first]}
            return (*before, Message("user", fill_places(self.template, texts)))
        texts = {
            "principle": principle_of(comparison, posts),
            "response_1": comparison.responses[first],
            "response_2": comparison.responses[1 - first],
        }
        behind = [Message(role, text) for role in self.row.roles if (text := texts[role]) is not None]
        return (*comparison.prompt, *behind)

    def verdict(self, reply: str) -> str | None:
        assert self.row is not None
        return self.row.verdict(reply)


@dataclass(frozen=True)
class PrincipleRatings(Ratings):
    """Asks a generative reward model whether one response fulfils the principle of its user: Yes is 1, No is 0.

    With the alternatives of an endpoint, the rating is log p(Yes) - log p(No) at the position of the judgement.
    """

    row: GenerativeModel | None = None

    def identity(self) -> Mapping[str, Any]:
        assert self.row is not None
        way = {} if self._alternatives is None else {"way": f"logits, top {self._alternatives}"}
        return {**self.model.identity(), "judge": self.row.name, "format": self.row.name, **way}

    def _questions(self, comparison: Comparison) -> int:
        return 1

    def ask(self, comparison: Comparison, first: int, posts: int) -> list[Conversation]:
        principle = principle_of(comparison, posts) or SUITS_USER
        return [
            (*comparison.prompt, Message("assistant", response), Message("principle", principle))
            for response in comparison.responses
        ]

    def _read(self, reply: Reply) -> tuple[float | None, float | None]:
        assert self.row is not None
        said = None if reply.is_cut else self.row.verdict(reply.text)
        if said is None or self._alternatives is None:
            return {"Yes": 1.0, "No": 0.0, None: None}[said], None
        assert reply.alternatives is not None
        for token, others in reversed(reply.alternatives):
            if token.strip().casefold() == said.casefold():
                known = {word.strip().casefold(): logprob for word, logprob in reversed(others)}
                both = "yes" in known and "no" in known
                return (known["yes"] - known["no"] if both else None), None
        return None, None


def open_generative(
    row: GenerativeModel, model: Any, options: JudgeOptions
) -> GenerativePairs | PrincipleRatings:
    """Return the judge of a row.

    Raises:
      RunError: the row needs the template of the model card, or has roles and a template is given.
    """
    if row.roles and (options.template is not None or options.system is not None):
        raise RunError(
            f"--template, --system: {row.name} is asked by the roles of its messages: leave them out"
        )
    if row.single:
        return PrincipleRatings(model, RatingTemplate(ONE_NUMBER), Scale(0, 1), True, row=row)
    if row.roles:
        return GenerativePairs(model, True, row=row)
    if options.template is None:
        raise RunError(
            f"--template FILE: --protocol {row.name} needs the user's turn of the model's card, with the places "
            "{prompt}, {response_a} and {response_b}"
        )
    text = read_text(options.template, "--template")
    check_places(text, options.template, needed=PLACES, places=PLACES)
    system = None if options.system is None else read_text(options.system, "--system")
    return GenerativePairs(model, True, row=row, template=text, system=system)
