"""Open tokenizers and choose their chat templates, without running code, and with an error for hostile files.

This module also finds the places where a text can be cut without changing its ids.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from prb_jax.errors import CheckpointError, DataError, PrbWarning, quote
from prb_jax.records.reading import read_json
from prb_jax.seams import BUILTIN, get
from prb_jax.text.template import PLAIN_RULES, TextRules, choose_template
from prb_jax.text.tokenizer import PROBE, ChatTokenizer, tokenizer_failures

_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
_MOST_IDS = 2**31  # ids are int32


def open_tokenizer(name: str, *, revision: str | None = None) -> Any:
    """Return the transformers tokenizer of a folder or hub id, with truncation and padding off.

    Raises:
      CheckpointError: It cannot be loaded, or only by running code from its repository.
    """
    from transformers import AutoTokenizer

    folder = Path(name)
    if folder.is_dir() and not any(path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)):
        raise _no_tokenizer(name)
    with tokenizer_failures(f"{name}: no tokenizer can be loaded from here"):
        if (kind := class_without_code(folder)) is not None:
            tokenizer = get("tokenizers", kind).value(folder)
        else:
            tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
    return checked_tokenizer(tokenizer, name)


def class_without_code(folder: Path) -> str | None:
    """Return the tokenizer class of a folder if this package replaces the class's repository code; else None."""
    if (folder / "tokenizer.json").exists() or not (folder / "tokenizer.model").is_file():
        return None
    config = read_json(folder / "tokenizer_config.json", error=CheckpointError, optional=True)
    kind = config.get("tokenizer_class") if isinstance(config, dict) else None
    return kind if kind in BUILTIN["tokenizers"] else None


def checked_tokenizer(tokenizer: Any, name: str) -> Any:
    """Check a transformers tokenizer, turn its truncation and padding off, and return it.

    Raises:
      CheckpointError: It needs code of its repository, lacks a vocabulary, or is hostile.
    """
    vocabulary = tokenizer.get_vocab()
    if set(vocabulary.values()) <= set(tokenizer.all_special_ids):
        # For some model types transformers builds an empty tokenizer if the files are missing.
        raise _no_tokenizer(name)
    if "AutoTokenizer" in (tokenizer.init_kwargs.get("auto_map") or {}):
        raise CheckpointError(
            f"{name}: tokenizer_config.json asks for code from its repository (auto_map), which is never run;"
            " convert the tokenizer to a tokenizer.json"
        )
    last = max(vocabulary, key=lambda token: vocabulary[token])
    if vocabulary[last] >= _MOST_IDS:
        raise CheckpointError(
            f"{name}: tokenizer.json: vocab: token {quote(last)} has the id {vocabulary[last]}; expected ids below "
            f"{_MOST_IDS}"
        )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        if backend.normalizer is not None:
            get("templates", "normaliser").value(backend.normalizer, name)
        if getattr(backend.model, "dropout", None):
            warnings.warn(
                f"{name}: tokenizer.json: model.dropout {backend.model.dropout:g} would give the same text other "
                "tokens each time; it is off here",
                PrbWarning,
                stacklevel=2,
            )
            backend.model.dropout = None
        # A tokenizer.json can turn on truncation or padding; every cut must be counted.
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = bool(getattr(tokenizer, "split_special_tokens", False))
    return tokenizer


def _no_tokenizer(name: str) -> CheckpointError:
    return CheckpointError(
        f"{name}: no tokenizer files (tokenizer.json or tokenizer.model): expected the model's tokenizer beside its "
        "weights, or another folder or hub id with --tokenizer"
    )


def added_tokens(tokenizer: Any, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that the tokenizer puts before and after a text when it adds special tokens."""
    text = "a b"
    with tokenizer_failures(f"{name}: tokenizer.json: the tokenizer breaks down"):
        plain, full = (
            list(tokenizer(text, add_special_tokens=added)["input_ids"]) for added in (False, True)
        )
    start = place_of(plain, full)
    if start is None:
        raise CheckpointError(
            f"{name}: adding special tokens changes the ids of the text itself: {plain} -> {full}"
        )
    return tuple(full[:start]), tuple(full[start + len(plain) :])


def place_of(run: Sequence[int], ids: Sequence[int], start: int = 0) -> int | None:
    """Return the first index at or after `start` at which `run` occurs in `ids`; None if it does not."""
    places = range(start, len(ids) - len(run) + 1)
    return next((place for place in places if ids[place : place + len(run)] == run), None)


def independent_tokens(tokenizer: Any, probe: str) -> tuple[str, ...]:
    """Return the special tokens in the rendered text `probe` before which a text can be cut.

    A tokenizer first finds its added tokens, then normalises, splits and encodes each stretch between them separately.
    So the ids before and after a special token do not depend on each other. The conversations of a person share
    thousands of prompt tokens, which then are tokenised only once. This holds for tokens that match the text exactly
    (`special`, not `normalized`, not `single_word`), include no neighbouring blanks (neither `lstrip` nor `rstrip`),
    and cannot be hidden by an overlapping added token.

    These are the rules of the `tokenizers` library; for other tokenizers the result is empty.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.encode_special_tokens:
        return ()
    added = list(backend.get_added_tokens_decoder().values())
    contents = [token.content for token in added if token.content]

    def may_be_hidden(token: str) -> bool:
        starts = (other[start:] for other in contents if other != token for start in range(len(other)))
        return any(start.startswith(token) or token.startswith(start) for start in starts)

    return tuple(
        sorted(
            token.content
            for token in added
            if token.content
            and token.content in probe
            and token.special
            and not (token.normalized or token.single_word or token.lstrip or token.rstrip)
            and not may_be_hidden(token.content)
        )
    )


def load_tokenizer(
    source: str | Path | Any,
    *,
    revision: str | None = None,
    chat_template: str | None = None,
    template_variables: Mapping[str, Any] | None = None,
    rules: TextRules = PLAIN_RULES,
) -> ChatTokenizer:
    """Load a tokenizer and choose its chat template.

    Args:
      source: Folder, hub id, or tokenizer of transformers, which is copied.
      revision: Branch, tag or commit of a hub id.
      chat_template: None for the tokenizer's own template, or the template of the rules; "plain" for the built-in
        format; the name of one of the rules' templates; a file with a Jinja template, or its text.
      template_variables: Values of variables that the template reads, e.g. enable_thinking.
      rules: Rules of the model beyond the template.

    Raises:
      CheckpointError: The tokenizer needs to run code from its repository, cannot be loaded, or lacks a chat template;
        or the template fails on a plain exchange, writes BOS twice, or does not read a given variable.
    """
    if isinstance(source, str | Path):
        name = str(source)
        tokenizer = open_tokenizer(name, revision=revision)
    else:
        name = str(getattr(source, "name_or_path", "") or type(source).__name__)
        tokenizer = checked_tokenizer(copy.deepcopy(source), name)
    template = choose_template(tokenizer, rules.chat_template(tokenizer, chat_template), where=name)
    template = template.with_variables(template_variables or {}, where=name)
    chat = ChatTokenizer(
        name=name,
        template=template,
        tokenizer=tokenizer,
    )
    if rules.append is not None:
        chat = replace(chat, ends_with=get("templates", "last token").value(rules, tokenizer, where=name))
    if rules.suffix or rules.suffix_id is not None:
        chat = replace(chat, response_suffix=get("templates", "suffix").value(rules, tokenizer, where=name))
    try:
        probe = chat.render([PROBE])[0]
        again = chat.render([PROBE])[0]
    except DataError as error:
        raise CheckpointError(f"{name}: {error}") from error
    if probe != again:
        raise CheckpointError(f"{name}: the chat template renders the same conversation in two ways")
    if missing := [message.content for message in PROBE if message.content not in probe]:
        raise CheckpointError(
            f"{name}: the chat template leaves out message contents, such as {quote(missing[0])}"
        )
    chat.encode(PROBE)
    before, after = added_tokens(tokenizer, name)
    return replace(
        chat,
        cut_tokens=independent_tokens(tokenizer, probe),
        added_before=before,
        added_after=after,
    )
