"""`prb ask`: choose the next question for a person, by how much its answer reveals about the person's preferences.

    I(q) = sum_a p(a) mean_j KL( p(j | a) || p(j) ),   p(a) = sigmoid(r_u(first) - r_u(second))

The method is adapted to the person's comparisons plus each of the two answers to question q. j runs over the other
candidate questions (at most 64), and p(j) is the probability of preferring the first response of j. I(q) is the
expected information that the answer to q gives about the answers to other questions, in nats (Lindley 1956), for any
method. The rule of PReF (arXiv 2503.06358) is added for the method that defines it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from prb_jax.errors import DataError, RunError, quote
from prb_jax.personal.history import informative_comparisons
from prb_jax.records.comparison import Comparison
from prb_jax.records.files import read_rows
from prb_jax.records.intake import Records, as_comparisons, read_records
from prb_jax.scoring.load import load
from prb_jax.scoring.personalised import PersonalisedModel

POOL: Final = 64  # maximum number of other questions to average over, evenly spaced in the candidates


@dataclass(frozen=True)
class Question:
    """A candidate question and the value of its answer.

    Attributes:
      id: Id of the comparison.
      question: Text of its question.
      responses: Texts of its two responses.
      information: Expected information, in nats.
      probability: Probability that the person prefers the first response.
      of_anybody: The same probability for an unknown person.
      pref_rule: Value of PReF's rule; None for other methods.
    """

    id: str
    question: str
    responses: tuple[str, str]
    information: float
    probability: float
    of_anybody: float
    pref_rule: float | None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a dict."""
        return asdict(self)


def known_of_person(questions: Sequence[Question]) -> float:
    """Return the distance of a person's probabilities from an unknown person's: the mean of KL(person || anybody) over
    the questions, in nats. If one more answer is expected to give more, too little is known about the person."""
    p, q = (
        np.clip([getattr(question, name) for question in questions], 1e-7, 1 - 1e-7)
        for name in ("probability", "of_anybody")
    )
    return float(np.mean(p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))))


def ask(
    model: str | Path | PersonalisedModel,
    *,
    user: str | Path | Records | None,
    candidates: str | Path | Records,
) -> list[Question]:
    """Return the candidate questions, the most informative first.

    Args:
      model: Folder of a fitted method, or the result of :func:`prb_jax.load` for it.
      user: Labelled comparisons of the person: records or a file; None for an unknown person.
      candidates: Questions with two responses each, records or a file; labels are ignored.

    Raises:
      RunError: the model does not adapt to users.
      DataError: there are fewer than two candidates, a candidate does not have two different responses, comparisons
        belong to several users, or one is uninformative: identical responses, or a pair judged both ways.
    """
    rm = model if isinstance(model, PersonalisedModel) else load(str(model))
    if not isinstance(rm, PersonalisedModel):
        raise RunError(f"{model}: does not adapt to users; expected a folder of a fitted method")
    known = () if user is None else tuple(_read(user, labelled=True))
    pool = _read(candidates, labelled=False)
    if len(names := {one.user_id for one in known}) > 1:
        raise DataError(f"user: expected comparisons of one person, found {len(names)} users")
    if len(pool) < 2:
        raise DataError(f"candidates: expected at least 2 questions, found {len(pool)}")
    kept, left_out = informative_comparisons(known)
    if left_out:
        odd = next(one for one in known if all(one is not other for other in kept))
        raise DataError(
            f"user: comparison {quote(odd.id)} is uninformative: {', '.join(left_out)}; remove it"
        )
    for one in pool:
        if len(one.responses) != 2 or one.responses[0] == one.responses[1]:
            count = len(one.responses) if len(one.responses) != 2 else "2 equal ones"
            raise DataError(
                f"candidates: comparison {quote(one.id)}: expected 2 different responses, found {count}"
            )
    places = sorted({int(place) for place in np.linspace(0, len(pool) - 1, min(POOL, len(pool))).round()})
    asked = [pool[place] for place in places]
    answered = [(*known, replace(one, labels=labels)) for labels in ((1.0, 0.0), (0.0, 1.0)) for one in pool]
    margins = rm.margins([known, *answered], asked)  # [1 + 2 Q, J]
    before, after = margins[0].astype(np.float64), margins[1:].astype(np.float64)
    # KL of two Bernoulli distributions with these log odds, in nats
    p = 1 / (1 + np.exp(-after))
    divergence = p * (after - before) + np.logaddexp(0, before) - np.logaddexp(0, after)
    divergence = divergence.reshape(2, len(pool), len(asked))
    divergence[:, places, np.arange(len(places))] = np.nan  # excludes a question's information about itself
    chance, of_anybody = 1 / (1 + np.exp(-rm.margins([known, ()], pool).astype(np.float64)))
    information = chance * np.nanmean(divergence[0], axis=1) + (1 - chance) * np.nanmean(
        divergence[1], axis=1
    )
    rule = rm.pref_rule(known, pool)
    questions = [
        Question(
            one.id,
            one.question,
            (one.responses[0], one.responses[1]),
            float(information[q]),
            float(chance[q]),
            float(of_anybody[q]),
            None if rule is None else float(rule[q]),
        )
        for q, one in enumerate(pool)
    ]
    return sorted(questions, key=lambda question: -question.information)


def _read(data: str | Path | Records, *, labelled: bool) -> Sequence[Comparison]:
    if isinstance(data, str | Path):
        comparisons = [row.value for row in read_records(read_rows(Path(data)), labelled=labelled)]
        if not comparisons:
            raise DataError(f"{data}: no comparisons in it; expected at least one")
        return comparisons
    return as_comparisons(data, labelled=labelled)
