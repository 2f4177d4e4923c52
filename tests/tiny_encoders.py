"""Tiny random encoders, written by transformers itself, and a word-piece tokenizer beside them.

Nothing in them is trivial: norms are not the identity, biases are not zero, weights are large enough for
attention to be far from uniform.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_VOCABULARY = (
    "the a of and i you soup rain tea bread hill chess letter walk cook read what when how is was very good bad never "
    "always ? . , ! ##s ##ing ##ed ##er s t p c o n"
)
WORDS = tuple(_VOCABULARY.split())
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

_SIZES = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 56,
    "max_position_embeddings": 64,
}  # fmt: skip
BERT = {**_SIZES, "type_vocab_size": 2}
DEBERTA = {
    **_SIZES, "type_vocab_size": 0, "relative_attention": True, "position_buckets": 8, "max_relative_positions": -1,
    "pos_att_type": ["p2c", "c2p"], "share_att_key": True, "norm_rel_ebd": "layer_norm",
    "position_biased_input": False, "layer_norm_eps": 1e-7,
}  # fmt: skip


MODERN = {
    **_SIZES, "local_attention": 12, "global_attn_every_n_layers": 2, "pad_token_id": 0, "cls_token_id": 2,
    "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "ModernBert": ("ModernBert", MODERN), "Bert": ("Bert", BERT), "DebertaV2": ("DebertaV2", DEBERTA),
}  # fmt: skip


def random_model(class_name: str, *, seed: int = 0, **config: Any) -> Any:
    """A transformers model of this class with random weights, in eval mode."""
    import torch
    import transformers

    family, sizes = next(kind for name, kind in _KINDS.items() if class_name.startswith(name))
    torch.manual_seed(seed)
    sizes = {**sizes, **config}
    model = getattr(transformers, class_name)(getattr(transformers, f"{family}Config")(**sizes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.25 if parameter.ndim == 2 else 0.2
            parameter.normal_(0.0, scale)
            if "norm" in name.lower() and name.endswith("weight"):
                parameter.add_(1.0)
    return model


def write_encoder(folder: Path, class_name: str = "BertModel", **config: Any) -> Any:
    """Writes a random model and a tokenizer to a folder; the model."""
    model = random_model(class_name, **config)
    model.save_pretrained(folder)
    write_wordpiece(folder, max_length=model.config.max_position_embeddings)
    return model


def write_wordpiece(folder: Path, *, max_length: int = 64) -> None:
    """A lower-casing word-piece tokenizer of a few words, with [CLS] and [SEP] around one text and two."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate((*SPECIAL, *WORDS))}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=60))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")],
    )
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=max_length,
    ).save_pretrained(folder)


def configure(folder: Path, **changes: Any) -> None:
    """Changes fields of ``config.json``; None takes one out."""
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
