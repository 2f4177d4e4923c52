"""Fits that are made once: who chooses among them, and whose margins they give."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from prb_jax.personal.few_shot import bayes, fitting
from prb_jax.personal.few_shot.choices import halves
from prb_jax.personal.few_shot.cross_fit import CrossFitData
from prb_jax.personal.few_shot.protocol import Fitted
from prb_jax.personal.few_shot.stacked import FOLDS, PARTS, folds_of_people, unchosen_margins
from prb_jax.personal.few_shot.taste_steps import changed_fit
from tests.personal.few_shot.test_stacked import FEW, people

KEY = jax.random.key(0)
SETTINGS = bayes.BayesSettings(
    l2=(1e-2,), rank=(1, 2), scale=(0.3, 1.0, 3.0), basis_l2=(1.0,), spread=(0.1, 0.3, 1.0), profile_l2=(10.0,),
    words=(0.3, 1.0), directions=2,
)  # fmt: skip


def data(kind: str) -> CrossFitData:
    made = people(kind, seed=3, users=110, seen=60, validation=40)
    return CrossFitData(bayes.METHOD, made.seen, made.validation, SETTINGS, KEY)


def test_those_who_count_choose_among_fits_that_are_evaluated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated, evaluate = list[Fitted](), fitting.FitData.margins
    monkeypatch.setattr(
        fitting.FitData, "margins", lambda self, fit: evaluated.append(fit) or evaluate(self, fit)
    )
    whole = data("directions")
    plain = bayes._nobody(whole)
    fits = [plain, *(changed_fit(plain, {"slope": slope}) for slope in (0.5, 2.0, 3.0))]
    evaluated.clear()
    losses = []
    for user in np.unique(whole.validation.users):
        of_user = whole.chosen_by(np.arange(whole.validation.number_of_users) == user)
        margins, places = whole.margins(plain)
        own = margins[whole.validation.users[places] == user]
        assert of_user.loss(plain) == pytest.approx(np.logaddexp(0, -own.astype(np.float64)).mean())
        best = of_user.best(fits)
        losses.append(min(map(of_user.loss, fits)))
        assert of_user.loss(best) == losses[-1]
        assert float(best.numbers[fitting.LOSS]) == pytest.approx(whole.loss(best))  # of all people
        assert of_user.best([best]) is best
    assert whole.loss(whole.best(fits)) > np.mean(losses)
    assert len(evaluated) == len(fits) - 1  # the first one was known


def test_margins_do_not_depend_on_choices_of_the_people_who_are_predicted() -> None:
    """With all choices of a fold turned round that are predicted, its margins are the same for the other sides."""
    whole = data("words")
    fold = folds_of_people(whole)
    assert np.bincount(fold[fold >= 0]).tolist() == [40 // FOLDS] * FOLDS
    asked = halves(whole.validation, seed=0)
    whole = replace(whole, validation=replace(whole.validation, queries=asked))
    before, users = unchosen_margins(whole)
    assert before.shape == (len(users), len(PARTS))
    first = fold[whole.validation.users] == 0
    told = replace(whole.validation, queries=None)
    swapped = asked & first
    turned = replace(
        told,
        chosen=np.where(swapped, told.rejected, told.chosen),
        rejected=np.where(swapped, told.chosen, told.rejected),
        queries=asked,
    )
    after, _ = unchosen_margins(replace(whole, validation=turned, shared={}))
    of_fold = fold[users] == 0
    np.testing.assert_allclose(after[of_fold], -before[of_fold], atol=1e-5)
    assert np.abs(after[~of_fold] - before[~of_fold]).max() > 0.01  # who chose by these choices
    numbers = [
        bayes.fit_parts(replace(whole, validation=one, shared={}))["bayes"].numbers for one in (told, turned)
    ]
    assert numbers[0] != numbers[1]


def test_one_person_alone_chooses_and_is_predicted() -> None:
    made = people("directions", seed=0, users=40, seen=30, validation=1)
    alone = CrossFitData(bayes.METHOD, made.seen, made.validation, replace(SETTINGS, rank=FEW.rank), KEY)
    margins, users = unchosen_margins(alone)
    assert len(np.unique(users)) == 1
    expected = [alone.margins(one)[0] for one in bayes.fit_parts(alone).values()]
    np.testing.assert_array_equal(margins, np.stack(expected, axis=1))
