"""A tokenizer of whole lower-case words, for the small models of the quickstart."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from prb_jax.text.visible import PROFILE_HEADINGS, QUESTION_HEADING

PAD, UNKNOWN, END = "<|pad|>", "<|unknown|>", "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")

TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ '<|end|>' }}{% endif %}"
)
"""One token for each change of speaker, and one at the end, where the reward is read."""


def train_word_tokenizer(texts: Iterable[str], folder: str | Path, *, vocab_size: int) -> Path:
    """Learns a tokenizer from `texts` and writes it to `folder` in the Hugging Face layout.

    Words and punctuation marks, in lower case and without the blanks between them; each frequent word is
    one token, a rare one several (BPE within words). What the prompt writes around the profile and each
    of its posts is one token too. So a conversation has as few tokens as it has words.

    Args:
      texts: what to learn from, prompts with their profile as a model sees them.
      folder: made if it does not exist.
      vocab_size: at most so many ids.

    Returns:
      The folder. The same texts give the same ids.
    """
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    headings = "|".join(re.escape(heading.lower()) for heading in (*PROFILE_HEADINGS, QUESTION_HEADING))
    post = r"post \d+( \(category: [^()\n]*\))?:\n"
    backend = Tokenizer(models.BPE(unk_token=UNKNOWN))
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])  # pyright: ignore[reportAttributeAccessIssue]
    backend.pre_tokenizer = pre_tokenizers.Split(  # pyright: ignore[reportAttributeAccessIssue]
        Regex(rf"{headings}|{post}|\w+|[^\w\s]"), "removed", invert=True
    )
    special = [PAD, UNKNOWN, END, *ROLES]
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False)
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        additional_special_tokens=list(ROLES),
        chat_template=TEMPLATE,
    )
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(path)
    return path
