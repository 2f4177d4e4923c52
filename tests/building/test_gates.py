"""Every gate finds the fault that was planted for it, in pairs of the generated personas, and is quiet otherwise."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from scipy.special import ndtri

import prb_jax as prb
from prb_jax.building.gates.faults import (
    KnownTexts,
    find_copied_aspects,
    find_duplicates,
    find_overlaps,
    find_personal_texts,
    find_refusals,
    find_truncations,
    personal_text,
    read_known_texts,
    refusal,
    run_keys,
    shingles,
    similarity,
)
from prb_jax.building.gates.gate import CANNOT_TELL, LEAK_FOUND, SOUND, GateFigure, GateResult, Pair
from prb_jax.building.gates.judged import measure_blind_judge, measure_blind_rewards
from prb_jax.building.gates.surface import measure_histogram, measure_length, measure_style
from prb_jax.building.gating import run_gates
from prb_jax.building.product import split_parts
from prb_jax.building.settings import GATES, BuildSettings, GateSettings
from prb_jax.records.comparison import Message, RubricAspect
from prb_jax.records.sources import personas
from prb_jax.scoring.remote.endpoint import Reply
from tests.json_lines import write_lines

SETTINGS = GateSettings()
COUNT = 240
TRIALS = 30
MEASURES = {"length": measure_length, "style": measure_style, "style-histogram": measure_histogram}


@cache
def everything() -> tuple[Pair, ...]:
    """Pairs whose answers occur in no other pair; on each side both poles of a taste are as frequent."""
    seen: set[str] = set()
    pairs = []
    for comparison in personas.load("train"):
        if not seen & set(comparison.responses):
            seen |= set(comparison.responses)
            pairs.append(Pair(comparison))
    return tuple(pairs)


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


def blind_verdicts(pairs: Sequence[Pair], seed: int, bias: float = 0.5) -> dict[str, float]:
    draws = random.Random(seed)
    return {pair.id: float(draws.random() < bias) for pair in pairs}


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
    assert not [name for name, reasons in quiet.items() if len(reasons) > 0.05 * len(clean)]

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
            reasons = finder(made)
            if name == fault:
                assert hit - reasons.keys() <= ({made[0].id} if fault == "duplicates" else set()), fault
            elif name != "duplicates" or fault not in ("refusals", "overlap"):  # the same text
                assert reasons.keys() <= quiet[name].keys(), (name, fault)


@pytest.mark.slow
def test_gates_of_all_pairs_find_their_own_fault_and_raise_few_false_alarms() -> None:
    alarms = Counter[str]()
    for seed in range(TRIALS):
        # who likes which of two answers is a coin here: nothing can tell
        draws = random.Random(seed)
        pairs = [
            changed(pair, chosen=pair.rejected, rejected=pair.chosen) if draws.random() < 0.5 else pair
            for pair in sample(seed, 120)
        ]
        blind = partial(measure_blind_judge, shares=blind_verdicts(pairs, seed))
        for name, measure in {**MEASURES, "blind-judge": blind}.items():
            alarms[name] += not measure(pairs, gates=SETTINGS).passed
    assert all(count <= 0.05 * TRIALS for count in alarms.values()), alarms

    pairs = sample(99)
    end = "It is worth trying that once, I would say."
    extended = [changed(pair, chosen=f"{pair.chosen} {end}") for pair in pairs]
    assert not measure_length(extended, gates=SETTINGS).passed
    assert not measure_style(extended, gates=SETTINGS).passed
    listed, _ = some(pairs, lambda pair: changed(pair, rejected=pair.rejected.replace(". ", ".\n- ")), 0.5)
    figure = measure_style(listed, gates=SETTINGS)
    assert not figure.passed
    assert "'list items'" in figure.note
    before, after = (measure_length(some_pairs, gates=SETTINGS).value for some_pairs in (pairs, listed))
    assert after == pytest.approx(before, abs=0.4)
    wrapped = [changed(pair, chosen=f"Assistant: {pair.chosen}") for pair in pairs]
    assert "the name of a role" in measure_style(wrapped, gates=SETTINGS).note
    assert not measure_blind_judge(pairs, blind_verdicts(pairs, 0, bias=0.7), gates=SETTINGS).passed
    wins = {"m": dict.fromkeys((pair.id for pair in pairs), 0.5), "n": {pair.id: 1.0 for pair in pairs}}
    figure = measure_blind_rewards(pairs, wins, gates=SETTINGS)
    assert (figure.passed, figure.note) == (False, "m 0.500, n 1.000")
    assert measure_blind_rewards(pairs, {"m": wins["m"]}, gates=SETTINGS).passed
    few = [pair for pair in pairs if pair.comparison.user_id == pairs[0].comparison.user_id]
    assert "no interval: 1 user;" in measure_length(few, gates=SETTINGS).note


def flipped(
    seed: int, leak: float, has: Callable[[Pair], float], *, count: int, shared: float = 0.0
) -> list[Pair]:
    """Pairs in whose choice nothing shows but that the answer with more of something is chosen in 0.5 + leak.

    Args:
      has: 1 where the chosen answer has more of it, -1 where it has less, else 0.
      shared: correlation of normal numbers of one user, whose signs say whether a pair follows the leak.
    """
    pairs, draws = sample(seed, count), np.random.default_rng(seed)
    sides = np.array([has(pair) for pair in pairs])
    users = np.unique([str(pair.comparison.user_id) for pair in pairs], return_inverse=True)[1]
    normal = np.sqrt(shared) * draws.standard_normal(users.max() + 1)[users]
    normal += np.sqrt(1 - shared) * draws.standard_normal(count)
    leaks = normal < ndtri(0.5 + leak / np.mean(sides != 0))
    return [
        changed(pair, chosen=pair.rejected, rejected=pair.chosen) if follows != (side >= 0) else pair
        for pair, follows, side in zip(pairs, leaks, sides, strict=True)
    ]


def longer(pair: Pair) -> float:
    return float(np.sign(len(pair.chosen.split()) - len(pair.rejected.split())))


def verdict(name: str, figure: GateFigure) -> str:
    return GateResult(name, "", None, figure).verdict


def named_and_found(
    name: str, has: Callable[[Pair], float], *, named: int, trials: int, shared: float = 0.0
) -> tuple[float, float]:
    """The smallest leak that a gate names of some pairs, and how often it finds one of this size in others."""

    def figure(seed: int, leak: float) -> GateFigure:
        return MEASURES[name](flipped(seed, leak, has, count=COUNT, shared=shared), gates=SETTINGS)

    leaks = [figure(1000 + seed, 0.0).leak for seed in range(named)]
    leak = float(np.mean([leak.detectable for leak in leaks if leak is not None and leak.detectable]))
    verdicts = [verdict(name, figure(seed, leak)) for seed in range(trials)]
    return leak, verdicts.count(LEAK_FOUND) / trials


def test_a_gate_of_few_pairs_does_not_say_that_a_benchmark_is_sound() -> None:
    """Of 60 pairs the chosen answer is longer in 60 %: most builds find nothing, and none is called sound."""
    said = Counter(
        verdict("length", measure_length(flipped(seed, 0.1, longer, count=60), gates=SETTINGS))
        for seed in range(60)
    )
    assert said[CANNOT_TELL] >= 45, said
    assert said[SOUND] <= 3, said  # two one-sided tests at 0.05
    large = [measure_length(flipped(seed, 0.0, longer, count=1200), gates=SETTINGS) for seed in range(2)]
    assert [verdict("length", figure) for figure in large] == [SOUND] * 2
    strict = replace(SETTINGS, require_sound=True)
    assert not measure_length(flipped(0, 0.0, longer, count=60), gates=strict).passed


@pytest.mark.parametrize("shared", [0.0, 0.3])
def test_the_smallest_leak_that_is_found_is_found_four_times_in_five(shared: float) -> None:
    """By planting leaks of the size that the gate names, in other pairs than those from which it named it."""
    leak, share = named_and_found("length", longer, named=20, trials=100, shared=shared)
    assert 0.1 < leak < 0.3
    assert share == pytest.approx(0.8, abs=0.12), leak  # three Monte Carlo errors


@pytest.mark.slow
def test_gates_of_the_surface_hold_their_level_and_find_the_leaks_that_they_name() -> None:
    alarms = Counter[str]()
    for seed in range(400):
        pairs = flipped(seed, 0.0, longer, count=120)
        alarms.update(name for name, measure in MEASURES.items() if not measure(pairs, gates=SETTINGS).passed)
    # 1 in 100 two-sided is 4, 1 in 200 one-sided is 2; three Monte Carlo errors above
    assert alarms["length"] <= 10, alarms
    assert max(alarms["style"], alarms["style-histogram"]) <= 6, alarms

    middle = np.median([len(text.split()) for pair in everything() for text in (pair.chosen, pair.rejected)])

    def nearer(pair: Pair) -> float:
        far = [abs(len(text.split()) - middle) for text in (pair.chosen, pair.rejected)]
        return float(np.sign(far[1] - far[0]))

    for name, has in (("style", longer), ("style-histogram", nearer)):
        leak, share = named_and_found(name, has, named=10, trials=150)
        assert share == pytest.approx(0.8, abs=0.1), (name, leak, share)


def test_what_is_chosen_between_two_limits_is_found() -> None:
    """The chosen answers have 60 to 70 words, the rejected ones fewer or more: no side is the longer one."""
    draws = random.Random(0)

    def words(count: int) -> str:
        letters = ("".join(draws.choices("aeioubdfgklmnprstv", k=draws.randint(2, 10))) for _ in range(count))
        return " ".join(letters).capitalize() + "."

    def of_length(pair: Pair) -> Pair:
        other = draws.randint(45, 59) if draws.random() < 0.5 else draws.randint(71, 85)
        return changed(pair, chosen=words(draws.randint(60, 70)), rejected=words(other))

    pairs = [of_length(pair) for pair in sample(0, 60)]
    assert measure_length(pairs, gates=SETTINGS).passed
    figure = measure_histogram(pairs, gates=SETTINGS)
    assert verdict("style-histogram", figure) == LEAK_FOUND
    assert "'words'" in figure.note


def test_a_name_of_two_words_in_every_chosen_answer_is_found() -> None:
    aspects = (RubricAspect("Local food", "", ""),)
    pairs = [changed(pair, chosen=f"{pair.chosen} It is local food.") for pair in sample(4, 100)]
    pairs = [replace(pair, comparison=replace(pair.comparison, rubric_aspects=aspects)) for pair in pairs]
    assert len(find_copied_aspects(pairs, words=5)) == 100
    asked = (Message("user", "Which local food?"),)
    pairs = [replace(pair, comparison=replace(pair.comparison, prompt=asked)) for pair in pairs]
    assert not find_copied_aspects(pairs, words=5)


class Knowing:
    """A judge on this machine who finds the answer that the person likes where aspects are shown."""

    def __init__(self, liked: set[str]) -> None:
        self.liked = liked

    def identity(self) -> dict[str, str]:
        return {"name": "knowing"}

    def replies(self, conversations: Sequence[Sequence[Message]], **options: Any) -> list[Reply]:
        replies = []
        for (message,) in conversations:
            a = message.content.partition("Answer A:\n")[2].partition("\n\nAnswer B:")[0]
            # always the first without wishes: no preference in both orders
            second = "serves these wishes" in message.content and a not in self.liked
            replies.append(Reply("B" if second else "A", 1, 1))
        return replies


def test_swapped_labels_are_left_out_by_the_rubric_judge(tmp_path) -> None:
    clean = sample(3, 120)
    swapped, hit = some(clean, lambda pair: changed(pair, chosen=pair.rejected, rejected=pair.chosen), 0.1)
    relax = ("length", "style", "style-histogram", "overlap", "blind-reward")
    settings, judge = BuildSettings(relax=relax), Knowing({pair.chosen for pair in clean})
    run = partial(run_gates, settings=settings, judge=judge, folder=tmp_path)
    gated = run(swapped, swapped, records=len(swapped))
    results = {result.name: result for result in gated.results}
    assert tuple(results) == GATES
    unseparated = {name for name, (gate, _) in gated.dropped.items() if gate == "rubric-judge"}
    others = gated.dropped.keys() - unseparated
    assert unseparated == hit - others
    # the personas do name wishes
    named = {name for name in others if gated.dropped[name][0] == "copied-aspects"}
    assert len(others - named) <= 0.05 * len(clean)
    rubric = results["rubric-judge"]
    assert rubric.before is not None
    assert rubric.before.value == pytest.approx(len(unseparated) / (len(clean) - len(others)))
    assert rubric.after.value == 0.0
    blind = results["blind-judge"]
    assert (blind.after.value, blind.after.n, blind.verdict) == (0.5, len(gated.kept), SOUND)
    assert blind.after.interval == pytest.approx((0.5, 0.5), abs=0.03)  # no pair is decided: few could be
    assert not results["overlap"].after.passed
    gated.check()  # what failed is relaxed
    relaxed = replace(settings, relax=(*relax, "rubric-judge"))
    kept = run(swapped, swapped, records=len(swapped), settings=relaxed).kept
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
    copy = pairs[0].chosen.replace("the", "a")
    near = [changed(pair, chosen=copy) if n % 7 == 3 else pair for n, pair in enumerate(pairs)]
    expected: set[str] = set()
    kept: list[frozenset[str]] = []
    for pair in near:
        answers = [shingles(pair.chosen), shingles(pair.rejected)]
        if any(similarity(a, b) >= 0.6 for a in answers for b in kept):
            expected.add(pair.id)
        else:
            kept += answers
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
    question = " ".join(f"w{n}" for n in range(14)) + "?"
    path = write_lines(tmp_path / "known.jsonl", [{"id": "1", "question": question, "narrative": "n"}])
    known = read_known_texts([path], words=13)
    assert known.source("So: w1 W2 w3 w4 w5 w6 w7 w8 w9 w10 w11 w12, w13!") == path
    assert known.source("w2 w3 w4 w5 w6 w7 w8 w9 w10 w11 w12 w13 w14") is None
    assert len(known.sources) == 2
