"""A small trained Llama (karpathy/tinyllamas, stories260K) as a reward model in the Hugging Face layout.

python -m tests.parity.stories260k SOURCE OUT

SOURCE holds ``stories260K.bin`` and ``tok512.bin``; the format of both is that of llama2.c.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BOS = 1


@dataclass(frozen=True)
class Stories:
    """The file's header and its tensors, float32, matrices [out, in], layers stacked."""

    dim: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    length: int
    tensors: dict[str, np.ndarray]


def read_weights(path: Path) -> Stories:
    """Every byte of the file is accounted for."""
    data = path.read_bytes()
    dim, hidden, layers, heads, kv_heads, vocab, length = (int(x) for x in np.frombuffer(data, "<i4", 7))
    assert vocab > 0, "an untied output matrix would follow"
    kv, half = dim // heads * kv_heads, dim // heads // 2
    shapes = {
        "embed": (vocab, dim), "attention_norm": (layers, dim), "q": (layers, dim, dim),
        "k": (layers, kv, dim), "v": (layers, kv, dim), "o": (layers, dim, dim), "mlp_norm": (layers, dim),
        "gate": (layers, hidden, dim), "down": (layers, dim, hidden), "up": (layers, hidden, dim),
        "norm": (dim,), "cosines": (length, half), "sines": (length, half),
    }  # fmt: skip
    values, start, tensors = np.frombuffer(data, "<f4", offset=28), 0, {}
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        tensors[name] = values[start : start + size].reshape(shape)
        start += size
    assert start == len(values)
    return Stories(dim, hidden, layers, heads, kv_heads, vocab, length, tensors)


def half_split(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of [heads * H, in] reordered within each head: pairs (2i, 2i + 1) become (i, i + H/2)."""
    rows, inputs = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, inputs)
    return pairs.transpose(0, 2, 1, 3).reshape(rows, inputs)


def hugging_face_tensors(stories: Stories, *, score: np.ndarray) -> dict[str, np.ndarray]:
    """Names and layout of ``LlamaForSequenceClassification``; ``score`` is its head [num_labels, dim]."""
    t = stories.tensors
    tensors = {"model.embed_tokens.weight": t["embed"], "model.norm.weight": t["norm"], "score.weight": score}
    for layer in range(stories.layers):
        of_layer = {
            "input_layernorm": t["attention_norm"][layer],
            "self_attn.q_proj": half_split(t["q"][layer], stories.heads),
            "self_attn.k_proj": half_split(t["k"][layer], stories.kv_heads),
            "self_attn.v_proj": t["v"][layer],
            "self_attn.o_proj": t["o"][layer],
            "post_attention_layernorm": t["mlp_norm"][layer],
            "mlp.gate_proj": t["gate"][layer],
            "mlp.up_proj": t["up"][layer],
            "mlp.down_proj": t["down"][layer],
        }
        tensors |= {f"model.layers.{layer}.{name}.weight": value for name, value in of_layer.items()}
    return {name: np.ascontiguousarray(value, np.float32) for name, value in tensors.items()}


def read_pieces(path: Path) -> list[bytes]:
    """The bytes of every id; pieces 3 to 258, written ``<0xNN>``, are single bytes."""
    data, start, pieces = path.read_bytes(), 4, []
    while start < len(data):
        size = int(np.frombuffer(data, "<i4", 1, start + 4)[0])
        pieces.append(data[start + 8 : start + 8 + size])
        start += 8 + size
    return [bytes([number - 3]) if 3 <= number < 259 else piece for number, piece in enumerate(pieces)]


def write_tokenizer(pieces: list[bytes], folder: Path) -> None:
    """The same pieces as byte-pair merges in the order of their ids, which is the order of their scores."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for number, piece in enumerate(pieces[259:], start=259):
        words[piece.decode().replace(" ", "▁")] = number
    merges = []
    for word, number in words.items():
        splits = [(word[:i], word[i:]) for i in range(1, len(word))] if number >= 259 else []
        known = [(a, b) for a, b in splits if words.get(a, 0) >= 259 and words.get(b, 0) >= 259]
        merges += [(number, pair) for pair in sorted(known, key=lambda ab: words[ab[0]] + words[ab[1]])]
    backend = Tokenizer(
        models.BPE(
            words, [pair for _, pair in sorted(merges, key=lambda m: m[0])],
            unk_token="<unk>", fuse_unk=True, byte_fallback=True,
        )
    )  # fmt: skip
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    template = "{{ bos_token }}{% for message in messages %}{{ message['content'] + '\n' }}{% endfor %}"
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=template
    ).save_pretrained(folder)


def write_model(source: Path, folder: Path, *, causal: bool = False) -> Path:
    """The checkpoint in ``folder``: trained weights, a random score head, a tokenizer with a template.

    ``causal`` writes the language model instead, as it was trained.
    """
    from safetensors.numpy import save_file

    stories = read_weights(source / "stories260K.bin")
    folder.mkdir(parents=True, exist_ok=True)
    score = np.random.default_rng(0).normal(size=(1, stories.dim)).astype(np.float32)
    tensors = hugging_face_tensors(stories, score=score)
    if causal:
        del tensors["score.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForSequenceClassification"], "model_type": "llama", "torch_dtype": "float32",
        "hidden_size": stories.dim, "intermediate_size": stories.hidden, "hidden_act": "silu",
        "num_hidden_layers": stories.layers, "num_attention_heads": stories.heads,
        "num_key_value_heads": stories.kv_heads, "vocab_size": stories.vocab, "rms_norm_eps": 1e-5,
        "max_position_embeddings": stories.length, "rope_theta": 10_000.0, "tie_word_embeddings": True,
        "attention_bias": False, "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2,
        "id2label": {"0": "reward"},
    }  # fmt: skip
    if causal:
        config["architectures"] = ["LlamaForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_tokenizer(read_pieces(source / "tok512.bin"), folder)
    return folder


if __name__ == "__main__":
    print(write_model(Path(sys.argv[1]), Path(sys.argv[2])))
