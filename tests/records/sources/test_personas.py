"""The generated benchmark: what is promised about it is measured here, on all of its records."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import re
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import scipy.optimize
import scipy.sparse

from prb_jax.errors import DataError, RunError
from prb_jax.records.comparison import Comparison
from prb_jax.records.sources import personas
from prb_jax.records.sources.personas import Personas, serialise
from prb_jax.records.sources.personas.people import POSTS_SHOWN, TASTES
from prb_jax.records.sources.personas.phrases import Slot, compile_template, first_person
from prb_jax.records.sources.personas.pools import load_pools, load_wording

GOLDEN = "327229520ae1e6e6cdc8cdb0b6868f2d106eb12c96836d893bdb5d971b23cf0a"
PERSONAL = ("train", "test-seen", "test-unseen")
GENERIC = ("generic-train", "generic-test")


@pytest.fixture(scope="module")
def benchmark() -> Personas:
    return personas.generate()


def tokens(text: str) -> list[str]:
    return re.findall(r"[a-z0-9']+|[?!:;]", text.lower())


def share_longer(comparisons: tuple[Comparison, ...], length) -> float:
    """How often the chosen response is the longer one; a tie counts half."""
    differences = [np.sign(length(c.responses[0]) - length(c.responses[1])) for c in comparisons]
    return float(np.mean(differences)) / 2 + 0.5


# ---- size, splits, format


def test_parts_have_the_promised_sizes(benchmark):
    assert {part: len(benchmark.parts[part]) for part in personas.PARTS} == {
        "train": 7600, "test-seen": 1200, "test-unseen": 1200, "generic-train": 1500, "generic-test": 500,
        "test-unseen-wording": 1200, "train-more-wording": 3800, "test": 2400, "all": 12000,
    }  # fmt: skip
    assert sum(len(benchmark.parts[part]) for part in PERSONAL) == 10_000
    assert benchmark.parts["test"] == benchmark.parts["test-seen"] + benchmark.parts["test-unseen"]
    assert len({c.id for c in benchmark.parts["all"]}) == 12_000


def test_people_and_domains(benchmark):
    users = {part: {c.user_id for c in benchmark.parts[part]} for part in (*PERSONAL, *GENERIC)}
    assert len(users["train"]) == 40
    assert users["test-seen"] == users["train"] == users["generic-train"]
    assert len(users["test-unseen"]) == 10
    assert not users["test-unseen"] & users["train"]
    assert users["generic-test"] == users["train"] | users["test-unseen"]
    for part in (*PERSONAL, *GENERIC):
        assert len({c.category for c in benchmark.parts[part]}) == 13
    per_user = Counter(c.user_id for part in PERSONAL for c in benchmark.parts[part])
    # every person has a training or test-unseen load like any other's
    for part in PERSONAL:
        loads = Counter(c.user_id for c in benchmark.parts[part]).values()
        assert max(loads) - min(loads) <= 4
    assert min(per_user.values()) >= 100


def test_topics_of_training_and_test_are_disjoint(benchmark):
    pools = load_pools()
    train, test = pools.topics_of("train"), pools.topics_of("test")
    assert len(train) == 117
    assert len(test) == 39
    assert not {t.thing for t in train} & {t.thing for t in test}
    assert not {t.goal for t in train} & {t.goal for t in test}
    asked = {part: {c.question for c in benchmark.parts[part]} for part in (*PERSONAL, *GENERIC)}
    for seen in ("train", "generic-train"):
        for other in ("test-seen", "test-unseen", "generic-test"):
            assert not asked[seen] & asked[other]


def test_records_are_complete_and_survive_a_file(benchmark):
    seen, unseen, generic = "personal-seen", "personal-unseen", "generic"
    assert {part: {c.subset for c in comparisons} for part, comparisons in benchmark.parts.items()} == {
        "train": {seen}, "test-seen": {seen}, "test-unseen": {unseen}, "test": {seen, unseen},
        "generic-train": {generic}, "generic-test": {generic}, "all": {seen, unseen, generic},
        "test-unseen-wording": {"personal-unseen-wording"}, "train-more-wording": {seen},
    }  # fmt: skip
    for c in benchmark.parts["all"]:
        assert len(c.profile) == POSTS_SHOWN
        assert len({post.id for post in c.profile}) == POSTS_SHOWN
        assert all(post.category and post.id.startswith(f"{c.user_id}-") for post in c.profile)
        assert c.rubric_aspects
        assert c.narrative
    for c in benchmark.parts["all"][::97]:
        assert Comparison.from_row(json.loads(json.dumps(c.to_row())), where="row") == c


# ---- other people in other words

WORDING = "test-unseen-wording"
MORE = "train-more-wording"


def test_strangers_are_nobody_else(benchmark):
    records = benchmark.parts[WORDING]
    users = {c.user_id for c in records}
    assert users == {f"persona-{number}" for number in range(51, 61)}
    assert not users & {c.user_id for c in benchmark.parts["all"]}
    assert not {c.id for c in records} & {c.id for c in benchmark.parts["all"]}
    loads = Counter(c.user_id for c in records).values()
    assert max(loads) - min(loads) <= 4
    assert len({c.category for c in records}) == 13
    for c in records:
        assert len(c.profile) == POSTS_SHOWN
        assert all(post.id.startswith(f"{c.user_id}-") for post in c.profile)
    assert share_longer(records, len) == pytest.approx(0.5, abs=0.03)


def test_new_wording_occurs_in_no_other_part(benchmark):
    """Neither a sentence, nor any four words in a row of a sentence that are not filled in from the topic."""

    def sentences(comparisons):
        texts = {text for c in comparisons for text in c.responses} | {c.question for c in comparisons}
        texts |= {post.text for c in comparisons for post in c.profile}
        return {s.strip().lower() for text in texts for s in re.split(r"[.?!]", text) if s.strip()}

    def fours(texts):
        words = [re.findall(r"[a-z']+", text.lower()) for text in texts]
        return {tuple(line[i : i + 4]) for line in words for i in range(len(line) - 3)}

    # the words of some generic answers are mixed up on purpose, which may give any four in a row
    others = sentences([c for part in (*PERSONAL, MORE) for c in benchmark.parts[part]])
    new = sentences(benchmark.parts[WORDING])
    topics = {t.woe.lower() for t in load_pools().topics_of("test")}  # what is wrong comes from the topic
    assert new & (others | sentences(benchmark.parts["all"])) <= topics
    pools = load_wording("new")
    templates = [*pools.questions, *pools.neutral, *pools.contexts]
    templates += [t for axis in pools.axes for pole in axis.poles for t in (*pole.sentences, *pole.posts)]
    assert len(templates) == 28 + 16 * 12 == len({t.source for t in templates})
    literal = fours(part for t in templates for part in t.parts if isinstance(part, str))
    assert len(literal) > 900
    assert not literal & fours(others)


def test_more_wording_has_the_people_and_topics_of_training_in_further_sentences(benchmark):
    train, more = benchmark.parts["train"], benchmark.parts[MORE]
    assert {c.user_id for c in more} == {c.user_id for c in train}
    assert {c.category for c in more} == {c.category for c in train}
    said = [{post.text for c in part for post in c.profile} for part in (train, more)]
    assert not said[0] & said[1]
    assert not {p.id for c in train for p in c.profile} & {p.id for c in more for p in c.profile}
    assert share_longer(more, len) == pytest.approx(0.5, abs=0.02)
    check_texts(more)
    assert benchmark.ceilings[MORE].persona_aware == 0.98


def test_the_words_of_the_new_wording_are_mostly_those_of_more_wording(benchmark):
    """What the documentation says: its sentences are new, most of its words are not."""

    def literal(name):
        pools = load_wording(name) if name else load_pools()
        templates = [t for axis in pools.axes for pole in axis.poles for t in (*pole.sentences, *pole.posts)]
        parts = [part for t in templates for part in t.parts if not isinstance(part, Slot)]
        texts = [text for part in parts for text in ([part] if isinstance(part, str) else part)]
        return {word for text in texts for word in re.findall(r"[a-z]+", text.lower())}

    new, base, more = literal("new"), literal(""), literal("more")
    assert len(new & base) / len(new) == pytest.approx(0.47, abs=0.005)
    assert len(new & (base | more)) / len(new) == pytest.approx(0.87, abs=0.005)


# ---- what can be reached


def test_user_blind_accuracy_is_bounded(benchmark):
    for ceiling in benchmark.ceilings.values():
        assert 0.5 <= ceiling.user_blind_expected <= ceiling.user_blind <= 0.58


def test_popular_taste_is_worth_little_on_new_topics(benchmark):
    """The best rule that sees only which poles the two answers show, fitted to the very records."""
    for records in (*(benchmark.parts[part] for part in PERSONAL), benchmark.parts["test"]):
        styles: dict[tuple[int, ...], Counter[bool]] = {}
        for record in records:
            chosen = benchmark.levels[record.id]
            opposite = tuple(-level for level in chosen)
            styles.setdefault(max(chosen, opposite), Counter())[chosen > opposite] += 1
        right = sum(max(votes.values()) for votes in styles.values())
        assert 0.5 <= right / len(records) <= 0.56


def test_user_blind_ceiling_counts_the_votes_on_each_pair_of_texts(benchmark):
    """The bound, computed anew and in another way: no text pair may favour one side by more."""
    for part in PERSONAL:
        wins: dict[frozenset[str], Counter[str]] = {}
        for c in benchmark.parts[part]:
            wins.setdefault(frozenset(c.responses), Counter())[c.responses[0]] += 1
        best = sum(max(votes.values()) for votes in wins.values()) / len(benchmark.parts[part])
        assert best == benchmark.ceilings[part].user_blind
        assert {sum(votes.values()) for votes in wins.values()} == {2, 3}
        # a response stands in one pair only, so that the pairs are judged independently
        assert sum(map(len, wins)) == len({text for pair in wins for text in pair})


@pytest.fixture(scope="module")
def people(benchmark):
    return {person.id: person for person in benchmark.people}


def test_tastes_decide(benchmark, people):
    for part in (*PERSONAL, WORDING):
        chosen = [people[c.user_id].leaning(benchmark.levels[c.id]) > 0 for c in benchmark.parts[part]]
        assert np.mean(chosen) == benchmark.ceilings[part].persona_aware == 0.98
    assert benchmark.ceilings["personal"].persona_aware == 0.98


def test_tastes_are_balanced_and_told_apart(benchmark):
    tastes = np.array([person.tastes for person in benchmark.people])
    assert tastes.shape == (60, 8)
    assert len(np.unique(tastes, axis=0)) == 60
    assert set(np.abs(tastes).sum(axis=1)) == {TASTES}
    for crowd in (tastes[:40], tastes[40:50], tastes[50:]):
        assert len(set(np.abs(crowd).sum(axis=0))) == 1
        assert (np.abs(crowd.sum(axis=0)) <= 2).all()
    together = tastes[:40].T @ tastes[:40]
    np.fill_diagonal(together, 0)
    assert np.abs(together).max() <= 4  # of about 9 people who care about both


def test_profile_shows_every_taste_and_nothing_else(benchmark, people):
    for c in benchmark.parts["all"]:
        person = people[c.user_id]
        assert {person.axis_of[post.id] for post in c.profile} == set(person.cares)


def test_profile_does_not_quote_the_responses(benchmark):
    def sentences(text):
        return {s for s in re.split(r"(?<=[.!?]) ", text) if len(s.split()) > 3}

    said = {s for c in benchmark.parts["all"] for post in c.profile for s in sentences(post.text)}
    answered = {s for c in benchmark.parts["all"] for text in c.responses for s in sentences(text)}
    assert not said & answered


@pytest.mark.parametrize("length", [len, lambda text: len(text.split()), lambda text: len(tokens(text))])
def test_length_is_uninformative(benchmark, length):
    for part in (*PERSONAL, *GENERIC, "all"):
        assert share_longer(benchmark.parts[part], length) == pytest.approx(0.5, abs=0.02), part


def test_nothing_else_about_the_record_is_informative(benchmark):
    """Every pair of texts is met in both orders, and neither text is told from the other by its kind."""
    pairs = Counter(c.responses for c in benchmark.parts["train"])
    both = sum((second, first) in pairs for first, second in pairs)
    assert both / len(pairs) > 0.9
    chosen, rejected = (
        Counter(c.responses[side].split()[0] for c in benchmark.parts["train"]) for side in (0, 1)
    )
    apart = sum(abs(chosen[word] - rejected[word]) for word in chosen | rejected)
    assert apart / (2 * len(benchmark.parts["train"])) < 0.06


# ---- linear models: what is learnable with and without the user


def indicators(texts: list[str], vocabulary: dict[str, int]) -> scipy.sparse.csr_matrix:
    """Whether each text has each word."""
    places = [
        (n, vocabulary[word])
        for n, text in enumerate(texts)
        for word in set(tokens(text)) & vocabulary.keys()
    ]
    return scipy.sparse.csr_matrix((np.ones(len(places)), np.array(places).T), (len(texts), len(vocabulary)))


def fit(features: scipy.sparse.csr_matrix, *, l2: float) -> np.ndarray:
    """Bradley-Terry on feature differences (chosen minus rejected)."""

    def loss(weights):
        margin = features @ weights
        gradient = -(features.T @ (1 / (1 + np.exp(margin)))) + l2 * weights
        return np.logaddexp(0, -margin).sum() + l2 / 2 * weights @ weights, gradient

    start = np.zeros(features.shape[1])
    return scipy.optimize.minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 60}).x


def vocabulary_of(texts) -> dict[str, int]:
    """The words of 20 texts or more, numbered."""
    words = Counter(word for text in texts for word in set(tokens(text)))
    return {word: i for i, word in enumerate(sorted(word for word, n in words.items() if n >= 20))}


@pytest.fixture(scope="module")
def differences(benchmark):
    vocabulary = vocabulary_of(text for c in benchmark.parts["train"] for text in c.responses)

    def of(part):
        chosen, rejected = ([c.responses[side] for c in benchmark.parts[part]] for side in (0, 1))
        return indicators(chosen, vocabulary) - indicators(rejected, vocabulary)

    return of


@pytest.mark.parametrize(
    ("train", "l2", "tests", "least", "most"),
    [
        ("train", 3.0, ("test-seen", "test-unseen"), 0.45, 0.58),
        ("generic-train", 1.0, ("generic-test",), 0.95, 1.0),
    ],
)
def test_bag_of_words_without_the_user_tells_generic_quality_alone(
    differences, train, l2, tests, least, most
):
    weights = fit(differences(train), l2=l2)
    for part in tests:
        assert least < np.mean(differences(part) @ weights > 0) <= most


@pytest.fixture(scope="module")
def posts(benchmark):
    vocabulary = vocabulary_of(post.text for c in benchmark.parts["train"] for post in c.profile)

    def of(part):
        texts = [" ".join(post.text for post in c.profile) for c in benchmark.parts[part]]
        return indicators(texts, vocabulary)

    return of


def test_tastes_can_be_read_from_posts_and_poles_from_answers(benchmark, people, posts, differences):
    """Linear in the words on both sides, and their product decides about people never met."""

    def ridge(features, targets):
        gram = (features.T @ features).toarray() + 10 * np.eye(features.shape[1])
        return np.linalg.solve(gram, features.T @ targets)

    train = benchmark.parts["train"]
    from_posts = ridge(posts("train"), np.array([people[c.user_id].tastes for c in train], float))
    from_answers = ridge(differences("train"), np.array([benchmark.levels[c.id] for c in train], float))
    for part in ("test-seen", "test-unseen"):
        agreement = (posts(part) @ from_posts) * (differences(part) @ from_answers)
        assert np.mean(agreement.sum(axis=1) > 0) > 0.95


def test_choices_alone_teach_how_posts_and_answers_go_together(posts, differences):
    """Two passes of Bradley-Terry, bilinear in the words, fitted to nothing but who chose what."""
    rng = np.random.default_rng(0)
    shown, margin = posts("train"), differences("train")
    frequency = np.asarray(shown.mean(axis=0)).ravel()
    rarity = np.log(1 / frequency)
    weights = [rng.normal(0, 0.05, (x.shape[1], 16)) for x in (shown, margin)]
    first, second = ([np.zeros_like(w) for w in weights] for _ in range(2))
    shown = scipy.sparse.csr_matrix(shown.multiply(rarity))
    step = 0
    for _ in range(2):
        for rows in np.array_split(rng.permutation(shown.shape[0]), shown.shape[0] // 64):
            step += 1
            person, answer = shown[rows] @ weights[0], margin[rows] @ weights[1]
            pull = -1 / (1 + np.exp((person * answer).sum(axis=1, keepdims=True))) / len(rows)
            gradients = shown[rows].T @ (pull * answer), margin[rows].T @ (pull * person)
            for w, m, v, g in zip(weights, first, second, gradients, strict=True):  # Adam
                m += 0.1 * (g - m)
                v += 0.001 * (g * g - v)
                w -= 3e-3 * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)
    for part in ("test-seen", "test-unseen"):
        person, answer = posts(part).multiply(rarity) @ weights[0], differences(part) @ weights[1]
        assert np.mean((person * answer).sum(axis=1) > 0) > 0.85


# ---- the text


def test_texts_are_varied(benchmark):
    everything = benchmark.parts["all"]
    responses = Counter(text for c in everything for text in set(c.responses))
    distinct = set(responses)
    assert len(distinct) >= 13_000
    assert max(responses.values()) <= 3
    sentences = [s for text in distinct for s in re.split(r"(?<=[.!?]) ", text)]
    assert len(set(sentences)) >= 25_000
    assert Counter(sentences).most_common(1)[0][1] / len(sentences) < 0.005
    words = [word for text in distinct for word in tokens(text)]
    assert len(set(words)) >= 3_000
    assert len({c.question for c in everything}) >= 3_000
    assert len({post.text for c in everything for post in c.profile}) >= 3_500


def test_texts_are_short_enough_for_small_models(benchmark):
    everything = benchmark.parts["all"]
    lengths = [len(text.split()) for c in everything for text in c.responses]
    assert 40 <= np.mean(lengths) <= 60
    assert max(lengths) <= 100
    posts = [len(post.text.split()) for c in everything for post in c.profile]
    assert min(posts) >= 8
    assert 15 <= np.mean(posts) <= 40
    assert max(posts) <= 60


def check_texts(comparisons):
    for c in comparisons:
        good = c.responses[:1] if c.subset == "generic" else c.responses
        for text in (c.question, *good, c.narrative, *(post.text for post in c.profile)):
            assert not re.search(r"[\[\]{}|]|  | [.,;:!?]|\.\.|[.!?][A-Za-z]", text), text
            assert text[0].isupper() or text[0].isdigit()
            assert text[-1] in ".!?", text
            assert not re.search(r"(?:[.!?] )[a-z]", text), text
            assert not re.search(r"\b(\w+) \1\b", text.replace("that that", "")), text


def test_texts_are_well_formed_and_no_sentence_is_repeated_within_an_answer(benchmark):
    check_texts(benchmark.parts["all"])
    for c in benchmark.parts["all"]:
        texts = c.responses[:1] if c.subset == "generic" else c.responses
        for text in texts:
            sentences = re.split(r"(?<=[.!?]) ", text)
            assert len(sentences) == len(set(sentences))


# ---- reasons


def test_reasons_agree_with_the_label(benchmark, people):
    axes = load_pools().axes
    slips = 0
    for c in (c for part in PERSONAL for c in benchmark.parts[part]):
        person, levels = people[c.user_id], benchmark.levels[c.id]
        shown = {post.text for post in c.profile}
        assert all(aspect.evidence in shown for aspect in c.rubric_aspects)
        slip = person.leaning(levels) < 0
        slips += slip
        deciding = [axis for axis in person.cares if levels[axis]]
        for axis, aspect in zip(deciding, c.rubric_aspects, strict=False):
            wanted, other = axes[axis].pole(person.tastes[axis]), axes[axis].pole(-person.tastes[axis])
            assert aspect.aspect == wanted.label
            if slip:
                assert aspect.reason.startswith(f"A slip: the rejected answer {wanted.trait}")
                assert "this once" in c.narrative
            else:
                assert aspect.reason == f"The chosen answer {wanted.trait}; the other one {other.trait}."
                assert "this once" not in c.narrative
            assert wanted.wish in c.narrative
        for aspect in c.rubric_aspects[len(deciding) :]:
            assert "does not decide" in aspect.reason
    assert slips == 200


def test_generic_reasons_name_the_flaw(benchmark):
    traits = set()
    for part in GENERIC:
        for c in benchmark.parts[part]:
            (aspect,) = c.rubric_aspects
            trait = aspect.reason.split("the other one ")[1].rstrip(".")
            assert trait in c.narrative
            traits.add(trait)
    assert len(traits) == 9


# ---- the same everywhere


def test_golden_bytes(benchmark):
    assert hashlib.sha256(serialise(benchmark.parts["all"])).hexdigest() == GOLDEN


@pytest.mark.slow
def test_generation_is_repeatable_in_another_process():
    code = (
        "import hashlib; from prb_jax.records.sources import personas;"
        "print(hashlib.sha256(personas.serialise(personas.load('all'))).hexdigest())"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"}
    )
    assert run.stdout.strip() == GOLDEN


@pytest.mark.slow
def test_another_seed_keeps_the_promises(benchmark):
    other = personas.generate(3)
    with pytest.raises(ValueError, match="found -1"):
        personas.generate(-1)
    assert other.parts["train"] != benchmark.parts["train"]
    assert len(other.parts["all"]) == 12_000
    assert other.ceilings["personal"].user_blind <= 0.58
    assert other.ceilings["personal"].persona_aware == 0.98
    assert share_longer(other.parts["all"], len) == pytest.approx(0.5, abs=0.02)


def test_load_gives_fresh_lists_and_knows_its_parts():
    assert personas.load("generic-test") is not personas.load("generic-test")
    assert len(personas.load()) == 2400
    with pytest.raises(DataError, match=r"no part 'validation'; expected one of train, test-seen"):
        personas.load("validation")


def test_write_is_deterministic_and_readable(tmp_path, benchmark, monkeypatch):
    few = dataclasses.replace(benchmark, parts={part: cs[:50] for part, cs in benchmark.parts.items()})
    monkeypatch.setattr(personas, "generate", lambda seed: few)
    (tmp_path / "taken").write_text("")
    with pytest.raises(RunError, match="cannot write"):
        personas.write(tmp_path / "taken")
    paths = personas.write(tmp_path / "one")
    again = personas.write(tmp_path / "two")
    assert list(paths) == [*PERSONAL, *GENERIC, WORDING, MORE]
    for part, path in paths.items():
        assert path.read_bytes() == again[part].read_bytes()
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        read = [Comparison.from_row(row, where=path.name) for row in rows]
        assert tuple(read) == few.parts[part]
    assert sorted(p.name for p in (tmp_path / "one").iterdir()) == sorted(p.name for p in paths.values())


# ---- the notation of the templates


def test_template_notation_and_the_first_person():
    template = compile_template("[One|Two] {Fact} of {s}.")
    assert (template.tasks, template.parts[0]) == (("s",), ("One", "Two"))
    for task, expected in (
        ("read your notes", "read my notes"),
        ("stop before you are full", "stop before I am full"),
        ("stand with the sun behind you", "stand with the sun behind me"),
        ("teach it to yourself", "teach it to myself"),
        ("draw what you need", "draw what I need"),
        ("water the soil", "water the soil"),
    ):
        assert first_person(task) == expected


def test_every_topic_can_fill_every_sentence():
    pools = load_pools()
    slots = {"thing", "goal", "woe", "trap", "fact", "s", "t", "m", "x"}
    for topic in pools.topics:
        assert len(topic.tasks) == 5
        assert len(topic.impersonal) >= 2
    for template in (
        *pools.questions,
        *pools.neutral,
        *pools.contexts,
        *(t for axis in pools.axes for pole in axis.poles for t in (*pole.sentences, *pole.posts)),
        *(t for flaw in pools.flaws for t in flaw.sentences),
    ):
        for part in template.parts:
            if not isinstance(part, str | tuple):
                assert part.name in slots or all(part.name in topic.phrases for topic in pools.topics)
