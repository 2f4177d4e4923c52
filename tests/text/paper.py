"""The ids of a conversation as the scripts of the paper make them."""

from collections.abc import Sequence

from prb_jax.data.conversation import Message
from prb_jax.text.tokenizer import ChatTokenizer


def paper_ids(chat: ChatTokenizer, messages: Sequence[Message], *, max_length: int) -> list[int]:
    """Return the ids of the rendered template with special tokens added once more, cut at `max_length`."""
    (ids,) = chat.tokenize(chat.render([messages]))
    return chat.with_special_tokens(ids, max_length=max_length).tolist()
