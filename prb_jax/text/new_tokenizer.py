"""A tokenizer made from the training data, for models that are trained from scratch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from prb_jax.records.comparison import Comparison

PAD, START, END = "<|pad|>", "<|start|>", "<|end|>"

TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
"""Turns between special tokens; no BOS."""

MOST_TEXTS = 200_000  # texts that are looked at, evenly spaced: more hardly change which merges are frequent


def training_texts(comparisons: Sequence[Comparison], *, profiles: bool) -> list[str]:
    """The distinct texts that a model sees of these comparisons, without template, in order."""
    texts: dict[str, None] = {}
    for comparison in comparisons:
        texts.update((message.content, None) for message in comparison.prompt)
        texts.update((response, None) for response in comparison.responses)
        if profiles:
            texts.update((post.text, None) for post in comparison.profile)
    all_texts = list(texts)
    return all_texts[:: max(1, -(-len(all_texts) // MOST_TEXTS))]


def train_tokenizer(texts: Iterable[str], folder: str | Path, *, vocab_size: int) -> Path:
    """Trains a byte-level BPE on `texts` and writes it to `folder` in the Hugging Face layout.

    Args:
      texts: what to learn from; any other text can be tokenised too, byte by byte where need be.
      folder: made if it does not exist.
      vocab_size: at most so many ids; fewer where the texts hold no more to merge.

    Returns:
      The folder. The same texts give the same ids.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    # Digits one by one and words with their blank: as GPT-2 and its many followers do.
    backend.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, pad_token=PAD, chat_template=TEMPLATE
    )
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(path)
    return path
