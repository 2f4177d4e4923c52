"""Train a tokenizer on the training data, for models trained from scratch."""

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
"""Each turn is enclosed in special tokens; there is no BOS."""

MOST_TEXTS = 200_000  # texts to train on, evenly spaced: more texts hardly change the frequent merges


def training_texts(comparisons: Sequence[Comparison], *, profiles: bool) -> list[str]:
    """Return the distinct texts of comparisons that a model sees, without template, in order; at most `MOST_TEXTS`."""
    texts: dict[str, None] = {}
    for comparison in comparisons:
        texts.update((message.content, None) for message in comparison.prompt)
        texts.update((response, None) for response in comparison.responses)
        if profiles:
            texts.update((post.text, None) for post in comparison.profile)
    all_texts = list(texts)
    return all_texts[:: max(1, -(-len(all_texts) // MOST_TEXTS))]


def train_tokenizer(texts: Iterable[str], folder: str | Path, *, vocab_size: int) -> Path:
    """Train a byte-level BPE on `texts` and write it to `folder` in the Hugging Face layout.

    Args:
      texts: Training texts. The tokenizer can encode any other text too, byte by byte if necessary.
      folder: Output folder, created if it does not exist.
      vocab_size: Maximum number of ids; the tokenizer has fewer if the texts have no more merges.

    Returns:
      The folder. The same texts give the same ids.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    # Single digits, and words with their leading blank, as in GPT-2 and its successors.
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
