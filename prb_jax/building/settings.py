"""Every option of `prb build`: its name, type, default and meaning.

A config is a Python file whose `get_config()` changes :func:`default_config`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ml_collections import ConfigDict

from prb_jax.errors import RunError, quote
from prb_jax.models import Dtype
from prb_jax.records.config_files import build_settings, to_config_dict
from prb_jax.records.options import Options, option, section

FORMATS: Final = ("parquet", "array_record")

DEFINITIONS: Final = {
    "refusals": "share of pairs with an answer that refuses, or is empty",
    "truncations": "share of pairs with an answer that ran into the limit of tokens, or ends within a sentence",
    "copied-aspects": "share of pairs with an answer that has the whole name of an aspect of two words or more, or "
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
    "style-histogram": "accuracy of a ridge classifier of the places of each single answer in histograms of length, "
    "layout and wrappers, fitted to the pairs of other people (five folds), which finds a range that is preferred, as "
    "60 to 70 words; it fails above 0.5 beyond chance",
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
class ChatModelSettings(Options):
    """A language model: on this machine, or behind an endpoint that speaks OpenAI's chat API."""

    model: str | None = option(
        None,
        "Hugging Face folder or hub id of a causal language model on this machine; or none, for an endpoint.",
    )
    dtype: Dtype | None = option(None, "type of its weights and activations; none for the checkpoint's.")
    mesh: str | None = option(
        None, 'sizes of the axes of its devices, as "fsdp=4,tensor=2"; none for all devices.'
    )
    revision: str | None = option(None, "branch, tag or commit of a model on the hub.")
    tokenizer: str | None = option(None, "folder or hub id of its tokenizer; none for the model's.")
    chat_template: str | None = option(
        None, 'Jinja file, or "plain", for a model without a template of its own.'
    )
    endpoint: str | None = option(
        None, "URL of an API, as https://HOST/v1; its key is read from PRB_ENDPOINT_KEY."
    )
    name: str | None = option(None, "of the model at the endpoint.")
    concurrency: int = option(8, "requests to the endpoint at a time.", least=1)
    tries: int = option(6, "of one request.", least=1)
    seconds: float = option(120.0, "until a try is given up.", above=0)
    backoff: float = option(
        1.0, "seconds before the second try; twice as many before each further one.", above=0
    )
    prompt_price: float | None = option(
        None, "dollars for a million tokens of prompts, for the cost in the card.", least=0
    )
    reply_price: float | None = option(None, "dollars for a million tokens of replies.", least=0)

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
        """Dollars for a million tokens of prompts and of replies; None where the settings give no prices."""
        if self.prompt_price is None or self.reply_price is None:
            return None
        return self.prompt_price, self.reply_price

    def __post_init__(self) -> None:
        super().__post_init__()
        where = f"config section '{self.prefix.removesuffix('.')}'"
        if self.model is not None and (self.endpoint is not None or self.name is not None):
            raise RunError(f"{where}: expected model, or endpoint and name, found both")
        for pair in (("endpoint", "name"), ("prompt_price", "reply_price")):
            if len([name for name in pair if getattr(self, name) is None]) == 1:
                raise RunError(f"{where}: {' and '.join(pair)}: expected both or neither")


class GeneratorSettings(ChatModelSettings, prefix="generator."):
    """The model that writes the answers: on this machine, or at an endpoint that speaks OpenAI's chat API."""


class BuildJudgeSettings(ChatModelSettings, prefix="judge."):
    """The model that judges the pairs: on this machine, or at an endpoint that speaks OpenAI's chat API."""


@dataclass(frozen=True, kw_only=True)
class WritingSettings(Options, prefix="writing."):
    """How answers are planned and written."""

    candidates: int = option(
        4,
        "answers that are written for each side of a pair; the two that are most alike in length and "
        "layout are kept.",
        least=1,
    )
    rounds: int = option(
        3, "times that answers are asked for, while one side has none that can be used.", least=1
    )
    least_words: int = option(30, "of an answer.", least=0)
    most_words: int = option(100, "of an answer.", least=1)
    profile_posts: int = option(10, "posts of the user that the generator is shown.", least=0)
    temperature: float = option(0.8, "of answers; plans and aspects are written at it too.", above=0)
    max_new_tokens: int = option(400, "of an answer.", least=1)
    plan_tokens: int = option(300, "most tokens of a plan.", least=1)
    most_aspects: int = option(4, "aspects that are derived from a narrative, at most.", least=1)
    together: int = option(
        16,
        "records that are written at a time; a run that is killed loses at most these, and nothing "
        "that an endpoint said.",
        least=1,
    )


@dataclass(frozen=True, kw_only=True)
class GateSettings(Options, prefix="gates."):
    """What the gates let through."""

    level: float = option(0.99, "of the intervals that must hold 0.5.", above=0, below=1)
    margin: float = option(
        0.1, "beyond 0.5: a leak that is surely smaller makes the benchmark sound.", above=0, below=0.5
    )
    require_sound: bool = option(False, "gates that cannot tell at this size fail; without it they warn.")
    similarity: float = option(
        0.7,
        "Jaccard similarity of the word triples of two answers, from which they are near-duplicates.",
        above=0,
        below=1,
    )
    copied_words: int = option(5, "consecutive words of an aspect that must not occur in an answer.", least=2)
    known: tuple[str, ...] = option(
        (), "sources as of `prb evaluate --data`, whose questions and answers must not occur here."
    )
    overlap_words: int = option(
        13, "consecutive words that are shared with one of these, from which a pair is left out.", least=2
    )
    reward_models: tuple[str, ...] = option(
        (), "that must not tell the chosen answer without the user: models as of `prb evaluate`."
    )
    plugins: tuple[str, ...] = option(
        (),
        "gates of other packages, entry points prb_jax.gates: each leaves out the pairs in which it finds a fault.",
    )
    least_yield: float = option(0.5, "share of the records that must give a pair.", least=0, most=1)


@dataclass(frozen=True, kw_only=True)
class ProductSettings(Options, prefix="product."):
    """The files of the finished benchmark."""

    name: str = option("personal-pairs", "of the benchmark, in its card.")
    licence: str | None = option(None, "of the data, as the hub spells it; none where it is not settled.")
    private_share: float = option(
        0.2,
        "of the pairs, which are held back with the people and questions that they are of.",
        least=0,
        below=1,
    )
    formats: tuple[str, ...] = option(
        FORMATS,
        "beside JSON lines: parquet in the hub's layout, and the array_record files of `prb prepare`.",
    )


@dataclass(frozen=True, kw_only=True)
class BuildSettings(Options):
    """One run of `prb build`."""

    data: str | None = option(
        None,
        "records with question, profile, and rubric_aspects or narrative: a file, folder or hub data set.",
    )
    subset: str | None = option(None, "of a folder or hub data set with several, the one that is read.")
    split: str = option("test", "of a folder or hub data set, the one that is read.")
    limit: int | None = option(None, "at most so many records; for testing.", least=1)
    seed: int = option(0, "decides every draw.", least=0)
    aspects: bool = option(False, "derive aspects from the narrative where a record has none.")
    redact: bool = option(
        False,
        "replace e-mail addresses, accounts and numbers in all text before anything is written, by "
        "scrubadub.",
    )
    relax: tuple[str, ...] = option((), "gates that may fail; the card says so for ever.")
    cache: str | None = option(
        None, "folder of the replies of endpoints, which several builds may share; none for `OUT/replies`."
    )
    generator: GeneratorSettings = section(GeneratorSettings)
    writing: WritingSettings = section(WritingSettings)
    judge: BuildJudgeSettings = section(BuildJudgeSettings)
    gates: GateSettings = section(GateSettings)
    product: ProductSettings = section(ProductSettings)


def default_config() -> ConfigDict:
    """Return every option with its default. Keys cannot be added, and values keep their types."""
    return to_config_dict(BuildSettings())


def load_build_settings(
    config: Any, overrides: Sequence[str] = (), *, relax: Sequence[str] = (), complete: bool = True
) -> BuildSettings:
    """Return the checked settings of a config with overrides applied.

    Args:
      config, overrides: as of :func:`prb_jax.records.config_files.build_settings`, or settings.
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
    gates = (*GATES, *settings.gates.plugins)
    if unknown := [name for name in settings.relax if name not in gates]:
        raise RunError(f"relax: no gate {quote(unknown[0])}; expected {', '.join(gates)}")
    if twice := [name for place, name in enumerate(gates) if name in gates[:place]]:
        raise RunError(f"gates.plugins: there is a gate {quote(twice[0])} already")
    if unknown := [name for name in settings.product.formats if name not in FORMATS]:
        raise RunError(f"product.formats: no format {quote(unknown[0])}; expected {', '.join(FORMATS)}")
    writing, product = settings.writing, settings.product
    words = writing.least_words <= writing.most_words
    writing.check("least_words", words, f"at most most_words, {writing.most_words}")
    if not product.name.strip():
        raise RunError(f"product.name: expected a name, found {quote(product.name)}")
