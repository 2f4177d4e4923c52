"""The model that both trainings of the quickstart start from: a small new decoder and a tokenizer of whole words.

The models are ordinary Qwen 3 decoders with a score head. What is particular to them are the sizes and the starting
weights, chosen so that they learn within two minutes of two CPU cores what larger models bring along from their
pretraining: that a word of an answer and a word of a post are about the same thing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from prb_jax.checkpoints.save import save_params
from prb_jax.data.comparison import Comparison
from prb_jax.models.config.decoder import parse_config
from prb_jax.models.decoder import Params
from prb_jax.models.random_params import init_params
from prb_jax.quickstart.recipe import PROFILE_POSTS, Recipe
from prb_jax.text.protocol import TextProtocol
from prb_jax.text.tokenizer import load_tokenizer
from prb_jax.text.visible import PROFILE_HEADINGS, QUESTION_HEADING, visible

PAD, UNKNOWN, END = "<|pad|>", "<|unknown|>", "<|end|>"
ROLES = ["<|system|>", "<|user|>", "<|assistant|>"]

TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ '<|end|>' }}{% endif %}"
)
"""One token for each change of speaker, and one at the end, where the reward is read."""


def make_start(folder: Path, comparisons: Sequence[Comparison], recipe: Recipe) -> Path:
    """Write the model that both trainings start from, and its tokenizer, unless it is there already.

    Args:
      folder: made if it does not exist.
      comparisons: of the training parts, from which the tokenizer is learned.
      recipe: sizes and seed.
    """
    if (folder / "config.json").exists():  # written last
        return folder
    texts: dict[str, None] = {}
    for comparison in comparisons:
        seen = visible(comparison, profile_posts=PROFILE_POSTS, protocol=TextProtocol.DEFAULT)
        texts.update((message.content, None) for message in seen.prefix_messages)
        texts.update((response, None) for response in seen.responses)
    train_word_tokenizer(texts, folder, vocab_size=recipe.vocab_size)
    tokenizer = load_tokenizer(folder)
    raw = config_json(recipe, vocab_size=tokenizer.vocab_size, pad_token_id=tokenizer.pad_token_id)
    config = parse_config(raw, where="quickstart")
    make = jax.jit(lambda: starting_weights(init_params(config, seed=recipe.seed)))
    for old in folder.glob("model*.safetensors*"):  # of a start that was interrupted
        old.unlink()
    return save_params(make(), config, folder, raw_config=raw)


def config_json(recipe: Recipe, *, vocab_size: int, pad_token_id: int | None) -> dict[str, Any]:
    """`config.json` of the models."""
    return {
        "architectures": ["Qwen3ForSequenceClassification"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": recipe.hidden_size,
        "intermediate_size": recipe.intermediate_size,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.heads,
        "head_dim": recipe.hidden_size // recipe.heads,
        "max_position_embeddings": 4096,
        # Far above the usual 1e-6: a norm then passes small vectors on as they are, so that a word
        # which matters can say so by the length of its embedding. See `starting_weights`.
        "rms_norm_eps": 0.1,
        "rope_theta": 1_000_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "pad_token_id": pad_token_id,
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "torch_dtype": "float32",
    }


def starting_weights(params: Params) -> Params:
    """Random parameters, rescaled for learning from nothing.

    Embeddings start short, well below the epsilon of the norms: what a word contributes then grows with
    its embedding, and the few words that tell tastes apart soon outweigh the many that do not. A larger
    head makes the small states that come of it matter from the first step on.
    """
    return {**params, "embed": 0.05 * params["embed"], "score": 5.0 * params["score"]}


def train_word_tokenizer(texts: Iterable[str], folder: Path, *, vocab_size: int) -> None:
    """Learn a tokenizer from `texts` and write it to `folder` in the Hugging Face layout.

    Words and punctuation marks, in lower case and without the blanks between them; each frequent word is
    one token, a rare one several (BPE within words). What the prompt writes around the profile and each
    of its posts is one token too. So a conversation has as few tokens as it has words.

    Args:
      texts: what to learn from, prompts with their profile as a model sees them.
      folder: made if it does not exist.
      vocab_size: at most so many ids.

    The same texts give the same ids.
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
        additional_special_tokens=ROLES,
        chat_template=TEMPLATE,
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
