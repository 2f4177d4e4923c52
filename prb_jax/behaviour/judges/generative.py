"""Judges that are generative reward models, prompted in their own format; facts about the person are the principle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np

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
from prb_jax.behaviour.judges.scorer import Answer, Conversation, random_order, shown_texts
from prb_jax.errors import RunError
from prb_jax.records.comparison import Comparison, Message
from prb_jax.records.conversation import transcript
from prb_jax.scoring.remote.endpoint import Reply
from prb_jax.text.view import OrderClaim, profile_heading, render_profile

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


@dataclass(frozen=True)
class ListRatings(Ratings):
    """Asks a generative reward model once for the scores of all responses, by the principle of their user.

    The user's turn is one JSON object with the principle, the prompt and the responses, which are shown in random order
    under the names model-1 to model-K.
    """

    row: GenerativeModel | None = None
    system: str = ""  # text of the system turn
    seed: int = 0  # seed of the orders
    compares = True

    def identity(self) -> Mapping[str, Any]:
        assert self.row is not None
        digest = sha256(self.system.encode()).hexdigest()[:16]
        ways = {"judge": self.row.name, "format": self.row.name, "system": digest, "seed": self.seed}
        return {**self.model.identity(), **ways}

    def _questions(self, comparison: Comparison) -> int:
        return 1

    def ask(self, comparison: Comparison, first: int, posts: int) -> list[Conversation]:
        order, turns = random_order(comparison, self.seed), comparison.prompt
        asked = {
            "principle": principle_of(comparison, posts) or SUITS_USER,
            "prompt": turns[0].content if len(turns) == 1 else transcript(turns),
            "responses": {f"model-{n}": comparison.responses[place] for n, place in enumerate(order, 1)},
        }
        # the authors' text begins and ends with an empty line, which editors and `read_text` remove
        return [
            (
                Message("system", f"\n{self.system}\n"),
                Message("user", json.dumps(asked, ensure_ascii=False)),
            )
        ]

    def read(self, comparison: Comparison, first: int, answer: Answer) -> tuple[Any, dict[str, Any]]:
        assert self.row is not None
        order = random_order(comparison, self.seed)
        votes = [None if reply.is_cut else self.row.verdict(reply.text) for reply in answer.replies]
        known = [numbers for numbers in votes if numbers is not None and len(numbers) == len(order)]
        details: dict[str, Any] = {"ratings": [None] * len(order), "order": order}
        if self._votes > 1:
            details["votes"] = [numbers if numbers in known else None for numbers in votes]
        if not known:
            return [self.scale.middle] * len(order), details
        means = np.mean(known, axis=0)
        details["ratings"] = [float(means[order.index(place)]) for place in range(len(order))]
        return details["ratings"], details


def open_generative(
    row: GenerativeModel, model: Any, options: JudgeOptions
) -> GenerativePairs | PrincipleRatings | ListRatings:
    """Return the judge of a row.

    Raises:
      RunError: the row needs the template or the system turn of the model's authors, or a text is given that the row
        has no use for.
    """
    if row.listwise:
        if options.template is not None:
            raise RunError(f"--template: {row.name} is asked in JSON: leave it out")
        if options.system is None:
            raise RunError(
                f"--system FILE: --protocol {row.name} needs the system turn of the model's authors (docs/judging.md)"
            )
        system = read_text(options.system, "--system")
        template = RatingTemplate(ONE_NUMBER)
        return ListRatings(model, template, Scale(1, 5), True, row=row, system=system, seed=options.seed)
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
