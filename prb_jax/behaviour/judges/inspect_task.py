"""The default judge of pairs as a task of Inspect: `inspect eval prb_jax/pairwise_judge -T data=FILE --model M`."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

# pyright: reportMissingImports=false
from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ChatMessageUser, GenerateConfig, ModelOutput, get_model
from inspect_ai.scorer import CORRECT, INCORRECT, NOANSWER, Score, accuracy, scorer, stderr
from inspect_ai.solver import solver

from prb_jax.behaviour.judges.pairs import (
    LETTER_TOKENS,
    REASON_TOKENS,
    better_response,
    pair_messages,
)
from prb_jax.behaviour.judges.replies import read_verdict
from prb_jax.scoring.inputs import read_inputs

_SECOND = "prb_jax:second"


@task
def pairwise_judge(
    data: str | list[str], subset: str | None = None, profile_posts: int = 10, reason: bool = False
) -> Task:
    """Which of two responses does this user prefer? Asked twice, with each response as A once, as in `prb judge`.

    A sample is correct if the better response wins in both orders, so the accuracy equals the accuracy of `prb judge`.
    The metadata contain the user (user_id) and the pair of responses (item_id), by which `prb compare` clusters.

    Args:
      data: Comparisons of two responses, as for `prb judge --data`.
      subset: Subset of the data.
      profile_posts: Number of posts of the user to show to the judge.
      reason: Think in words before the verdict.
    """
    comparisons = read_inputs([data] if isinstance(data, str) else data, subset=subset).comparisons
    samples = []
    for comparison in comparisons:
        better = better_response(comparison)
        first, second = (
            pair_messages(comparison, order, profile_posts=profile_posts, reason=reason)[0].content
            for order in (0, 1)
        )
        pair = repr([comparison.prompt, sorted(comparison.responses)])
        metadata = {
            "user_id": comparison.user_id,
            "item_id": sha256(pair.encode()).hexdigest()[:16],
            "subset": comparison.subset,
            _SECOND: second,
        }
        samples.append(Sample(id=comparison.id, input=first, target="AB"[better], metadata=metadata))
    return Task(
        dataset=MemoryDataset(samples),
        solver=both_orders(),
        scorer=preferred_in_both_orders(),
        config=GenerateConfig(temperature=0.0, max_tokens=REASON_TOKENS if reason else LETTER_TOKENS),
    )


@solver
def both_orders() -> Any:
    """Ask with the first response as A, and in a separate conversation with the second one as A."""

    async def solve(state: Any, generate: Any) -> Any:
        state = await generate(state)
        output: ModelOutput = await get_model().generate([ChatMessageUser(content=state.metadata[_SECOND])])
        state.store.set(_SECOND, output.completion)
        return state

    return solve


@scorer(metrics=[accuracy(), stderr()])
def preferred_in_both_orders() -> Any:
    """C if the better response is preferred in both orders, N if a reply has no verdict, else I."""

    async def score(state: Any, target: Any) -> Score:
        replies = [state.output.completion, state.store.get(_SECOND)]
        verdicts = [read_verdict(reply) for reply in replies]
        better = target.text
        right = verdicts == [better, "B" if better == "A" else "A"]
        return Score(
            value=NOANSWER if None in verdicts else CORRECT if right else INCORRECT,
            answer="".join(letter or "-" for letter in verdicts),
            explanation="\n\n".join(replies),
            metadata={"verdicts": verdicts},
        )

    return score
