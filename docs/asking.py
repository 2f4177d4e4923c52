"""How fast a person is known when questions are chosen by a rule, as a table.

    python docs/asking.py [PEOPLE]

People have planted tastes, a common direction in six dimensions and an own one, and answer without noise. A method is
fitted on 60 of them. Each new person answers ten questions of a pool of 40, chosen by `prb.ask`, by the rule of PReF or
at random; then the method predicts 60 other choices of the same person.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import prb_jax as prb
from prb_jax.personal.embedder import Advance, Embedded
from prb_jax.personal.saved import read_fitted
from prb_jax.scoring.personalised import PersonalisedModel
from prb_jax.study.write_features import write_features

WIDTH, RESPONSES, ANSWERS, POOL, KEPT = 6, 400, (1, 2, 4, 7, 10), 40, 60
RULES = ("at random", "rule of PReF", "expected information")
RNG = np.random.default_rng(0)
# Responses lie near the origin or far from it, so that some questions tell more than others.
TABLE = (RNG.standard_normal((RESPONSES, WIDTH)) * RNG.uniform(0.2, 2, (RESPONSES, 1))).astype(np.float32)
COMMON = RNG.standard_normal(WIDTH)


class Planted:
    """Features that know the plan: the response "r12" has the twelfth row of a table."""

    name, width, gives_rewards = "planted", WIDTH, False

    def identity(self) -> dict[str, Any]:
        """Return what decides the features."""
        return {"planted": RESPONSES}

    def answers(self, comparisons: Sequence[prb.Comparison], *, advance: Advance) -> Embedded:
        """Return the rows of the responses."""
        return self.posts([one.responses[0] for one in comparisons], advance=advance)

    def posts(self, texts: Sequence[str], *, advance: Advance) -> Embedded:
        """Return the rows of the texts."""
        return Embedded(TABLE[[int(text[1:]) for text in texts]], 0)


def choices(user: str, taste: np.ndarray, count: int, rng: np.random.Generator) -> list[prb.Comparison]:
    """Return comparisons of one person, the preferred response as "chosen"."""
    comparisons = []
    for number in range(count):
        first, second = (int(row) for row in rng.choice(RESPONSES, 2, replace=False))
        best, worst = (first, second) if TABLE[first] @ taste > TABLE[second] @ taste else (second, first)
        names = {"chosen": f"r{best}", "rejected": f"r{worst}"}
        comparisons.append(
            prb.Comparison(id=f"{user}-{number}", user_id=user, question="Which one?", **names)
        )
    return comparisons


def mean_accuracy(model: PersonalisedModel, person: int, rule: str) -> list[float]:
    """Return the accuracy on the kept choices of a person after each number of answers."""
    rng = np.random.default_rng([1, person])
    taste = COMMON + 2 * rng.standard_normal(WIDTH)
    known = choices("new", taste, POOL + KEPT, rng)
    pool, kept = known[:POOL], known[POOL:]
    answers, accuracies = list[prb.Comparison](), list[float]()
    while len(answers) < ANSWERS[-1]:
        left = [one for one in pool if one not in answers]
        best = left[int(rng.integers(len(left)))].id
        if rule != RULES[0]:
            asked = prb.ask(model, user=answers or None, candidates=pool)  # one size: compiled once
            value = (lambda q: q.pref_rule or 0.0) if rule == RULES[1] else (lambda q: q.information)
            open_ = {one.id for one in left}
            best = max((question for question in asked if question.id in open_), key=value).id
        answers.append(next(one for one in left if one.id == best))
        if len(answers) in ANSWERS:
            model.adapt("new", answers)
            scores = model.score(kept, user="new")
            accuracies.append(float(np.mean([row[0] > row[1] for row in scores])))
    return accuracies


def main(people: int) -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        rng, out = np.random.default_rng(2), Path(folder)
        seen = [
            one
            for user in range(60)
            for one in choices(f"seen {user}", COMMON + 2 * rng.standard_normal(WIDTH), 24, rng)
        ]
        write_features(Planted(), seen, out=out / "features", progress=False)
        prb.personalise(
            seen,
            backbone=out / "features",
            out=out / "study",
            methods=["pref"],
            shots=(8,),
            split="other-question",
            progress=False,
        )
        model = PersonalisedModel(read_fitted(out / "study" / "fitted" / "pref"), Planted())
    print(
        "| questions chosen by | "
        + " | ".join(f"{count} answer{'s' * (count > 1)}" for count in ANSWERS)
        + " |"
    )
    print("|---" * (len(ANSWERS) + 1) + "|")
    for rule in RULES:
        accuracies = np.array([mean_accuracy(model, person, rule) for person in range(people)])
        error = 1.96 * accuracies.std(0, ddof=1) / np.sqrt(people)
        cells = [f"{mean:.3f} ± {half:.3f}" for mean, half in zip(accuracies.mean(0), error, strict=True)]
        print(f"| {rule} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
