"""Where a text may be cut: only before tokens whose match nothing around them can change."""

from __future__ import annotations

from pathlib import Path

import pytest

from prb_jax.text.open_tokenizer import common_start, independent_tokens, shared_run
from tests import tiny_tokenizer as tiny


@pytest.mark.parametrize(
    ("a", "b", "length"),
    [("", "", 0), ("abc", "", 0), ("abc", "abc", 3), ("abc", "abd", 2), ("xbc", "abc", 0), ("ab", "abc", 2)],
)
def test_common_start(a: str, b: str, length: int) -> None:
    assert common_start(a, b) == common_start(b, a) == length


def test_the_cut_lies_before_a_token_that_all_share_in_full() -> None:
    tokens = ("<s>", "<e>")
    assert shared_run(["<s>hello<e><s>a", "<s>hello<e><s>b"], tokens) == len("<s>hello<e>")
    assert shared_run(["<s>hello<e><s", "<s>hello<e><x"], tokens) == len("<s>hello")
    assert shared_run(["hello a", "hello b"], tokens) == 0
    assert shared_run(["<s>hello<e>"], tokens) == 0  # nothing to share
    assert shared_run(["<s>a<e>x", "<s>a<e>y"], ()) == 0


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
