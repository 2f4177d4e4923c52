"""The tokenizers that tests open, and the ids of a conversation as the scripts of the paper make them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from prb_jax.records.comparison import Message
from prb_jax.scoring.paper import with_special_tokens
from prb_jax.text.open_tokenizer import load_tokenizer
from prb_jax.text.tokenizer import ChatTokenizer
from tests import tiny_tokenizer as tiny

SHARED = Path(__file__).resolve().parents[3] / "shared"
REAL = ("qwen3", "llama3-instruct", "minimind")
TINY: Mapping[str, Mapping[str, Any]] = {
    "chat": {},
    "bos": {"template": tiny.CHAT_WITH_BOS, "bos": True},
    "seamless": {"template": tiny.SEAMLESS, "bos": True},
    "thinking": {"template": tiny.THINKING},
    "prepend": {"template": tiny.CHAT_WITH_BOS, "bos": True, "style": "prepend"},
    "metaspace": {"bos": True, "style": "metaspace"},
}
CHATS = (*REAL, *TINY)


def real_chat(name: str) -> ChatTokenizer:
    """A published tokenizer; skips the test where it is not beside the checkout."""
    folder = SHARED / "tokenizers" / name
    if not folder.is_dir():
        pytest.skip(f"no tokenizer at {folder}")
    return load_tokenizer(folder)


def open_chat(name: str, folder: Path) -> ChatTokenizer:
    """One of CHATS; tiny ones are written to the folder."""
    return real_chat(name) if name in REAL else load_tokenizer(tiny.write_tokenizer(folder, **TINY[name]))


def as_transformers_has_it(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [message.as_dict() for message in messages]


def paper_ids(chat: ChatTokenizer, messages: Sequence[Message], *, max_length: int) -> list[int]:
    """Return the ids of the rendered template with special tokens added once more, cut at `max_length`."""
    (ids,) = chat.tokenize(chat.render([messages]))
    return with_special_tokens(chat, ids, max_length=max_length).tolist()
