"""Where a text may be cut: only before tokens whose match nothing around them can change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from prb_jax.text import tokenizer
from prb_jax.text.open_tokenizer import independent_tokens
from tests import tiny_tokenizer as tiny


def test_stretches_are_forgotten_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "RECENT_CHARACTERS", 5)
    asked: list[str] = []

    def tokenize(texts: list[str]) -> list[np.ndarray]:
        asked.extend(texts)
        return [np.asarray([ord(letter) for letter in text], np.int32) for text in texts]

    stretches = tokenizer.RecentStretches()

    def ids(*texts: str) -> list[list[int]]:
        known = stretches.ids(texts, tokenize)
        return [known[text].tolist() for text in texts]

    assert ids("abc", "de", "abc", "f") == [[97, 98, 99], [100, 101], [97, 98, 99], [102]]
    assert asked == ["abc", "de", "f"]
    # "abc" is kept a while longer, and again because it was needed.
    assert ids("abc", "gh") == [[97, 98, 99], [103, 104]]
    assert ids("i") == [[105]]
    assert asked == ["abc", "de", "f", "gh", "i"]
    assert ids("jklmn") == [[106, 107, 108, 109, 110]]
    assert ids("abc", "de") == [[97, 98, 99], [100, 101]]
    assert asked == ["abc", "de", "f", "gh", "i", "jklmn", "de"]


def test_tokens_that_depend_on_their_neighbours_are_left_out(tmp_path: Path) -> None:
    from transformers import AddedToken, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny.write_tokenizer(tmp_path))
    probe = "<|start|>a<|end|> [strips] [normal] [word] [plain] <x> [outer[inner]"
    assert independent_tokens(tokenizer, probe) == (tiny.END, tiny.START)
    tokenizer.add_special_tokens(
        {
            "additional_special_tokens": [
                AddedToken("[strips]", lstrip=True, normalized=False),
                AddedToken("[normal]", normalized=True),
                AddedToken("[word]", single_word=True, normalized=False),
                AddedToken("[outer[inner]", normalized=False),
                AddedToken("[inner]", normalized=False),
                AddedToken("<x>", normalized=False),
                AddedToken("[absent]", normalized=False),
            ]
        }
    )
    tokenizer.add_tokens([AddedToken("[plain]", normalized=False)])
    # "[inner]" can be hidden inside "[outer[inner]"; "<x>" is as safe as the first two
    assert independent_tokens(tokenizer, probe) == ("<x>", tiny.END, tiny.START, "[outer[inner]")


def test_text_tokenised_as_plain_text_has_no_cuts(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny.write_tokenizer(tmp_path))
    tokenizer.backend_tokenizer.encode_special_tokens = True
    assert independent_tokens(tokenizer, "<|start|>a<|end|>") == ()
