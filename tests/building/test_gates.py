"""Every gate finds the fault that was planted for it, in pairs of the generated personas, and is quiet otherwise."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest

import prb_jax as prb
from prb_jax.building.gates.answers import (
    find_copied_aspects,
    find_duplicates,
    find_refusals,
    find_truncations,
    refusal,
)
from prb_jax.building.gates.gate import Figure, Pair
from prb_jax.building.gates.judged import Verdicts, measure_blind_judge, measure_blind_rewards
from prb_jax.building.gates.surface import measure_length, measure_style
from prb_jax.building.gates.texts import (
    KnownTexts,
    find_overlaps,
    find_personal_texts,
    personal_text,
    read_known_texts,
    run_keys,
)
from prb_jax.building.gates.words import shingles, similarity
from prb_jax.building.gating import run_gates
from prb_jax.building.parts import split_parts
from prb_jax.building.settings import GATES, BuildSettings
from prb_jax.data.comparison import Message
from prb_jax.remote.endpoint import Reply
from prb_jax.sources import personas

LEVEL = 0.99
COUNT = 240
TRIALS = 60


@cache
def everything() -> tuple[Pair, ...]:
    """Pairs whose answers occur in no other pair; on each side both poles of a taste are as frequent."""
    seen: set[str] = set()
    found = []
    for comparison in personas.load("train"):
        if not seen & set(comparison.responses):
            seen |= set(comparison.responses)
            found.append(Pair(comparison))
    return tuple(found)


def sample(seed: int, count: int = COUNT) -> list[Pair]:
    return random.Random(seed).sample(everything(), count)


def changed(pair: Pair, *, chosen: str | None = None, rejected: str | None = None) -> Pair:
    row = pair.comparison.to_row()
    row |= {"chosen": chosen or pair.chosen, "rejected": rejected or pair.rejected}
    return replace(pair, comparison=prb.Comparison(**row))


def some(pairs: Sequence[Pair], change: Callable[[Pair], Pair], share: float) -> tuple[list[Pair], set[str]]:
    """The pairs with a share of them changed, and the names of these."""
    hit = set(range(0, len(pairs), round(1 / share)))
    made = [change(pair) if place in hit else pair for place, pair in enumerate(pairs)]
    return made, {pairs[place].id for place in hit}


def rubric_verdicts(pairs: Sequence[Pair], truth: dict[str, str]) -> dict[str, Verdicts]:
    """A judge who knows which answer the person likes."""
    return {pair.id: Verdicts(("A", "B") if truth[pair.id] == pair.chosen else ("B", "A")) for pair in pairs}


def blind_verdicts(pairs: Sequence[Pair], seed: int, bias: float = 0.5) -> dict[str, Verdicts]:
    draws = random.Random(seed)
    return {pair.id: Verdicts(("A", "B") if draws.random() < bias else ("B", "A")) for pair in pairs}


def test_gates_that_leave_out_pairs_find_their_own_fault_alone() -> None:
    clean = sample(0, 80)
    draws = random.Random(0)
    foreign = " ".join("".join(draws.choices("aeioubdfgklmnprstv", k=6)) for _ in range(30))
    known = KnownTexts(13, dict.fromkeys(run_keys(foreign, 13), "held"))
    finders = {
        "refusals": find_refusals,
        "truncations": find_truncations,
        "copied": partial(find_copied_aspects, words=5),
        "personal": find_personal_texts,
        "duplicates": partial(find_duplicates, least=0.7),
        "overlap": partial(find_overlaps, known=known),
    }
    quiet = {name: finder(clean) for name, finder in finders.items()}
    assert {
        name: len(found) / len(clean) for name, found in quiet.items() if len(found) > 0.05 * len(clean)
    } == {}

    def copy(pair: Pair) -> Pair:
        reason = pair.comparison.rubric_aspects[0].reason
        return changed(pair, chosen=f"{pair.chosen} {reason[:1].upper()}{reason[1:].rstrip('.')}.")

    def repeat(pair: Pair) -> Pair:
        words = clean[1].rejected.split()
        return changed(pair, rejected=" ".join([*words[:-4], words[-3], *words[-3:]]))

    faults: dict[str, Callable[[Pair], Pair]] = {
        "refusals": lambda pair: changed(pair, rejected="I’m sorry, but I can’t assist with that request."),
        "truncations": lambda pair: changed(pair, chosen=" ".join(pair.chosen.split()[:-2]).rstrip(".,!?")),
        "copied": copy,
        "personal": lambda pair: changed(pair, chosen=f"{pair.chosen} Write to ann.b@example.org about it."),
        "duplicates": repeat,
        "overlap": lambda pair: changed(pair, chosen=f"{pair.chosen} {foreign[28:140].capitalize()}."),
    }
    for fault, change in faults.items():
        made, hit = some(clean, change, 0.1)
        for name, finder in finders.items():
            found = finder(made)
            if name == fault:
                assert hit - found.keys() <= ({made[0].id} if fault == "duplicates" else set()), fault
            elif (name, fault) not in (
                ("duplicates", "refusals"),
                ("duplicates", "overlap"),
            ):  # the same text
                assert found.keys() <= quiet[name].keys(), (name, fault)


def test_gates_of_all_pairs_find_their_own_fault_and_raise_few_false_alarms() -> None:
    alarms = dict.fromkeys(("length", "style", "blind-judge"), 0)
    for seed in range(TRIALS):
        # who likes which of two answers is a coin here: nothing can tell
        draws = random.Random(seed)
        pairs = [
            changed(pair, chosen=pair.rejected, rejected=pair.chosen) if draws.random() < 0.5 else pair
            for pair in sample(seed, 120)
        ]
        alarms["length"] += not measure_length(pairs, level=LEVEL).passed
        alarms["style"] += not measure_style(pairs, level=LEVEL).passed
        blind = blind_verdicts(pairs, seed)
        alarms["blind-judge"] += not measure_blind_judge(pairs, blind, level=LEVEL).passed
    assert all(count <= 0.05 * TRIALS for count in alarms.values()), alarms

    pairs = sample(99)
    longer = [
        changed(pair, chosen=f"{pair.chosen} It is worth trying that once, I would say.") for pair in pairs
    ]
    assert not measure_length(longer, level=LEVEL).passed
    assert not measure_style(longer, level=LEVEL).passed
    listed, _ = some(pairs, lambda pair: changed(pair, rejected=pair.rejected.replace(". ", ".\n- ")), 0.5)
    found = measure_style(listed, level=LEVEL)
    assert not found.passed
    assert "'list items'" in found.note
    assert measure_length(listed, level=LEVEL).value == pytest.approx(
        measure_length(pairs, level=LEVEL).value, abs=0.4
    )
    wrapped = [changed(pair, chosen=f"Assistant: {pair.chosen}") for pair in pairs]
    assert "the name of a role" in measure_style(wrapped, level=LEVEL).note
    assert not measure_blind_judge(pairs, blind_verdicts(pairs, 0, bias=0.7), level=LEVEL).passed
    wins = {"m": dict.fromkeys((pair.id for pair in pairs), 0.5), "n": {pair.id: 1.0 for pair in pairs}}
    found = measure_blind_rewards(pairs, wins, level=LEVEL)
    assert not found.passed
    assert found.note == "m 0.500, n 1.000"
    assert measure_blind_rewards(pairs, {"m": wins["m"]}, level=LEVEL).passed
    few = [pair for pair in pairs if pair.comparison.user_id == pairs[0].comparison.user_id]
    assert "no interval: 1 users" in measure_length(few, level=LEVEL).note


class Knowing:
    """A judge on this machine who finds the answer that the person likes where aspects are shown."""

    def __init__(self, liked: set[str]) -> None:
        self.liked = liked

    def identity(self) -> dict[str, str]:
        return {"name": "knowing"}

    def too_long(self, conversations: Sequence[Sequence[Message]], *, max_new_tokens: int) -> str | None:
        return None

    def replies(
        self,
        conversations: Sequence[Sequence[Message]],
        *,
        max_new_tokens: int,
        alternatives: int | None = None,
    ) -> list[Reply]:
        found = []
        for (message,) in conversations:
            a = message.content.partition("Answer A:\n")[2].partition("\n\nAnswer B:")[0]
            if "serves these wishes" in message.content:
                found.append(Reply("A" if a in self.liked else "B", 1, 1))
            else:
                found.append(Reply("A", 1, 1))  # always the first: no preference in both orders
        return found


def test_swapped_labels_are_left_out_by_the_rubric_judge(tmp_path) -> None:
    clean = sample(3, 120)
    liked = {pair.chosen for pair in clean}
    swapped, hit = some(clean, lambda pair: changed(pair, chosen=pair.rejected, rejected=pair.chosen), 0.1)
    relax = ("length", "style", "overlap", "blind-reward")
    settings = BuildSettings(relax=relax)
    judge = Knowing(liked)
    run = partial(run_gates, settings=settings, judge=judge, folder=tmp_path)
    gated = run(swapped, swapped, records=len(swapped))
    results = {each.name: each for each in gated.results}
    assert tuple(results) == GATES
    found = {name for name, (gate, _) in gated.dropped.items() if gate == "rubric-judge"}
    others = {name for name, (gate, _) in gated.dropped.items() if gate != "rubric-judge"}
    assert found == hit - others
    assert len(others) <= 0.05 * len(clean)
    assert results["rubric-judge"].before is not None
    assert results["rubric-judge"].before.value == pytest.approx(len(found) / (len(clean) - len(others)))
    assert results["rubric-judge"].after.value == 0.0
    assert results["blind-judge"].after == Figure(
        0.5, len(gated.kept), (0.5, 0.5), True, results["blind-judge"].after.note
    )
    assert not results["overlap"].after.passed
    gated.check()  # what failed is relaxed
    relaxed = replace(settings, relax=(*relax, "rubric-judge"))
    kept = run_gates(
        swapped, swapped, records=len(swapped), settings=relaxed, judge=judge, folder=tmp_path
    ).kept
    assert hit - others <= {pair.id for pair in kept}
    told = next(pair for pair in kept if pair.id in hit)
    assert "prefers the rejected answer" in told.provenance["gates"]["rubric-judge"]


@pytest.mark.parametrize(
    ("text", "refuses"),
    [
        ("I'm sorry, but I cannot help with that.", True), ("As an AI language model, I have no taste.", True),
        ("I can't provide advice on this.", True), ("Unfortunately, I am unable to answer.", True),
        ("I'm sorry you had such a day. Try a walk.", False), ("I can't recommend it enough!", False),
        ("As an aid, use a list.", False), ("Sorry to hear that. You can help it along.", False), (" \n", True),
    ],
)  # fmt: skip
def test_refusals(text: str, refuses: bool) -> None:
    assert (refusal(text) is not None) == refuses


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("mail a.b+c@x-y.co.uk now", "an e-mail address"), ("call +44 20 7946 0958", "a telephone number"),
        ("call (555) 123-4567", "a telephone number"), ("pay to GB29 NWBK 6016 1331 9268 19", "an account number"),
        ("mine is 078-05-1120", "a social security number"), ("at 192.168.0.1", "an IP address"),
        ("card 4111 1111 1111 1111", "a card number"), ("card 4111 1111 1111 1112", None),
        ("in 2024-05-17 at 10:30, version 1.2.3, 12,000 people, pages 100-200", None), ("3 @ 4 dollars", None),
    ],
)  # fmt: skip
def test_personal_text(text: str, kind: str | None) -> None:
    assert personal_text(text) == kind


def test_near_duplicates_are_those_of_the_exact_similarity() -> None:
    """MinHash must not miss what the definition says, word for word over all pairs of answers."""
    pairs = sample(5, 60)
    near = [
        changed(pair, chosen=pairs[0].chosen.replace("the", "a")) if n % 7 == 3 else pair
        for n, pair in enumerate(pairs)
    ]
    expected: set[str] = set()
    kept: list[frozenset[str]] = []
    for pair in near:
        own = [shingles(pair.chosen), shingles(pair.rejected)]
        if any(similarity(a, b) >= 0.6 for a in own for b in kept):
            expected.add(pair.id)
        else:
            kept += own
    assert find_duplicates(near, least=0.6).keys() == expected
    assert expected


def test_no_person_question_or_answer_is_in_both_parts() -> None:
    pairs = sample(7, 100)
    rows = [pair.comparison.to_row() for pair in pairs]
    for number, row in enumerate(rows):
        row["user_id"] = f"u{number // 2}"
    rows[0]["question"] = rows[99]["question"].replace("?", " please?")
    made = [Pair(prb.Comparison(**row)) for row in rows]
    public, private = split_parts(made, name="x", private_share=0.25, seed=1)
    assert len(private.pairs) + len(public.pairs) == 100
    assert 0 < len(private.pairs) <= 25
    for key in (lambda pair: pair.comparison.user_id, lambda pair: pair.comparison.question):
        assert not set(map(key, public.pairs)) & set(map(key, private.pairs))
    place = {pair.id: part.name for part in (public, private) for pair in part.pairs}
    assert place[made[0].id] == place[made[99].id]
    assert public.canary != private.canary
    assert split_parts(made, name="x", private_share=0.25, seed=1) == (public, private)
    assert split_parts(made, name="x", private_share=0.0, seed=1)[1].pairs == ()


def test_known_test_sets_are_read_from_any_source(tmp_path) -> None:
    path = tmp_path / "known.jsonl"
    path.write_text(
        '{"id": "1", "question": "' + " ".join(f"w{n}" for n in range(14)) + '?", "narrative": "n"}\n'
    )
    known = read_known_texts([str(path)], words=13)
    assert known.source("So: w1 W2 w3 w4 w5 w6 w7 w8 w9 w10 w11 w12, w13!") == str(path)
    assert known.source("w2 w3 w4 w5 w6 w7 w8 w9 w10 w11 w12 w13 w14") is None
    assert np.isclose(len(known.sources), 2)
