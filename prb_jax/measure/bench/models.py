"""Models to time: from a folder or with random weights, without a tokenizer or with made-up words."""

from __future__ import annotations

import itertools
import string
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from prb_jax.behaviour.generation.policy import Policy
from prb_jax.behaviour.generation.programs import make_program
from prb_jax.measure.bench.options import BenchOptions
from prb_jax.models.attention.choice import choose_attention
from prb_jax.models.checkpoints.load import abstract_params, load_params
from prb_jax.models.checkpoints.save import save_params
from prb_jax.models.config.decoder import DecoderConfig, load_config, parse_config
from prb_jax.models.config.families import FAMILIES
from prb_jax.models.decoder import Params
from prb_jax.models.head import choose_readout
from prb_jax.models.model import init_params, parameter_shardings
from prb_jax.models.named_shapes import has_no_weights, read_model, shape_config
from prb_jax.models.quantization import Form, quantization_form, quantize_params
from prb_jax.models.readouts.language_model import open_language_model
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.models.readouts.score_tree import make_score_fn
from prb_jax.models.vocabulary_heads import LanguageHead
from prb_jax.platform.meshes import make_mesh
from prb_jax.platform.sharding import check_heads
from prb_jax.scoring.reader import Reader
from prb_jax.scoring.reward_model import RewardModel

_PAD, _UNKNOWN, _END, _USER, _ASSISTANT = "<|pad|>", "<|unknown|>", "<|end|>", "<|user|>", "<|assistant|>"
_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def bench_source(name: str) -> Path | DecoderConfig:
    """Return the folder of this name, or for random weights the configuration of a ``config.json`` or a shape.

    Raises:
      CheckpointError: the configuration is unsupported.
    """
    return read_model(name) if has_no_weights(name) else Path(name)


def load_for_bench(source: Path | DecoderConfig, options: BenchOptions) -> RewardModel:
    """Return a reward model without a tokenizer; it scores token ids."""
    config = source if isinstance(source, DecoderConfig) else load_config(source)
    devices, quantize = make_mesh(options.mesh), options.quantize
    check_heads(devices, heads=config.head_counts)
    chosen = options.dtype or config.default_dtype
    kind = jnp.dtype(chosen)
    form = None if quantize is None else quantization_form(quantize, mesh=devices)
    shardings = parameter_shardings(abstract_params(config, quantize=quantize), devices, config=config)
    name = config.model_type if isinstance(source, DecoderConfig) else str(source)
    readout = choose_readout(
        None if config.num_labels == 1 else "first-logit", num_labels=config.num_labels, where=name
    )
    if isinstance(source, Path):
        loading: Any = {"head_dtype": jnp.float32, "shardings": shardings, "quantize": quantize}
        params = load_params(source, config, dtype=kind, **loading).params
    else:
        params = random_params(config, kind, shardings, form)
        params["score"] = params["score"].astype(jnp.float32)
    return RewardModel(
        reader=Reader(name=name, config=config, tokenizer=cast(Any, None)),
        params=params,
        score_fn=make_score_fn(config, mesh=devices, dtype=kind, readout=readout, shardings=shardings),
        mesh=devices,
        dtype=chosen,
        readout=readout,
        labels=readout,
        quantize=quantize,
        streams=choose_attention(devices, kind, options.attention, config=config),
    )


def silent_policy(source: Path | DecoderConfig, options: BenchOptions) -> Policy:
    """Return a policy without a tokenizer: inputs are token ids, and output texts are empty."""
    if isinstance(source, Path):
        loading = LoadOptions(mesh=options.mesh, dtype=options.dtype, attention=options.attention)
        opened = open_language_model(source, loading)
        config, devices, chosen = opened.decoder.config, opened.mesh, opened.dtype
    else:
        config = replace(source, head=LanguageHead(True, source.final_logit_softcapping))
        devices, chosen = make_mesh(options.mesh), options.dtype or source.default_dtype
    kind = jnp.dtype(chosen)
    check_heads(devices, heads=config.head_counts)
    shardings = parameter_shardings(abstract_params(config), devices, config=config)
    if isinstance(source, Path):
        params = load_params(source, config, dtype=kind, shardings=shardings).params
    else:
        params = random_params(config, kind, shardings)
    return Policy(
        name=str(source) if isinstance(source, Path) else config.model_type,
        program=make_program(config, mesh=devices, dtype=kind, attention=options.attention),
        params=params,
        tokenizer=cast(Any, SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids, **_: ""))),
        stop_ids=(),
        mesh=devices,
        dtype=chosen,
    )


def make_model(shape: str, folder: Path, *, policy: bool) -> Path:
    """Write a model of a named shape with random weights, unless the folder has it already; return the folder.

    It is a reward model, or a policy: a causal language model with a separate output matrix, which keeps it from
    repeating its last token.
    """
    if (folder / "config.json").exists():  # this file is written last
        return folder
    for old in folder.glob("model*.safetensors*"):  # left by an interrupted start
        old.unlink()
    raw = shape_config(shape)
    _write_tokenizer(folder, size=raw["vocab_size"])
    raw |= {"bos_token_id": None, "eos_token_id": 2}
    config = parse_config(raw, where=shape)
    if policy:
        raw |= {"architectures": [FAMILIES[config.model_type].language_model]}
        config = parse_config(raw, where=shape)
        config = replace(config, head=LanguageHead(False, config.final_logit_softcapping))
    params = random_params(config, jnp.dtype(config.default_dtype))
    return save_params(params, config, folder, raw_config=raw)


def random_params(
    config: DecoderConfig, dtype: jnp.dtype, shardings: Params | None = None, form: Form | None = None
) -> Params:
    """Return random weights, quantised to ``form``."""

    def make() -> Params:
        made = init_params(config, dtype=dtype)
        return made if form is None else quantize_params(config, made, form)

    # Drawing with the default generator needs four times the memory of bfloat16 weights, besides the weights.
    with jax.default_prng_impl("rbg"):
        return jax.jit(make, out_shardings=shardings)()


def _write_tokenizer(folder: Path, *, size: int) -> None:
    """Write a tokenizer with a short word for every id, so any drawn id is text."""
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


def random_texts(tokenizer: Any, *, count: int, tokens: int) -> list[str]:
    """Return ``count`` texts of about ``tokens`` tokens, made of words in a transformers tokenizer's vocabulary."""
    words = sorted(word for word in tokenizer.get_vocab() if word.isascii() and word.isalpha())
    random = np.random.default_rng(0)

    def text(length: int) -> str:
        return " ".join(random.choice(words, length))

    for_each = len(tokenizer(text(1000), add_special_tokens=False)["input_ids"]) / 1000
    return [text(max(1, round(tokens / for_each))) for _ in range(count)]
