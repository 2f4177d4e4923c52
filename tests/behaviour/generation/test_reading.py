"""Prompts are read in full streams by one program, common beginnings once, and each part fills its own trees."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import prb_jax as prb
from prb_jax.behaviour.generation import reading
from prb_jax.behaviour.generation.choose import Rules
from prb_jax.behaviour.generation.programs import make_programs
from prb_jax.behaviour.generation.rules import SampleOptions
from prb_jax.behaviour.generation.schedule import collect, deal, draw
from prb_jax.behaviour.generation.steps import (
    Stops,
    empty_prompts,
    empty_rows,
    put_prompts,
    restart,
    run_steps,
)

RNG = np.random.default_rng(0)
PROFILES = [RNG.integers(4, 400, 90).astype(np.int32) for _ in range(4)]
PROMPTS = [
    np.concatenate([PROFILES[k % 4], RNG.integers(4, 400, 1 + 7 * k % 60).astype(np.int32)])
    for k in range(24)
]
"""Of four persons in turn, each with a profile."""
OPTIONS = SampleOptions(n=2, max_new_tokens=4, seed=3, stop_ids=())


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The sizes of the streams that are read."""
    read: list[tuple[int, ...]] = []
    pack = reading.PromptPacker.pack

    def noted(self: Any, *given: Any) -> Any:
        batch = pack(self, *given)
        read.append(batch.tokens.shape)
        return batch

    monkeypatch.setattr(reading.PromptPacker, "pack", noted)
    return read


@pytest.mark.parametrize("rows", [2, 16])
def test_one_program_reads_full_streams_in_which_profiles_stand_once(
    policy: prb.Policy, streams: list[tuple[int, ...]], rows: int
) -> None:
    """Whether prompts come one by one, or several trees are filled at a time."""
    program = dataclasses.replace(policy.program, lora_scale=1.0 + rows)  # no other test has compiled it
    task = dataclasses.replace(policy.task([], OPTIONS), prompts=PROMPTS)
    shape = reading_shape(policy, rows)
    programs = make_programs(program, shape)
    before = programs._put._cache_size()  # of all samplers together
    drawn = collect(draw(programs, policy.params, task))
    assert [len(samples) for samples in drawn] == [2] * len(PROMPTS)
    assert len(set(streams)) == 1
    assert reading.reading_program(program)._cache_size() == 1
    assert programs._put._cache_size() == before + 1
    units = -(-len(PROMPTS) // shape.unit)
    shared = sum(map(len, PROMPTS)) - (len(PROMPTS) - 4 * units) * len(PROFILES[0])
    computed = sum(tokens for _, tokens in streams)
    assert computed < 0.75 * sum(map(len, PROMPTS))
    assert computed < 1.2 * shared + 128 * units
    # the samples are those of prompts that are read one by one
    for number in (0, 5, 23):
        alone = dataclasses.replace(task, prompts=[PROMPTS[number]], numbers=[number], stream=None)
        (samples,) = collect(draw(programs, policy.params, alone))
        for ours, expected in zip(drawn[number], samples, strict=True):
            np.testing.assert_array_equal(ours.tokens, expected.tokens)
            np.testing.assert_allclose(ours.logprobs, expected.logprobs, atol=1e-5)


def reading_shape(policy: prb.Policy, rows: int) -> Any:
    from prb_jax.behaviour.generation.programs import choose_shape

    longest = max(map(len, PROMPTS))
    return choose_shape(policy.program, OPTIONS, longest=longest, prompts=len(PROMPTS), rows=rows)


def test_a_length_is_chosen_by_what_it_leaves_empty(policy: prb.Policy) -> None:
    """Streams hold the longest prompt, and are about as many tokens as prompts of one unit divide into."""
    prompts = [np.arange(4, 4 + 300) + k for k in range(8)]  # nothing in common
    tokens = reading.prompt_length(policy.program, prompts, together=8, columns=320)
    assert tokens % 128 == 0
    assert 300 * 8 <= tokens * -(-8 // (tokens // 300)) < 1.1 * 300 * 8
    alone = reading.prompt_length(policy.program, prompts, together=1, columns=320)
    assert alone == 384


def test_parts_get_neighbours_and_free_trees_are_filled_first() -> None:
    assert list(map(list, deal(range(7), [0, 0]))) == [[0, 1, 2, 3], [4, 5, 6]]
    assert list(map(list, deal(range(7), [3, 1]))) == [[0, 1, 2, 3, 4], [5, 6]]
    assert list(map(list, deal([8, 9], [0, 3]))) == [[], [8, 9]]
    assert list(map(list, deal([8, 9], [2, 2]))) == [[8], [9]]
    assert list(map(list, deal([], [2, 1]))) == [[], []]


def test_a_program_of_the_caller_samples_from_weights_that_change(policy: prb.Policy) -> None:
    """As docs/sampling.md shows it."""
    ids = PROMPTS[:3]
    batch, new = reading.lay_out_prompts(policy.program, ids)

    @jax.jit
    def generate(params: Any, batch: Any, new: Any, seed: jax.Array) -> Any:
        program = policy.program
        held = empty_prompts(program, trees=len(ids), columns=new.moves.places.shape[2])
        prompts = put_prompts(held, program.read(params, batch), new)
        rows = empty_rows(program, trees=len(ids), samples=2, columns=16)
        which = jnp.ones((len(ids), 2), bool)
        rows = restart(rows, prompts, which, jnp.broadcast_to(jnp.arange(2), which.shape))
        stops: Any = Stops(ids=jnp.array([-1]), tokens=jnp.int32(4))
        return run_steps(
            program, params, prompts, rows, rules=Rules(), stops=stops, seed=seed, most=jnp.int32(4),
            watched=jnp.zeros_like(which),
        )  # fmt: skip

    rows = generate(policy.params, batch, new, jnp.int32(3))
    samples = policy.sample(ids, n=2, max_new_tokens=4, seed=3, stop_ids=())
    expected = [[one.token_ids.tolist() for one in of_prompt] for of_prompt in samples]
    assert np.asarray(rows.tokens)[..., :4].tolist() == expected


def test_a_conversation_that_begins_the_answer_is_refused_as_a_prompt(policy: prb.Policy) -> None:
    """Its beginning would not be continued; the position is named, and nothing is drawn for the others."""
    asked = [{"role": "user", "content": "Tea?"}]
    begun = [*asked, {"role": "assistant", "content": "Green"}]
    with pytest.raises(
        prb.DataError, match=r"^prompt 1: ends with the beginning of an answer, which would be left out"
    ):
        policy.sample([asked, begun], n=1, max_new_tokens=1)
    with pytest.raises(prb.DataError, match=r"^prompt 0: expected a text, a conversation"):
        policy.sample([[]], n=1, max_new_tokens=1)
