"""Every option of `prb build`: its name, type, default and meaning.

A config is a Python file whose `get_config()` changes :func:`default_config`, or a YAML or TOML file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ml_collections import ConfigDict

from prb_jax.errors import RunError, quote
from prb_jax.models import Dtype
from prb_jax.training.config import build_settings, to_config_dict
from prb_jax.training.options import check_choices, check_value

FORMATS: Final = ("parquet", "array_record")

DEFINITIONS: Final = {
    "refusals": "share of pairs with an answer that refuses, or is empty",
    "truncations": "share of pairs with an answer that ran into the limit of tokens, or ends within a sentence",
    "copied-aspects": "share of pairs with an answer that has the whole name of an aspect of three words or more, or "
    "so many consecutive words of an aspect, its evidence or its reason, as the question has not",
    "personal-text": "share of pairs with an e-mail address, a telephone, card, account or social security number, or "
    "an IP address in question, profile, aspects, narrative or answers",
    "duplicates": "share of pairs with an answer that is nearly the same as one of an earlier pair (Jaccard similarity "
    "of word triples), or whose two answers are the same",
    "overlap": "share of pairs whose question or answer shares so many consecutive words with a known test set, or is "
    "one of its texts as a whole",
    "rubric-judge": "share of pairs in which the judge who knows the aspects does not prefer the chosen answer in both "
    "orders",
    "length": "share of pairs whose chosen answer has more words; equal ones count half",
    "style": "accuracy of a ridge classifier of length, layout and wrappers of the two answers, fitted to the pairs of "
    "other people (five folds); it fails above 0.5 beyond chance",
    "blind-judge": "share of pairs in which the judge who does not know the user prefers the chosen answer in both "
    "orders; no preference in both orders counts half",
    "blind-reward": "share of pairs in which a reward model that is shown no profile gives the chosen answer the "
    "higher score; a tie counts half. Of several models the one that is farthest from 0.5",
    "yield": "share of the records that gave a pair which every gate let through",
}
"""The figure of each gate, in the order in which pairs go through them."""

GATES: Final = tuple(DEFINITIONS)

SIDES: Final = ("chosen", "rejected")
"""Of a pair: the answer that follows the aspects, and the one that avoids them."""


@dataclass(frozen=True, kw_only=True)
class ChatModelSettings:
    """A language model: on this machine, or behind an endpoint that speaks OpenAI's chat API.

    Attributes:
      model: Hugging Face folder or hub id of a causal language model on this machine; or none, for an endpoint.
      dtype: type of its weights and activations; none for the checkpoint's.
      mesh: sizes of the axes of its devices, as "fsdp=4,tensor=2"; none for all devices.
      revision: branch, tag or commit of a model on the hub.
      tokenizer: folder or hub id of its tokenizer; none for the model's.
      chat_template: Jinja file, or "plain", for a model without a template of its own.
      endpoint: URL of an API, as https://HOST/v1; its key is read from PRB_ENDPOINT_KEY.
      name: of the model at the endpoint.
      concurrency: requests to the endpoint at a time.
      tries: of one request.
      seconds: until a try is given up.
      backoff: seconds before the second try; twice as many before each further one.
      prompt_price: dollars for a million tokens of prompts, for the cost in the card.
      reply_price: dollars for a million tokens of replies.
    """

    model: str | None = None
    dtype: Dtype | None = None
    mesh: str | None = None
    revision: str | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    endpoint: str | None = None
    name: str | None = None
    concurrency: int = 8
    tries: int = 6
    seconds: float = 120.0
    backoff: float = 1.0
    prompt_price: float | None = None
    reply_price: float | None = None

    @property
    def given(self) -> bool:
        """Whether there is a model at all."""
        return self.model is not None or self.endpoint is not None

    @property
    def called(self) -> str:
        """The name of the model."""
        return str(self.model or self.name)

    @property
    def prices(self) -> tuple[float, float] | None:
        """Dollars for a million tokens of prompts and of replies; None where nobody says."""
        if self.prompt_price is None or self.reply_price is None:
            return None
        return self.prompt_price, self.reply_price

    def check(self, section: str) -> None:
        """Raise RunError where both or neither half of an endpoint is given, or DataError for a value out of range."""
        check_choices(self, f"{section}.")
        if self.model is not None and (self.endpoint is not None or self.name is not None):
            raise RunError(f"config section '{section}': expected model, or endpoint and name, found both")
        if (self.endpoint is None) != (self.name is None):
            raise RunError(f"config section '{section}': endpoint and name: expected both or neither")
        if (self.prompt_price is None) != (self.reply_price is None):
            raise RunError(
                f"config section '{section}': prompt_price and reply_price: expected both or neither"
            )
        for name in ("concurrency", "tries"):
            check_value(self, f"{section}.", name, getattr(self, name) >= 1, "at least 1")
        for name in ("seconds", "backoff"):
            check_value(self, f"{section}.", name, getattr(self, name) > 0, "above 0")
        for name in ("prompt_price", "reply_price"):
            value = getattr(self, name)
            check_value(self, f"{section}.", name, value is None or value >= 0, "at least 0")


@dataclass(frozen=True, kw_only=True)
class WritingSettings:
    """How answers are planned and written.

    Attributes:
      candidates: answers that are written for each side of a pair; the two that are most alike in length and layout
        are kept.
      rounds: times that answers are asked for, while one side has none that can be used.
      least_words: of an answer.
      most_words: of an answer.
      profile_posts: posts of the user that the generator is shown.
      temperature: of answers; plans and aspects are written at it too.
      max_new_tokens: of an answer.
      plan_tokens: most tokens of a plan.
      most_aspects: aspects that are derived from a narrative, at most.
      together: records that are written at a time; a run that is killed loses at most these, and nothing that an
        endpoint said.
    """

    candidates: int = 4
    rounds: int = 3
    least_words: int = 30
    most_words: int = 100
    profile_posts: int = 10
    temperature: float = 0.8
    max_new_tokens: int = 400
    plan_tokens: int = 300
    most_aspects: int = 4
    together: int = 16


@dataclass(frozen=True, kw_only=True)
class GateSettings:
    """What the gates let through.

    Attributes:
      level: of the intervals that must hold 0.5.
      similarity: Jaccard similarity of the word triples of two answers, from which they are near-duplicates.
      copied_words: consecutive words of an aspect that must not occur in an answer.
      known: sources as of `prb evaluate --data`, whose questions and answers must not occur here.
      overlap_words: consecutive words that are shared with one of these, from which a pair is left out.
      reward_models: that must not tell the chosen answer without the user: models as of `prb evaluate`.
      least_yield: share of the records that must give a pair.
    """

    level: float = 0.99
    similarity: float = 0.7
    copied_words: int = 5
    known: tuple[str, ...] = ()
    overlap_words: int = 13
    reward_models: tuple[str, ...] = ()
    least_yield: float = 0.5


@dataclass(frozen=True, kw_only=True)
class ProductSettings:
    """The files of the finished benchmark.

    Attributes:
      name: of the benchmark, in its card.
      licence: of the data, as the hub spells it; none where it is not settled.
      private_share: of the pairs, which are held back with the people and questions that they are of.
      formats: beside JSON lines: parquet in the hub's layout, and the array_record files of `prb prepare`.
    """

    name: str = "personal-pairs"
    licence: str | None = None
    private_share: float = 0.2
    formats: tuple[str, ...] = FORMATS


@dataclass(frozen=True, kw_only=True)
class BuildSettings:
    """One run of `prb build`.

    Attributes:
      data: records with question, profile, and rubric_aspects or narrative: a file, folder or hub data set.
      subset: of a folder or hub data set with several, the one that is read.
      split: of a folder or hub data set, the one that is read.
      limit: at most so many records; for testing.
      seed: decides every draw.
      aspects: derive aspects from the narrative where a record has none.
      redact: replace e-mail addresses, accounts and numbers in all text before anything is written, by scrubadub.
      relax: gates that may fail; the card says so for ever.
      cache: folder of the replies of endpoints, which several builds may share; none for `OUT/replies`.
    """

    data: str | None = None
    subset: str | None = None
    split: str = "test"
    limit: int | None = None
    seed: int = 0
    aspects: bool = False
    redact: bool = False
    relax: tuple[str, ...] = ()
    cache: str | None = None
    generator: ChatModelSettings = field(default_factory=ChatModelSettings)
    writing: WritingSettings = field(default_factory=WritingSettings)
    judge: ChatModelSettings = field(default_factory=ChatModelSettings)
    gates: GateSettings = field(default_factory=GateSettings)
    product: ProductSettings = field(default_factory=ProductSettings)


def default_config() -> ConfigDict:
    """Return every option with its default. Keys cannot be added, and values keep their types."""
    return to_config_dict(BuildSettings())


def load_build_settings(
    config: Any, overrides: Sequence[str] = (), *, relax: Sequence[str] = (), complete: bool = True
) -> BuildSettings:
    """Return the checked settings of a config with overrides applied.

    Args:
      config, overrides: as of :func:`prb_jax.training.config.load_settings`, or settings.
      relax: gates that may fail, beside those of the config.
      complete: data and a generator must be given.

    Raises:
      RunError, DataError: an unknown key or gate, a wrong type, a value out of range, or a gate that nothing is given
        for and that is not relaxed.
    """
    settings = build_settings(BuildSettings, config, overrides)
    settings = replace(settings, relax=tuple(dict.fromkeys([*settings.relax, *relax])))
    _check(settings)
    if complete:
        if not settings.data:
            raise RunError(
                "config key 'data': expected a file, folder or data set, found none: add data=FILE"
            )
        if not settings.generator.given:
            raise RunError(
                "config section 'generator': expected a model on this machine or an endpoint, found none: add "
                "generator.model=PATH, or generator.endpoint=URL generator.name=NAME"
            )
        _check_gates(settings)
    return settings


def _check_gates(settings: BuildSettings) -> None:
    """A gate that cannot be tried fails before anything is paid for."""
    judge = "judge.endpoint=URL judge.name=NAME, or judge.model=PATH"
    needed = {
        "rubric-judge": (settings.judge.given, judge),
        "blind-judge": (settings.judge.given, judge),
        "blind-reward": (bool(settings.gates.reward_models), "gates.reward_models=MODEL"),
        "overlap": (bool(settings.gates.known), "gates.known=SOURCE"),
    }
    lacking = [name for name, (given, _) in needed.items() if not given and name not in settings.relax]
    if lacking:
        hints = dict.fromkeys(needed[name][1] for name in lacking)
        raise RunError(
            f"nothing is given to try the gates {', '.join(lacking)}: add {'; '.join(hints)}; or "
            f"{' '.join(f'--relax {name}' for name in lacking)}, which the card will say for ever"
        )


def _check(settings: BuildSettings) -> None:
    if unknown := [name for name in settings.relax if name not in GATES]:
        raise RunError(f"relax: no gate {quote(unknown[0])}; expected {', '.join(GATES)}")
    if unknown := [name for name in settings.product.formats if name not in FORMATS]:
        raise RunError(f"product.formats: no format {quote(unknown[0])}; expected {', '.join(FORMATS)}")
    for section in ("generator", "judge"):
        getattr(settings, section).check(section)
    check_value(settings, "", "limit", settings.limit is None or settings.limit >= 1, "at least 1, or none")
    check_value(settings, "", "seed", settings.seed >= 0, "at least 0")
    writing, gates, product = settings.writing, settings.gates, settings.product
    for name in (
        "candidates",
        "rounds",
        "most_words",
        "max_new_tokens",
        "plan_tokens",
        "most_aspects",
        "together",
    ):
        check_value(writing, "writing.", name, getattr(writing, name) >= 1, "at least 1")
    for name in ("least_words", "profile_posts"):
        check_value(writing, "writing.", name, getattr(writing, name) >= 0, "at least 0")
    words = writing.least_words <= writing.most_words
    check_value(writing, "writing.", "least_words", words, f"at most most_words, {writing.most_words}")
    check_value(writing, "writing.", "temperature", writing.temperature > 0, "above 0")
    for name in ("level", "similarity"):
        check_value(gates, "gates.", name, 0 < getattr(gates, name) < 1, "above 0 and below 1")
    for name in ("copied_words", "overlap_words"):
        check_value(gates, "gates.", name, getattr(gates, name) >= 2, "at least 2")
    check_value(gates, "gates.", "least_yield", 0 <= gates.least_yield <= 1, "0 to 1")
    share = product.private_share
    check_value(product, "product.", "private_share", 0 <= share < 1, "at least 0 and below 1")
    if not product.name.strip():
        raise RunError(f"product.name: expected a name, found {quote(product.name)}")
