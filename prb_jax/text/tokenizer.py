"""A tokenizer with its chat template turns conversations into token ids, in one tokenisation.

The rendered template is tokenised without adding special tokens, like `apply_chat_template(tokenize=True)` of
transformers. Many scripts add special tokens, which writes BOS twice if both template and tokenizer add one. Here only
the `paper` protocol does so.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from prb_jax.errors import CheckpointError, DataError, first_line, short_repr
from prb_jax.records.conversation import Message, is_rendered, joined_parts
from prb_jax.records.fields import SPOKEN_FIELDS
from prb_jax.seams import get
from prb_jax.text.template import Template

ANSWER = "An answer."
_PLAIN_ROLES = frozenset(("system", "user", "assistant"))
RECENT_CHARACTERS = 1 << 24
"""Characters of texts in the cache of token ids; a token has about four."""
PROBE = (Message("user", "Is this a question?"), Message("assistant", "It is an answer."))


@functools.lru_cache(maxsize=16)
def _words_of(template: str) -> frozenset[str]:
    """Return the words of a template, including the names of the fields that it reads."""
    return frozenset(re.findall(r"\w+", template))


@contextlib.contextmanager
def tokenizer_failures(what: str, texts: Sequence[str] = ()) -> Iterator[None]:
    """Turn any error of a tokenizer into one line; a panic of `tokenizers` is not an `Exception`."""
    try:
        yield
    except CheckpointError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = first_line(error)
        if any("\ud800" <= letter <= "\udfff" for text in texts for letter in text):  # never from records
            reason = "the chat template writes half of a surrogate pair, which is not text"
        raise CheckpointError(f"{what}: {reason}") from error


def tokenize(tokenizer: Any, texts: Sequence[str]) -> list[np.ndarray]:
    """Return the ids of each text, int32, without adding special tokens and without truncation.

    Raises:
      CheckpointError: The tokenizer fails on a text.
    """
    if not texts:
        return []
    backend = getattr(tokenizer, "backend_tokenizer", None)
    what = f"{tokenizer.name_or_path or 'the tokenizer'}: tokenizer.json: the tokenizer breaks down"
    with tokenizer_failures(what, texts):
        if backend is None:
            rows = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        else:
            rows = [
                encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)
            ]
    return [np.asarray(row, np.int32) for row in rows]


class RecentStretches:
    """Cache of the ids of recent stretches of text, at most twice :data:`RECENT_CHARACTERS` characters."""

    def __init__(self) -> None:
        self._recent: dict[str, np.ndarray] = {}
        self._older: dict[str, np.ndarray] = {}
        self._characters = 0  # characters in `_recent`

    def ids(
        self, stretches: Iterable[str], tokenize: Callable[[list[str]], list[np.ndarray]]
    ) -> dict[str, np.ndarray]:
        """Return the ids of each distinct stretch; only new ones are tokenised."""
        recent, older = self._recent, self._older  # another thread may swap them
        stretches = dict.fromkeys(stretches)
        new = [text for text in stretches if text not in recent and text not in older]
        ids = dict(zip(new, tokenize(new), strict=True))
        ids |= {
            text: recent[text] if text in recent else older[text] for text in stretches if text not in ids
        }
        self._characters += sum(len(text) for text in stretches if text not in recent)
        recent.update(ids)
        if self._characters > RECENT_CHARACTERS:
            self._recent, self._older, self._characters = {}, recent, 0
        return ids


class TokenizerIds:
    """Ids of the transformers tokenizer in the attribute ``tokenizer``."""

    tokenizer: Any

    @property
    def bos_token_id(self) -> int | None:
        return self.tokenizer.bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        return self.tokenizer.eos_token_id

    @property
    def pad_token_id(self) -> int | None:
        return self.tokenizer.pad_token_id

    @cached_property
    def vocab_size(self) -> int:
        """Number of embedding rows for all ids of this tokenizer: its largest id plus one."""
        return 1 + max(self.tokenizer.get_vocab().values())

    def rendered_mark(self, text: str) -> str | None:
        """Return the mark that shows that the chat template has rendered a text already; None without a template."""
        return None


@dataclass(frozen=True, eq=False)
class ChatTokenizer(TokenizerIds):
    """A transformers tokenizer with its chat template. Build with `prb_jax.text.open_tokenizer.load_tokenizer`."""

    name: str  # folder or hub id
    template: Template
    tokenizer: Any = field(repr=False)
    cut_tokens: tuple[str, ...] = ()
    """Special tokens before which a rendered text can be cut and tokenised in parts without changing ids."""
    added_before: tuple[int, ...] = ()
    """Special tokens that the tokenizer adds around a text on request (the `paper` protocol requests them)."""
    added_after: tuple[int, ...] = ()
    ends_with: int | None = None  # last token of every conversation, appended if missing
    response_suffix: str = ""  # end of the last message of every conversation, appended if missing

    __repr__ = short_repr

    @property
    def template_hash(self) -> str:
        """ "sha256:..." of the template, and of the last token and the response suffix if there are any."""
        if self.ends_with is None and not self.response_suffix:
            return self.template.hash
        rules = f"{self.template.hash} ends_with={self.ends_with} suffix={self.response_suffix!r}"
        return f"sha256:{hashlib.sha256(rules.encode()).hexdigest()}"

    @cached_property
    def largest_plain_id(self) -> int:
        """Largest id of the vocabulary without added tokens; -1 if all tokens are added ones."""
        added = self.tokenizer.get_added_vocab()
        return max((i for token, i in self.tokenizer.get_vocab().items() if token not in added), default=-1)

    def render(
        self, conversations: Sequence[Sequence[Message]], *, generation_prompt: bool = False
    ) -> list[str]:
        """Return the rendered text of each conversation.

        Args:
          conversations: Messages of each conversation.
          generation_prompt: If True, ask the template to open the assistant's turn; some templates ignore this.

        Raises:
          RenderError: The template refuses a conversation; `conversation` of the error is its index.
        """
        texts = []
        for number, messages in enumerate(conversations):
            try:
                texts.append(self._rendered(messages, generation_prompt))
            except Exception as error:
                raise RenderError(number, [m.role for m in messages], self.name, error) from error
        return texts

    def _rendered(self, messages: Sequence[Message], generation_prompt: bool) -> str:
        if not messages:
            raise DataError("it has no message, as the responses share none before them")
        if is_rendered(messages):
            return "".join(message.content for message in messages)
        context = json.loads(messages[0].context or "{}")
        if context or any(message.fields for message in messages):
            self._check_known(messages, context)
        text = self._apply(messages, context, generation_prompt)
        for role in {message.role for message in messages} - _PLAIN_ROLES:
            changed = [m.with_content(f"{ANSWER} {m.content}") if m.role == role else m for m in messages]
            if self._apply(changed, context, generation_prompt) == text:
                raise DataError(f"it leaves out messages of the role {role!r}")
        return text

    def _check_known(self, messages: Sequence[Message], context: Mapping[str, Any]) -> None:
        """Raise DataError for a field, tool or argument that the template does not read."""
        said = {name for message in messages for name in message.as_dict() if name in SPOKEN_FIELDS}
        arguments = {f"chat_template_kwargs.{name}" for name in context.get("chat_template_kwargs", ())}
        tools = {"tools"} & context.keys()
        for name in sorted(said | arguments | tools):
            if name.rpartition(".")[2] not in _words_of(self._template_text(context)):
                raise DataError(
                    f"it does not read {name!r}, so a score would be of a conversation without it"
                )

    @cached_property
    def _special_tokens(self) -> dict[str, Any]:
        """Special tokens by name; the tokenizer builds this dict anew at each access, too slow for every text."""
        return dict(self.tokenizer.special_tokens_map)

    def rendered_mark(self, text: str) -> str | None:
        return get("templates", "own mark").value(self, text)

    @cached_property
    def _reads_parts(self) -> bool:
        """True if the template can read a content that is a list of parts."""
        part = {"role": "user", "content": [{"type": "text", "text": PROBE[0].content}]}
        try:
            with_parts = self._written([part, PROBE[1].as_dict()], {}, False)
        except Exception:
            return False
        return with_parts == self._written([turn.as_dict() for turn in PROBE], {}, False)

    def _apply(self, messages: Sequence[Message], context: Mapping[str, Any], generation_prompt: bool) -> str:
        spoken = [message.as_dict() for message in messages]
        for turn in spoken:
            if isinstance(turn.get("content"), list) and not self._reads_parts:
                turn["content"] = joined_parts(turn["content"])
        if self.response_suffix and not generation_prompt:
            last = spoken[-1]
            text = joined_parts(last.get("content")) or ""
            last["content"] = text.removesuffix(self.response_suffix) + self.response_suffix
        return self._written(spoken, context, generation_prompt)

    def _written(
        self, spoken: list[dict[str, Any]], context: Mapping[str, Any], generation_prompt: bool
    ) -> str:
        given = {**self._special_tokens, "tools": context.get("tools"), "documents": None}
        given |= {"add_generation_prompt": generation_prompt, **dict(self.template.variables)}
        given |= context.get("chat_template_kwargs", {})
        return get("templates", "compile").value(self._template_text(context))(messages=spoken, **given)

    def _template_text(self, context: Mapping[str, Any]) -> str:
        """Return the template for a conversation with these tools, as transformers chooses it."""
        with_tools = self.template.tools_text if context.get("tools") else None
        return self.template.text if with_tools is None else with_tools

    def tokenize(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, int32, without adding special tokens and without truncation."""
        return tokenize(self.tokenizer, texts)

    def encode_together(self, groups: Sequence[Sequence[Sequence[Message]]]) -> list[list[np.ndarray]]:
        """Return the ids of every conversation; the conversations of a group share most of their text.

        The ids are the same as from `encode`. Text between two special tokens is tokenised once, even if a later call
        repeats it, e.g. a profile with another question, or a response with another profile.

        Raises:
          RenderError: The template refuses a conversation; its index counts through all groups.
          CheckpointError: The template writes BOS twice.
        """
        texts = self.render([conversation for group in groups for conversation in group])
        if self.cut_tokens:
            split = re.compile(f"(?={'|'.join(map(re.escape, self.cut_tokens))})").split
            stretches = [split(text) for text in texts]
            ids = self._recent.ids((part for parts in stretches for part in parts), self.tokenize)
            sequences = iter([np.concatenate([ids[part] for part in parts]) for parts in stretches])
        else:
            sequences = iter(self.tokenize(texts))
        encoded = [[self._ended(next(sequences)) for _ in group] for group in groups]
        for sequence in (sequence for group in encoded for sequence in group):
            self.check_ids(sequence)
        return encoded

    @cached_property
    def _recent(self) -> RecentStretches:
        return RecentStretches()

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of one whole conversation: the rendered template in one tokenisation.

        Raises:
          DataError: The template refuses the conversation.
          CheckpointError: The template writes BOS twice.
        """
        return self.encode_together([[messages]])[0][0].tolist()

    def _ended(self, ids: np.ndarray) -> np.ndarray:
        if self.ends_with is None or (len(ids) and ids[-1] == self.ends_with):
            return ids
        return np.append(ids, np.int32(self.ends_with))

    def check_ids(self, ids: np.ndarray) -> None:
        """Raise CheckpointError if there are no ids, or if the template wrote BOS twice at the start."""
        if not len(ids):
            raise CheckpointError(
                f"{self.name}: the chat template and the tokenizer give a text without a token; expected BOS or a text"
            )
        bos = self.bos_token_id
        if bos is not None and len(ids) > 1 and ids[0] == bos and ids[1] == bos:
            raise CheckpointError(
                f"{self.name}: the chat template writes the BOS token (id {bos}) twice; expected it at most"
                " once at the start of a conversation"
            )


class RenderError(DataError):
    """A chat template refuses a conversation. `conversation` is its index within the call."""

    def __init__(self, conversation: int, roles: list[str], name: str, error: Exception) -> None:
        self.conversation = conversation
        self.reason = f"the chat template of {name} refuses the conversation with roles {roles}: {error}"
        super().__init__(self.reason)
