"""Greedy samples are those of transformers' `generate`, token by token, and so are their log-probabilities."""

from pathlib import Path

import numpy as np
import pytest

import prb_jax as prb
from tests.parity.stories260k import write_model
from tests.plain_process import ROOT
from tests.tiny_models import FAMILIES
from tests.tiny_policies import VOCABULARY, write_policy

TIE = 1e-4
TOKENS = 32  # more than the tiny families' windows of 24
FAST = ("qwen3-yarn", "gemma3", "gpt_oss", "qwen3_next")
STORIES = ROOT.parent / "shared" / "weights" / "stories260K"


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in FAMILIES],
)
def test_tokens_and_logprobs_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    import torch

    theirs = write_policy(tmp_path, family, tie_word_embeddings=family in ("qwen3-yarn", "gemma2"))
    policy = prb.load_policy(tmp_path)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(4, VOCABULARY, size).tolist() for size in (50, 1, 9)]
    # Two rows for three prompts: the third one takes the place of one that is done.
    samples = policy.sample(prompts, temperature=0, max_new_tokens=TOKENS, stop_ids=[], rows=2)
    ties = 0
    for ids, (sample,) in zip(prompts, samples, strict=True):
        assert sample.finish == "length"
        np.testing.assert_array_equal(sample.prompt_token_ids, ids)
        whole = torch.tensor([[*ids, *sample.token_ids.tolist()]])
        with torch.inference_mode():
            logits = theirs(whole).logits[0, len(ids) - 1 : -1].double()
            generated = theirs.generate(
                torch.tensor([ids]), attention_mask=torch.ones((1, len(ids)), dtype=torch.long),
                do_sample=False, max_new_tokens=TOKENS, pad_token_id=0,
            )[0, len(ids) :].numpy()  # fmt: skip
        expected = logits.log_softmax(-1)[torch.arange(TOKENS), torch.tensor(sample.token_ids).long()]
        np.testing.assert_allclose(sample.logprobs, expected, atol=2e-5)
        np.testing.assert_array_equal(sample.sampled_logprobs, 0)
        different = np.flatnonzero(generated != sample.token_ids)
        if len(different):  # from the first tie on the two texts are different ones
            first = different[0]
            gap = float(logits[first].max() - logits[first, int(sample.token_ids[first])])
            assert gap < TIE, f"{family}: token {first} is {gap} below the best"
            ties += 1
    assert ties <= 1


def test_trained_weights_tell_the_documented_story(tmp_path: Path) -> None:
    if not STORIES.is_dir():
        pytest.skip(f"no trained weights at {STORIES}")
    folder = write_model(STORIES, tmp_path / "model", causal=True)
    policy = prb.load_policy(folder)
    ((sample,),) = policy.sample([[1]], temperature=0, max_new_tokens=256, stop_ids=[])
    told = (STORIES / "greedy.txt").read_text()
    assert sample.text.removeprefix(" ") == told
    # A stop text ends it where the text first occurs, whatever the tokens are; it is not part of the sample.
    ((cut,),) = policy.sample([[1]], temperature=0, max_new_tokens=256, stop_ids=[], stop=["the big", "park"])
    place = min(told.find("the big") % 10**6, told.find("park") % 10**6)
    assert cut.text.removeprefix(" ") == told[:place]
    assert cut.finish == "text"
    assert len(cut.token_ids) < 256
