"""Models with random weights and a tokenizer of made-up words, for what needs a folder: serving, policies, rivals."""

from __future__ import annotations

import itertools
import string
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp

from prb_jax.checkpoints.save import save_params
from prb_jax.models.config.decoder import parse_config
from prb_jax.models.config.families import FAMILIES
from prb_jax.models.decoder import Params
from prb_jax.models.head import LanguageHead
from prb_jax.models.named_shapes import shape_config
from prb_jax.models.random_params import init_params

_PAD, _UNKNOWN, _END, _USER, _ASSISTANT = "<|pad|>", "<|unknown|>", "<|end|>", "<|user|>", "<|assistant|>"
_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_model(shape: str, folder: Path, *, policy: bool) -> Path:
    """Write a model of a named shape with random weights, unless the folder holds it already.

    Args:
      shape: one of :data:`prb_jax.models.named_shapes.SHAPES`.
      folder: where to.
      policy: a causal language model with an output matrix of its own, so that it does not repeat its last token;
        else a reward model.

    Returns:
      The folder.
    """
    if (folder / "config.json").exists():  # written last
        return folder
    for old in folder.glob("model*.safetensors*"):  # of a start that was interrupted
        old.unlink()
    raw = shape_config(shape)
    _write_tokenizer(folder, size=raw["vocab_size"])
    raw |= {"bos_token_id": None, "eos_token_id": 2}
    config = parse_config(raw, where=shape)
    if policy:
        raw |= {"architectures": [FAMILIES[config.model_type].language_model]}
        config = parse_config(raw, where=shape)
        config = replace(config, head=LanguageHead(False, config.final_logit_softcapping))
    kind = jnp.dtype(config.default_dtype)

    def make() -> Params:
        params = init_params(config, dtype=kind)
        if not policy:
            return params
        size = (config.hidden_size, config.vocab_size)
        output = jax.random.normal(jax.random.key(1), size) / config.hidden_size**0.5
        return {name: value for name, value in params.items() if name != "score"} | {
            "lm_head": output.astype(kind)
        }

    params = jax.jit(make)()
    return save_params(params, config, folder, raw_config=raw)


def _write_tokenizer(folder: Path, *, size: int) -> None:
    """A short word for every id, so that whatever is drawn is text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = [_PAD, _UNKNOWN, _END, _USER, _ASSISTANT, "<|system|>"]
    letters = itertools.product(string.ascii_lowercase, repeat=4)
    names = itertools.islice(map("".join, letters), size - len(special))
    vocabulary = {word: number for number, word in enumerate([*special, *names])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=_UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=_END,
        pad_token=_PAD,
        unk_token=_UNKNOWN,
        additional_special_tokens=special[3:],
        chat_template=_TEMPLATE,
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
