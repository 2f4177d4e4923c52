"""How a judge is asked: the options, and the ways that they lead to, on this machine or behind an endpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from prb_jax.errors import RunError, quote
from prb_jax.generation.judge import Way
from prb_jax.generation.judge_pairs import BothOrders, PaperWay
from prb_jax.generation.judge_ratings import SpokenRatings, load_expected_ratings
from prb_jax.generation.paper_ratings import read_paper_ratings
from prb_jax.generation.ratings import RatingTemplate, Scale, read_template
from prb_jax.generation.rubrics import RUBRIC_SCALE, RubricTemplate
from prb_jax.generation.speakers import Speaker, local_speaker
from prb_jax.generation.verdicts import read_paper_prompts
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.scoring import NO_CONTROLS
from prb_jax.scoring.prompt_extras import HintOptions
from prb_jax.text.protocol import TextProtocol

SCORE: Final = "score"
RUBRIC: Final = "rubric"
PAPER_SCORE, PAPER_RUBRIC = "paper-score", "paper-rubric"
JUDGE_PROTOCOLS = (*map(str, TextProtocol), SCORE, RUBRIC, PAPER_SCORE, PAPER_RUBRIC)
"""How a judge can be asked."""
PAPERS = (str(TextProtocol.PAPER), PAPER_SCORE, PAPER_RUBRIC)
"""Those of the paper's scripts, which decide all that is asked."""
RUBRICS = (RUBRIC, PAPER_RUBRIC)
"""Those that show the true rubric of the data: upper bounds."""

_POSTS = {str(TextProtocol.PAPER): 0, RUBRIC: 0, PAPER_RUBRIC: 0}
_DEFAULT_POSTS: Final = 10


@dataclass(frozen=True, kw_only=True)
class JudgeOptions:
    """How comparisons are judged.

    Attributes:
      protocol: "default", pairs in both orders; "paper", one order by a seeded coin, with the paper's parser; "score",
        a number for each response by itself; "rubric", 0, 1 or 2 for each aspect of the true rubric; "paper-score" and
        "paper-rubric", these two as the paper's scripts ask.
      reason: whether the judge thinks in words first; not with the paper's protocols.
      prompts: of the paper's protocols: the folder with its prompt files.
      template: of "score", "rubric" and "paper-score": a file with the text that asks for the number; the project's own
        one if not given ("paper-score" has none).
      system: of "score" and "rubric": a file with the text of a system turn.
      scale: of "score": the lowest and the highest number; 1 and 9 if not given.
      top_logprobs: of "score" and "rubric" at an endpoint: so many most probable tokens are asked for, and the score is
        the expected number; the number in the reply if not given.
      hints: what else the judge is told of the users; not with the paper's protocols.
      controls: the judge is asked again without the user ("blind"), with another one ("swap"), for "all" of these, or
        for "none".
      seed: of the other users of "swap".
      profile_posts: at most this many posts of the user are shown; if not given 10, and 0 for pairs of the paper's
        protocol and for rubrics, which say what the user wants.
      max_length: longest conversation of a model on this machine, in tokens.
      min_mass: of "default" with a model on this machine that is not asked to reason: the least probability of A and B
        together, among all tokens, that makes a verdict; 0.1 if not given.
    """

    protocol: str = "default"
    reason: bool = False
    prompts: str | None = None
    template: str | None = None
    system: str | None = None
    scale: tuple[int, int] | None = None
    top_logprobs: int | None = None
    hints: HintOptions = field(default_factory=HintOptions)
    controls: str = NO_CONTROLS
    seed: int = 0
    profile_posts: int | None = None
    max_length: int | None = None
    min_mass: float | None = None

    @property
    def posts(self) -> int:
        """The most posts that are shown, given or not."""
        default = _POSTS.get(self.protocol, _DEFAULT_POSTS)
        return default if self.profile_posts is None else self.profile_posts

    def check(self, *, local: bool) -> None:
        """Raise RunError for options that do not go together.

        Args:
          local: whether the judge is a model on this machine.
        """
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
            raise RunError(f"{names}: the paper's prompts have no place for them: leave it out")
        if self.reason and paper:
            raise RunError("--reason: the paper's prompts say how the judge replies: leave it out")
        if self.protocol in RUBRICS and self.controls != NO_CONTROLS:
            raise RunError(
                "--controls: a rubric judge is told what the user wants, without a user too: leave it out"
            )
        for flag, value, protocols in (
            ("--template", self.template, (SCORE, RUBRIC, PAPER_SCORE)),
            ("--system", self.system, (SCORE, RUBRIC)),
            ("--scale", self.scale, (SCORE,)),
            ("--top-logprobs", self.top_logprobs, (SCORE, RUBRIC)),
        ):
            if value is not None and self.protocol not in protocols:
                raise RunError(f"{flag}: belongs to --protocol {' or '.join(protocols)}: leave it out")
        if self.top_logprobs is not None and local:
            raise RunError("--top-logprobs: a MODEL on this machine tells all probabilities: leave it out")
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
        if self.max_length is not None and not local:
            raise RunError("--max-length: an endpoint has its own limit: leave it out")
        if self.max_length is not None and (paper or self.reason):
            raise RunError(
                "--max-length: a judge that replies in words has the model's own limit: leave it out"
            )


def local_way(model: str | Path, options: JudgeOptions, loading: LoadOptions) -> Way:
    """Load a model on this machine as a judge.

    Raises:
      CheckpointError, MeshError: it cannot be loaded, or be read in this way.
      RunError: a file of the options cannot be read.
    """
    if options.protocol in PAPERS or options.reason:
        return spoken_way(local_speaker(model, loading), options)
    if options.protocol in (SCORE, RUBRIC):
        return load_expected_ratings(
            model, loading, template=_template(options), scale=_scale(options), max_length=options.max_length
        )
    from prb_jax.generation.judge_logits import load_logits_way

    return load_logits_way(model, loading, max_length=options.max_length, min_mass=options.min_mass)


def spoken_way(speaker: Speaker, options: JudgeOptions) -> Way:
    """Return the way of a judge that replies in words.

    Raises:
      RunError: a file of the options cannot be read.
    """
    if options.protocol in (SCORE, RUBRIC):
        return SpokenRatings(
            speaker,
            _template(options),
            _scale(options),
            reason=options.reason,
            alternatives=options.top_logprobs,
        )
    if options.protocol not in PAPERS:
        return BothOrders(speaker, options.reason)
    assert options.prompts is not None
    if options.protocol == TextProtocol.PAPER:
        return PaperWay(speaker, read_paper_prompts(options.prompts))
    return read_paper_ratings(speaker, options.protocol, prompts=options.prompts, template=options.template)


def _template(options: JudgeOptions) -> RatingTemplate:
    kind = RubricTemplate if options.protocol == RUBRIC else RatingTemplate
    return read_template(options.template, reason=options.reason, system=options.system, kind=kind)


def _scale(options: JudgeOptions) -> Scale:
    return Scale(*RUBRIC_SCALE) if options.protocol == RUBRIC else Scale(*options.scale or ())
