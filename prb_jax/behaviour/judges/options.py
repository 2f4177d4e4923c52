"""How a judge is prompted: options for users, and the names of judges as rewards. Does not import JAX."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from prb_jax.behaviour.judges.formats import GENERATIVE, GenerativeModel, find_generative
from prb_jax.behaviour.judges.names import (
    ALL_PAIRS,
    HALF,
    KNOCK_OUT,
    PAIRINGS,
    PREFIXES,
    RUBRIC,
    SCORE,
    TIES,
)
from prb_jax.errors import RunError, quote, short_repr
from prb_jax.records.options import option, section
from prb_jax.records.reading import parse_json
from prb_jax.scoring import CONTROLS, NO_CONTROLS
from prb_jax.scoring.prompt_extras import PromptExtras
from prb_jax.text.view import TextProtocol

PAPER_SCORE, PAPER_RUBRIC = "paper-score", "paper-rubric"
RANKING: Final = "ranking"
JUDGE_PROTOCOLS = (*map(str, TextProtocol), SCORE, RUBRIC, RANKING, PAPER_SCORE, PAPER_RUBRIC, *GENERATIVE)
"""The protocols of judges."""
PAPERS = (str(TextProtocol.PAPER), PAPER_SCORE, PAPER_RUBRIC)
"""Protocols of the paper's scripts, which fix the whole prompt."""
RUBRICS = (RUBRIC, PAPER_RUBRIC)  # protocols that show the true rubric of the data: upper bounds
SINGLE = tuple(name for name, row in GENERATIVE.items() if row.single)  # generative models of one response
_WITHOUT_POSTS = (str(TextProtocol.PAPER), RUBRIC, PAPER_RUBRIC)  # default to no posts


@dataclass(frozen=True, kw_only=True)
class JudgeOptions:
    """How comparisons are judged."""

    protocol: str = option(
        str(TextProtocol.DEFAULT),
        "prompts of the judge. default: both orders; paper: one order by a seeded coin, a reply without a verdict "
        "counts as A; score: a separate number for each response; ranking: the best of all responses, as on "
        "RewardBench 2; rubric: 0, 1 or 2 for each aspect of the true rubric (an upper bound); paper-score, "
        "paper-rubric: the same with the prompts of Personalised RewardBench; others: the "
        "formats of generative reward models",
        choices=JUDGE_PROTOCOLS,
    )
    template: str | None = option(
        None,
        "text that asks for the number: with --protocol score it has the places {prompt} and {answer}; with rubric "
        "{answer} and {aspect}; with paper-score {question}, {profile} and {answer}",
        "FILE",
    )
    system: str | None = option(
        None,
        "text of a system turn, with --protocol score or rubric, or for a generative reward model without roles",
        "FILE",
    )
    scale: tuple[int, int] | None = option(
        None, "lowest and highest number, with --protocol score (default: 1 9)", "LOW HIGH"
    )
    top_logprobs: int | None = option(
        None,
        "use the expected number of the N most probable tokens instead of the number in the reply; needs --endpoint "
        "and --protocol score or rubric",
        least=1,
    )
    min_mass: float | None = option(
        None,
        "minimum probability of A and B together, else there is no verdict (default: 0.1); needs --protocol default "
        "and a MODEL without --reason",
        "P",
    )
    pairing: str | None = option(
        None,
        "compare all pairs of the responses of a prompt, each with the next one (circular), or winners only "
        "(knock-out), and rate each by its results; needs --protocol default (default: two responses only; all as a "
        "reward, pairs:MODEL)",
        choices=PAIRINGS,
    )
    ties: str = option(
        HALF,
        "value of a tie with --pairing all or circular: half a win for both (default), a loss for both, or missing",
        choices=TIES,
    )
    prompts: str | None = option(
        None, "folder of the prompts in a checkout of the paper's scripts, for the paper's protocols", "DIR"
    )
    reason: bool = option(False, "the judge thinks in words first (default: one letter or number)")
    reason_tokens: int | None = option(
        None,
        "maximum tokens of a reply in words, including thoughts; a reply that is cut has no verdict (default: 1024 "
        "with --reason, else 16)",
        least=1,
    )
    temperature: float = option(
        0.0,
        "temperature of replies in words; above 0 they are drawn, and each row keeps its seeds",
        "T",
        least=0,
    )
    votes: int = option(
        1,
        "replies in words to every question, at a --temperature above 0; the score is the share of votes",
        least=1,
    )
    chat_template_kwargs: str | None = option(
        None, "values for the judge's chat template, e.g. '{\"enable_thinking\": true}'", "JSON"
    )
    profile_posts: int | None = option(
        None,
        "number of the user's posts that the judge sees (default: 10, and 0 for paper, rubric and paper-rubric)",
        least=0,
    )
    hints: PromptExtras = section(PromptExtras)
    controls: str = option(
        NO_CONTROLS,
        "ask again without user information (blind), with another user's (swap), both (all), or not (default)",
        choices=CONTROLS,
    )
    seed: int = option(0, "seed of --controls swap, drawn replies, knock-outs and rankings", least=0)
    max_length: int | None = option(None, "longest conversation of a MODEL, in tokens", "L", least=1)

    __repr__ = short_repr

    @property
    def posts(self) -> int:
        """Maximum number of posts to show, given or by default."""
        if self.profile_posts is not None:
            return self.profile_posts
        return 0 if self.protocol in _WITHOUT_POSTS else 10

    @property
    def template_variables(self) -> dict[str, Any]:
        """The values for the chat template.

        Raises:
          RunError: they are not a JSON object.
        """
        if self.chat_template_kwargs is None:
            return {}
        given = parse_json(self.chat_template_kwargs.encode(), where="--chat-template-kwargs", error=RunError)
        if not isinstance(given, dict) or not given:
            raise RunError(
                f"--chat-template-kwargs: expected a JSON object with a value, found {quote(self.chat_template_kwargs)}"
            )
        return given

    def check(self, *, local: bool) -> None:
        """Raise RunError for options that conflict; ``local`` means that the judge is a model on this machine."""
        if self.protocol not in JUDGE_PROTOCOLS:
            known = ", ".join(JUDGE_PROTOCOLS)
            raise RunError(f"--protocol: expected one of {known}, found {quote(self.protocol)}")
        paper = self.protocol in PAPERS
        if (self.prompts is None) == paper:
            raise RunError(
                "--prompts DIR: the paper's protocols need it, and the others have their own prompts"
            )
        if paper and self.hints.given:
            names = ", ".join(f"--{name}" for name in self.hints.given)
            raise RunError(f"{names}: the paper's prompts cannot include them: leave it out")
        if self.reason and paper:
            raise RunError("--reason: the paper's prompts say how the judge replies: leave it out")
        generative = GENERATIVE.get(self.protocol)
        if self.reason and generative:
            raise RunError(f"--reason: {self.protocol} thinks unasked: leave it out")
        words = {
            "--reason-tokens": self.reason_tokens is not None,
            "--temperature": self.temperature != 0,
            "--votes": self.votes != 1,
        }
        if given := [flag for flag, is_given in words.items() if is_given]:
            names = ", ".join(given)
            if paper:
                raise RunError(f"{names}: the paper's protocols decide how their judges reply: leave it out")
            if local and not (self.reason or generative):
                raise RunError(
                    f"{names}: a MODEL replies in words only with --reason: add it, or leave this out"
                )
        for flag, number, least in (("--reason-tokens", self.reason_tokens, 1), ("--votes", self.votes, 1)):
            if number is not None and number < least:
                raise RunError(f"{flag}: expected {least} or more, found {number}")
        if not 0 <= self.temperature < math.inf:
            raise RunError(f"--temperature: expected a finite number from 0, found {self.temperature}")
        if self.votes > 1 and not self.temperature:
            raise RunError(
                f"--votes {self.votes}: at temperature 0 all votes are the same: give a --temperature above 0"
            )
        if self.votes > 1 and self.top_logprobs is not None:
            raise RunError(
                "--votes: with --top-logprobs every reply is an expected number already: leave one out"
            )
        if paper and self.template_variables:
            raise RunError("--chat-template-kwargs: the paper's scripts give none: leave it out")
        if self.protocol in RUBRICS and self.controls != NO_CONTROLS:
            raise RunError(
                "--controls: a rubric judge is told what the user wants, without a user too: leave it out"
            )
        for flag, value, protocols in (
            ("--template", self.template, (SCORE, RUBRIC, PAPER_SCORE, *GENERATIVE)),
            ("--system", self.system, (SCORE, RUBRIC, *GENERATIVE)),
            ("--scale", self.scale, (SCORE,)),
            ("--top-logprobs", self.top_logprobs, (SCORE, RUBRIC, *SINGLE)),
        ):
            if value is not None and self.protocol not in protocols:
                raise RunError(f"{flag}: belongs to --protocol {' or '.join(protocols)}: leave it out")
        if self.protocol == RANKING and local and not self.reason:
            raise RunError("--protocol ranking: a MODEL names the best response in words: add --reason")
        if self.top_logprobs is not None and local:
            raise RunError("--top-logprobs: a MODEL on this machine gives all probabilities: leave it out")
        if self.top_logprobs is not None and self.top_logprobs < 1:
            raise RunError(f"--top-logprobs: expected a number above 0, found {self.top_logprobs}")
        if self.min_mass is not None:
            if not local or self.reason or self.protocol != TextProtocol.DEFAULT:
                raise RunError(
                    "--min-mass: belongs to a MODEL that is read at the logits of A and B (--protocol default without "
                    "--reason): leave it out"
                )
            if not 0 <= self.min_mass <= 1:
                raise RunError(f"--min-mass: expected a probability of 0 to 1, found {self.min_mass}")
        pairs = generative is not None and not (generative.single or generative.listwise)
        if self.pairing is not None and self.protocol != TextProtocol.DEFAULT and not pairs:
            raise RunError(
                "--pairing: belongs to --protocol default, which compares two responses: leave it out"
            )
        for flag, value, known in (
            ("--pairing", self.pairing or ALL_PAIRS, PAIRINGS),
            ("--ties", self.ties, TIES),
        ):
            if value not in known:
                raise RunError(f"{flag}: expected one of {', '.join(known)}, found {quote(value)}")
        if self.ties != HALF and self.pairing in (None, KNOCK_OUT):
            raise RunError("--ties: belongs to --pairing all or circular: leave it out")
        if self.max_length is not None and not local:
            raise RunError("--max-length: an endpoint has its own limit: leave it out")
        if self.max_length is not None and (paper or self.reason or generative):
            raise RunError(
                "--max-length: a judge that replies in words has the model's own limit: leave it out"
            )


@dataclass(frozen=True)
class JudgeName:
    """The parts of a judge's name. `judge:MODEL` rates from 1 to 9 how well a response serves its user. `rubric:MODEL`
    rates each aspect of the true rubric (0, 1 or 2; the mean). `pairs:MODEL` compares the responses of a prompt with
    each other."""

    protocol: str  # "score", "rubric" or "default"
    # folder or hub id of a causal language model; at an endpoint (`judge:URL#NAME`) the name of the model there
    model: str
    url: str | None = None  # URL of the endpoint; None for a model on this machine


OF_REWARDS: Final = (
    "template system pairing ties min_mass reason reason_tokens temperature votes top_logprobs "
    "chat_template_kwargs"
)
"""Options that apply to judges as rewards."""

_USED_BY: Final = {
    "template": (SCORE,), "system": (SCORE,), "scale": (SCORE,), "top_logprobs": (SCORE, RUBRIC),
    "pairing": (PREFIXES["pairs:"],), "ties": (PREFIXES["pairs:"],), "min_mass": (PREFIXES["pairs:"],),
}  # fmt: skip


def options_of_judge(options: JudgeOptions, name: str) -> JudgeOptions:
    """Return options of several judges, reset to defaults if they do not apply to the judge of this name."""
    judge, plain = parse_judge(name), JudgeOptions()
    unused = {
        key: getattr(plain, key) for key, protocols in _USED_BY.items() if judge.protocol not in protocols
    }
    if options.reason or judge.url is not None or generative_of(judge):  # replies in words
        unused["min_mass"] = plain.min_mass
    if row := generative_of(judge):  # a row without roles needs the texts of its authors
        texts = () if row.roles else ("system",) if row.listwise else ("template", "system")
        unused = {key: value for key, value in unused.items() if key not in texts}
        if row.listwise:
            unused |= {key: getattr(plain, key) for key in ("pairing", "ties")}
    return replace(options, **unused)


def check_options_used(options: JudgeOptions, names: Sequence[str]) -> None:
    """Raise RunError for an option that is set, but has no effect on any judge of these names."""
    plain, of_judges = JudgeOptions(), [options_of_judge(options, name) for name in names]
    for key in _USED_BY:
        unset = getattr(plain, key)
        if getattr(options, key) != unset and all(getattr(one, key) == unset for one in of_judges):
            raise RunError(f"--{key.replace('_', '-')}: not used by {', '.join(names)}; remove it")


def generative_of(judge: JudgeName) -> GenerativeModel | None:
    """Return the row of a generative reward model that fits the judge's protocol (pairs or responses), or None."""
    row = find_generative(judge.model)
    asked = SCORE if row is not None and row.single else str(TextProtocol.DEFAULT)
    return row if judge.protocol == asked else None


def parse_judge(name: str) -> JudgeName:
    """Return the parts of a name.

    Raises:
      RunError: the name contains no model.
    """
    prefix = next(prefix for prefix in PREFIXES if name.startswith(prefix))
    url, model = None, name.removeprefix(prefix)
    expected = f"{prefix}MODEL, a folder or hub id, or {prefix}URL#NAME"
    if model.startswith(("http://", "https://")):
        url, _, model = model.partition("#")
        expected = f"{prefix}URL#NAME, where NAME is the model's name at the endpoint"
    if not model:
        raise RunError(f"{quote(name)}: expected {expected}")
    return JudgeName(PREFIXES[prefix], model, url)
