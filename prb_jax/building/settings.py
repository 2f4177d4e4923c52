"""Options of `prb build`: names, types, defaults and meanings.

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
    "truncations": "share of pairs with an answer that reached the token limit, or ends within a sentence",
    "copied-aspects": "share of pairs with an answer that contains the whole name (two words or more) of an aspect, or "
    "copied_words consecutive words of an aspect, its evidence or its reason that are not in the question",
    "personal-text": "share of pairs with an e-mail address, a telephone, card, account or social security number, or "
    "an IP address in question, profile, aspects, narrative or answers",
    "duplicates": "share of pairs with an answer that is nearly the same as one of an earlier pair (Jaccard similarity "
    "of word triples), or whose two answers are the same",
    "overlap": "share of pairs whose question or answer has overlap_words consecutive words of a known test set, or "
    "equals one of its texts",
    "rubric-judge": "share of pairs in which the judge that sees the aspects does not prefer the chosen answer in both "
    "orders",
    "length": "share of pairs whose chosen answer has more words; ties count half",
    "style": "accuracy of a ridge classifier of length, layout and wrappers of the two answers, fitted to the pairs of "
    "other people (five folds); it fails above 0.5 beyond chance",
    "style-histogram": "accuracy of a ridge classifier of each single answer's bins in histograms of length, "
    "layout and wrappers, fitted to the pairs of other people (five folds); it finds preferred ranges, e.g. "
    "60 to 70 words; it fails above 0.5 beyond chance",
    "blind-judge": "share of pairs in which the judge that does not know the user prefers the chosen answer in both "
    "orders; no preference in both orders counts half",
    "blind-reward": "share of pairs in which a reward model without the profile gives the chosen answer the "
    "higher score; a tie counts half; with several models, the share that is farthest from 0.5",
    "yield": "share of the records whose pair passed every gate",
}
"""Figure of each gate, in the order in which pairs pass through the gates."""

GATES: Final = tuple(DEFINITIONS)

SIDES: Final = ("chosen", "rejected")
"""Sides of a pair: the answer that follows the aspects, and the answer that avoids them."""


@dataclass(frozen=True, kw_only=True)
class ChatModelSettings(Options):
    """A language model: on this machine, or behind an endpoint with OpenAI's chat API."""

    model: str | None = option(
        None,
        "Hugging Face folder or hub id of a causal language model on this machine; none for an endpoint.",
    )
    dtype: Dtype | None = option(None, "Type of weights and activations; none for the checkpoint's type.")
    mesh: str | None = option(None, 'Sizes of the mesh axes, e.g. "fsdp=4,tensor=2"; none for all devices.')
    revision: str | None = option(None, "Branch, tag or commit of a model on the hub.")
    tokenizer: str | None = option(None, "Folder or hub id of the tokenizer; none for the model's own.")
    chat_template: str | None = option(None, 'Jinja file, or "plain", for a model without a chat template.')
    endpoint: str | None = option(
        None, "URL of an API, e.g. https://HOST/v1; PRB_ENDPOINT_KEY contains its key."
    )
    name: str | None = option(None, "Name of the model at the endpoint.")
    concurrency: int = option(8, "Concurrent requests to the endpoint.", least=1)
    tries: int = option(6, "Tries per request.", least=1)
    seconds: float = option(120.0, "Timeout of a try in seconds.", above=0)
    backoff: float = option(1.0, "Seconds before the second try; doubled before each further one.", above=0)
    prompt_price: float | None = option(
        None, "Dollars per million prompt tokens, for the cost in the card.", least=0
    )
    reply_price: float | None = option(None, "Dollars per million reply tokens.", least=0)

    @property
    def given(self) -> bool:
        """True if a model is configured."""
        return self.model is not None or self.endpoint is not None

    @property
    def called(self) -> str:
        """Name of the model."""
        return str(self.model or self.name)

    @property
    def prices(self) -> tuple[float, float] | None:
        """Dollars per million prompt tokens and per million reply tokens; None without prices."""
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
    """The model that writes the answers: on this machine, or at an endpoint with OpenAI's chat API."""


class BuildJudgeSettings(ChatModelSettings, prefix="judge."):
    """The model that judges the pairs: on this machine, or at an endpoint with OpenAI's chat API."""


@dataclass(frozen=True, kw_only=True)
class WritingSettings(Options, prefix="writing."):
    """Planning and writing of answers."""

    candidates: int = option(
        4,
        "Answers written per side of a pair; the two answers most alike in length and layout are kept.",
        least=1,
    )
    rounds: int = option(3, "Rounds of requests while a side has no usable answer.", least=1)
    least_words: int = option(30, "Fewest words of an answer.", least=0)
    most_words: int = option(100, "Most words of an answer.", least=1)
    profile_posts: int = option(10, "Posts of the user in the generator's prompt.", least=0)
    temperature: float = option(0.8, "Sampling temperature of answers, plans and aspects.", above=0)
    max_new_tokens: int = option(400, "Most tokens of an answer.", least=1)
    plan_tokens: int = option(300, "Most tokens of a plan.", least=1)
    most_aspects: int = option(4, "Most aspects to derive from a narrative.", least=1)
    together: int = option(
        16,
        "Records written together; a killed run loses at most these records, and no reply of an endpoint.",
        least=1,
    )


@dataclass(frozen=True, kw_only=True)
class GateSettings(Options, prefix="gates."):
    """Thresholds and inputs of the gates."""

    level: float = option(0.99, "Level of the intervals that must contain 0.5.", above=0, below=1)
    margin: float = option(
        0.1,
        "Limit of a leak beyond 0.5: the benchmark is sound if its leak is surely smaller.",
        above=0,
        below=0.5,
    )
    require_sound: bool = option(
        False, "If True, gates with too few pairs to exclude a leak fail; else they warn."
    )
    similarity: float = option(
        0.7,
        "Jaccard similarity of word triples from which two answers are near-duplicates.",
        above=0,
        below=1,
    )
    copied_words: int = option(
        5, "Consecutive words of an aspect that count as copied in an answer.", least=2
    )
    known: tuple[str, ...] = option(
        (), "Test sets whose questions and answers must not occur; sources as in `prb evaluate --data`."
    )
    overlap_words: int = option(
        13, "Consecutive words shared with a known test set for which a pair is dropped.", least=2
    )
    reward_models: tuple[str, ...] = option(
        (), "Reward models that must not find the chosen answer without the user; as in `prb evaluate`."
    )
    plugins: tuple[str, ...] = option(
        (),
        "Gates of other packages (entry points prb_jax.gates); each drops the pairs in which it finds a fault.",
    )
    least_yield: float = option(0.5, "Smallest share of records that must give a pair.", least=0, most=1)


@dataclass(frozen=True, kw_only=True)
class ProductSettings(Options, prefix="product."):
    """Files of the finished benchmark."""

    name: str = option("personal-pairs", "Name of the benchmark in its card.")
    licence: str | None = option(None, "Licence of the data in the hub's spelling; none if undecided.")
    private_share: float = option(
        0.2,
        "Share of the pairs in the private part, together with their people and questions.",
        least=0,
        below=1,
    )
    formats: tuple[str, ...] = option(
        FORMATS,
        "Formats besides JSON lines: parquet in the hub's layout, array_record as in `prb prepare`.",
    )


@dataclass(frozen=True, kw_only=True)
class BuildSettings(Options):
    """Settings of one run of `prb build`."""

    data: str | None = option(
        None,
        "Records with question, profile, and rubric_aspects or narrative: a file, folder or hub data set.",
    )
    subset: str | None = option(None, "Subset to read from a folder or hub data set with several.")
    split: str = option("test", "Split to read from a folder or hub data set.")
    limit: int | None = option(None, "Most records to read; for testing.", least=1)
    seed: int = option(0, "Seed of all random draws.", least=0)
    aspects: bool = option(False, "If True, derive aspects from the narrative of records without aspects.")
    redact: bool = option(
        False,
        "If True, replace e-mail addresses, accounts and numbers in all text by scrubadub before "
        "anything is written.",
    )
    relax: tuple[str, ...] = option((), "Gates that may fail; the card always mentions them.")
    cache: str | None = option(
        None, "Folder of endpoint replies, which several builds may share; none for `OUT/replies`."
    )
    generator: GeneratorSettings = section(GeneratorSettings)
    writing: WritingSettings = section(WritingSettings)
    judge: BuildJudgeSettings = section(BuildJudgeSettings)
    gates: GateSettings = section(GateSettings)
    product: ProductSettings = section(ProductSettings)


def default_config() -> ConfigDict:
    """Return all options with their defaults. Keys cannot be added, and values keep their types."""
    return to_config_dict(BuildSettings())


def load_build_settings(
    config: Any, overrides: Sequence[str] = (), *, relax: Sequence[str] = (), complete: bool = True
) -> BuildSettings:
    """Return the validated settings of a config with overrides applied.

    Args:
      config, overrides: see :func:`prb_jax.records.config_files.build_settings`; or settings.
      relax: Gates that may fail, in addition to the config's.
      complete: If True, data and a generator are required.

    Raises:
      RunError, DataError: an unknown key or gate, a wrong type, a value out of range, or a gate that lacks its inputs
        and is not relaxed.
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
    """Raise RunError for gates without their inputs, before anything costs money."""
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
            f"gates without a model or data: {', '.join(lacking)}: add {'; '.join(hints)}; or "
            f"{' '.join(f'--relax {name}' for name in lacking)}, which the card will always mention"
        )


def _check(settings: BuildSettings) -> None:
    gates = (*GATES, *settings.gates.plugins)
    if unknown := [name for name in settings.relax if name not in gates]:
        raise RunError(f"relax: unknown gate {quote(unknown[0])}; expected {', '.join(gates)}")
    if twice := [name for place, name in enumerate(gates) if name in gates[:place]]:
        raise RunError(f"gates.plugins: a second gate {quote(twice[0])}; expected different names")
    if unknown := [name for name in settings.product.formats if name not in FORMATS]:
        raise RunError(f"product.formats: unknown format {quote(unknown[0])}; expected {', '.join(FORMATS)}")
    writing, product = settings.writing, settings.product
    words = writing.least_words <= writing.most_words
    writing.check("least_words", words, f"at most most_words, {writing.most_words}")
    if not product.name.strip():
        raise RunError(f"product.name: expected a name, found {quote(product.name)}")
